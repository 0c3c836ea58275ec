"""Analysis of a trace's writes: which nodes the functional graph can keep unchanged.

Most of a trace is functional already. An operator that makes new tensors is, whoever writes to them
later; a view is where nobody in the whole trace writes to its memory. And where memory is only ever
written as a whole, as optimizers write, nothing has to be followed:

    mul_(p, 0.9)                       q = mul(p, 0.9)
    … p …                ──▶           … q …

Who reads `p` behind the write reads what is computed in its place. What else writes, or reads a
part that was taken before the write, is left to torch's functionalization.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.cached_tracing import written_as_it_is
from graphopt._compat.known_nodes import is_sized
from graphopt.graph_utils import is_operator, written
from graphopt.ir import inplace
from graphopt.ir.metadata import has_value, known_value
from graphopt.ir.operators import fused_optimizer, rounds_a_list_in_place
from graphopt.tracing.effects.decisions import SIZED
from graphopt.tracing.exactness import spectra, statistics
from graphopt.tracing.scalars import numbers
from graphopt.tracing.scalars.functions import PYTHON_FUNCTIONS

aten = torch.ops.aten


class WholeWrites:
    """The writes of a traced graph.

    Attributes:
        whole: nodes whose values are all of a storage that is only written as a whole, with that
            storage.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._first: dict[int, torch.Tensor] = {}  # what a storage begins with
        self._count: defaultdict[int, int] = defaultdict(int)
        self._behind: dict[fx.Node, dict[int, int]] = {}  # how many writes a value has seen
        self._refused: set[int] = set()
        self.whole: dict[fx.Node, int] = {}
        self._writers: list[list[fx.Node]] = []
        for node in graph.nodes:
            self._look_at(node)
        self._refuse_parts_of_lists()
        self.whole = {node: s for node, s in self.whole.items() if s not in self._refused}

    def copied(self, node: fx.Node) -> bool:
        """True if the functional graph has the same node."""
        if not is_functional(node):
            return False
        view = isinstance(node.target, _compat.OpOverload) and node.target.is_view
        return not view or all(map(self._stays, self._behind[node].items()))

    def _stays(self, seen: tuple[int, int]) -> bool:
        storage, count = seen
        return not self._count[storage] or (count == 0 and storage not in self._refused)

    def functional_form(self, node: fx.Node) -> Callable[..., Any] | None:
        """Returns the operator that computes what a node writes, if it writes whole storages only,
        or None."""
        functional = functional_form(node)
        if functional is None or not all(target in self.whole for target in written(node)):
            return None
        return functional

    def _look_at(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in self.whole:
                seen = self._behind[source].items()
                self._refused.update(s for s, count in seen if count != self._count[s])
        functional = functional_form(node) is not None
        targets = list(perhaps_written(node))
        if functional:
            self._writers.append(targets)
        for target in targets:
            for storage in self._behind[target]:
                if not functional or target not in self.whole:
                    self._refused.add(storage)
                self._count[storage] += 1
        if node.op != "output":
            follows = functional or is_functional(node) or node.target is operator.getitem
            self._note_result(node, follows)

    def _refuse_parts_of_lists(self) -> None:
        """Excludes all entries of a list operator if one of them is excluded."""
        before = -1
        while len(self._refused) > before:
            before = len(self._refused)
            for targets in self._writers:
                storages = {s for target in targets for s in self._behind[target]}
                if not storages.isdisjoint(self._refused):
                    self._refused |= storages

    def _note_result(self, node: fx.Node, follows: bool) -> None:
        """Records the storages of the tensors that a node computes.

        Args:
            follows: they are known for views, or what the node writes to.
        """
        value = known_value(node)
        behind = self._behind[node] = {}
        for tensor in _compat.tree_leaves(value):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = _compat.storage_key(tensor)
            behind[storage] = self._count[storage]
            first = self._first.setdefault(storage, tensor)
            strange = node.op == "get_attr" or not is_sized(tensor)
            if strange or (first is not tensor and not follows):
                self._refused.add(storage)
            elif tensor is value and _kind(tensor) == _kind(first):
                self.whole[node] = storage


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.device


def functional_form(node: fx.Node) -> Callable[..., Any] | None:
    """Returns the operator that computes all that a node writes, or None if it has other
    effects."""
    if node.op != "call_function" or not isinstance(node.target, _compat.OpOverload):
        return None
    target, name = node.target, _compat.operator_name(node.target)
    if not name.startswith("aten::") or torch.Tag.inplace_view in target.tags:
        return None
    fused = fused_optimizer(target)
    if fused is not None:
        return _overload(fused, target)
    if not name.endswith("_") or name == "aten::copy_":
        return None
    listed = name.startswith("aten::_foreach_")
    if listed and rounds_a_list_in_place(target, map(known_value, _entries(node.args[0]))):
        return None
    special = (
        None if listed else inplace.functional_form(target, fx.map_arg(node.args, known_value))
    )
    if special is not None or listed or torch.Tag.pointwise in target.tags:
        return special or _overload(name.removeprefix("aten::").removesuffix("_"), target)
    return None


@cache
def _overload(name: str, like: Any) -> Callable[..., Any] | None:
    packet = getattr(aten, name, None)
    return None if packet is None else next(inplace.overloads_like(packet, like), None)


def _entries(listed: Any) -> Sequence[fx.Node]:
    return listed if isinstance(listed, (list, tuple)) else ()


OF_NUMBERS = frozenset(numbers.ARITHMETIC) | PYTHON_FUNCTIONS
"""Functions that nodes of numbers call."""


def is_functional(node: fx.Node) -> bool:
    """True if functionalization would leave a node's operator as it is, unless it is a view of
    written memory or has unknown sizes."""
    if node.op != "call_function" or SIZED in node.meta:
        return False
    if not (has_value(node) or _gives_nothing(node)):
        return False
    if not is_sized(known_value(node)) or _has_integers(node):
        return False
    if node.target in OF_NUMBERS:
        return isinstance(known_value(node), torch.SymFloat)
    if not written_as_it_is(node.target) or is_operator(node.target, *spectra.OPERATORS):
        return False
    sources = node.all_input_nodes
    return node.target not in statistics.KERNELS and all(s.op != "get_attr" for s in sources)


def _gives_nothing(node: fx.Node) -> bool:
    """True if an operator only checks its arguments, as `aten::_linalg_check_errors` does."""
    target = node.target
    return isinstance(target, _compat.OpOverload) and not _compat.schema_of(target).returns


def _has_integers(node: fx.Node) -> bool:
    """True if a node takes computed integers or booleans."""
    kinds = (torch.SymInt, torch.SymBool)
    return any(isinstance(known_value(source), kinds) for source in node.all_input_nodes)


def perhaps_written(node: fx.Node) -> Sequence[fx.Node]:
    """Returns what a node writes; all of its inputs if it may write secretly, as batch norm
    does."""
    if node.op != "call_function" or node.target is operator.getitem:
        return ()
    if isinstance(node.target, _compat.OpOverload) and _compat.schema_of(node.target).is_mutable:
        return written(node)
    as_it_is = written_as_it_is(node.target) and node.target not in statistics.KERNELS
    return () if as_it_is else node.all_input_nodes
