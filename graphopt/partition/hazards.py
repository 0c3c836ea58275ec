"""Orders between nodes that no argument shows: updates in place, and random numbers.

y = x.sin()
x.add_(1)        must not run before y, nor after z
z = x.cos()
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import fx, nn

from graphopt import _compat
from graphopt.graph_utils import find_nodes, is_random, is_view, is_wait, tensors_in, written
from graphopt.partition.attributes import Attributes

_VIEWS = frozenset(
    {
        *("adjoint", "as_strided", "bfloat16", "broadcast_to", "chunk", "contiguous", "detach"),
        *("diagonal", "double", "dropout", "dsplit", "expand", "expand_as", "flatten", "float"),
        *("half", "hsplit", "imag", "moveaxis", "movedim", "narrow", "permute", "ravel", "real"),
        *("reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes"),
        *("swapdims", "t", "tensor_split", "to", "transpose", "type_as", "unbind", "unflatten"),
        *("unfold", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "vsplit"),
    }
)
"""Functions and methods of torch whose result may share storage with their first argument."""

_VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout)

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"),
        *("irshift", "isub", "itruediv", "ixor", "setitem"),
    )
)


class Reason(NamedTuple):
    """Why one node runs before another."""

    before: fx.Node
    after: fx.Node
    text: str

    def __str__(self) -> str:
        """In words, with the user's line where it is known."""
        words = f"%{self.after.name} {self.text} %{self.before.name}"
        source = self.after.meta.get("source")
        return words if source is None else f"{words}    from:  {source}"


def hazards(graph: fx.Graph, attributes: Attributes) -> Iterator[Reason]:
    """Pairs of calls that have to run in the order of the graph. Linear in the size of the graph.

    In graphs of operator overloads, schemas say what is written and viewed, and which operators are
    random. Above that level names do, and which functions are random is not known.
    """
    for before, after in pairwise(find_nodes(graph, is_random)):
        yield Reason(before, after, "draws random numbers after")
    writes = {node: _written(node, attributes) for node in graph.nodes}
    writes = {node: values for node, values in writes.items() if values}
    if writes:
        yield from _memory_order(graph, attributes, writes)


def _memory_order(
    graph: fx.Graph, attributes: Attributes, writes: dict[fx.Node, list[fx.Node]]
) -> Iterator[Reason]:
    storages = _Storages(graph, attributes, writes)
    updated = {storage for values in writes.values() for storage in storages.of(values)}
    last_write: dict[object, fx.Node] = {}
    readers: dict[object, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "output":
            break
        overwritten = storages.of(writes.get(node, ()))
        for storage in storages.of(_read_by(node)):
            if storage not in updated:
                continue
            if storage in last_write:
                yield Reason(last_write[storage], node, "reads what is updated by")
            if storage not in overwritten:
                readers[storage].append(node)
        for storage in overwritten:
            for reader in readers.pop(storage, ()):
                yield Reason(reader, node, "overwrites what is read by")
            last_write[storage] = node


def _read_by(node: fx.Node) -> list[fx.Node]:
    """Inputs of a node; of a wait, also what its collective may read until then."""
    sources = node.all_input_nodes
    if not is_wait(node):
        return sources
    return [*sources, *(sent for launch in sources for sent in launch.all_input_nodes)]


def _written(node: fx.Node, attributes: Attributes) -> list[fx.Node]:
    """Arguments that a call updates in place."""
    target = node.target
    if isinstance(target, _compat.OpOverload):
        return written(node)
    found = [node.kwargs.get("out")]
    if node.args and _updates_first(node, attributes):
        found.append(node.args[0])
    return [value for value in found if isinstance(value, fx.Node)]


def _updates_first(node: fx.Node, attributes: Attributes) -> bool:
    if node.kwargs.get("inplace") is True:
        return True
    if node.op == "call_module":
        module = attributes.find(node)
        return getattr(module, "inplace", False) is True
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        return node.target in _IN_PLACE_OPERATORS
    name = _name_of(node)
    return name.endswith("_") and not name.endswith("__")


def _name_of(node: fx.Node) -> str:
    if node.op == "call_function":
        return getattr(node.target, "__name__", "")
    return str(node.target) if node.op == "call_method" else ""


def _key(tensor: torch.Tensor) -> object:
    return ("storage", _compat.storage_key(tensor))


class _Storages:
    """Which nodes may share storage."""

    def __init__(
        self, graph: fx.Graph, attributes: Attributes, writes: dict[fx.Node, list[fx.Node]]
    ) -> None:
        self._parent: dict[object, object] = {}
        self._attributes = attributes
        for node in graph.nodes:
            if node.op == "get_attr":
                self._join(("attribute", node.target), node)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                self._join(_key(value), node)
            if self._shares_storage(node):
                for source in node.all_input_nodes[:1]:
                    self._join(source, node)
            if node.op != "call_function" or not isinstance(node.target, _compat.OpOverload):
                for value in writes.get(node, ()):
                    self._join(value, node)

    def of(self, nodes: Iterable[fx.Node]) -> list[object]:
        """What stands for the storages of nodes: several for a node with several results."""
        found: dict[object, None] = {}
        for node in nodes:
            value = node.meta.get("val")
            items = map(_key, tensors_in(value)) if isinstance(value, (tuple, list)) else [node]
            found.update(dict.fromkeys(map(self._find, items)))
        return list(found)

    def _find(self, item: object) -> object:
        parent = self._parent.setdefault(item, item)
        while parent != self._parent[parent]:
            self._parent[item] = self._parent[parent]
            item, parent = parent, self._parent[parent]
        return parent

    def _join(self, a: object, b: object) -> None:
        self._parent[self._find(b)] = self._find(a)

    def _shares_storage(self, node: fx.Node) -> bool:
        if isinstance(node.target, _compat.OpOverload) or node.target is operator.getitem:
            return self._by_schema(node)
        if node.op == "call_module":
            return isinstance(self._attributes.find(node), _VIEW_MODULES)
        if node.target is getattr:
            return node.args[1] in _VIEW_ATTRIBUTES
        return _name_of(node) in _VIEWS

    def _by_schema(self, node: fx.Node) -> bool:
        """The items of several results have storages of their own, which `val` tells apart."""
        sources = node.all_input_nodes[:1]
        several = any(isinstance(s.meta.get("val"), (tuple, list)) for s in sources)
        return (is_view(node) and not several) or is_wait(node)
