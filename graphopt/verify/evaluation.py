"""What a graph computes, as terms: one walk over its nodes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import get_outputs, is_random, may_alias, written
from graphopt.optim.lists import list_schema
from graphopt.verify.axioms import RULES, reduced
from graphopt.verify.problems import Problem
from graphopt.verify.terms import (
    Origins,
    Pending,
    ScalarValue,
    TensorValue,
    Terms,
    canonical,
    elements,
    tensor_value,
    whole,
)
from graphopt.verify.traits import traits_of

_ELEMENTWISE = ("all_reduce", "broadcast")


class NotDecidedError(Exception):
    """A graph does something about which terms cannot speak."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.problem = Problem(f"not decided: {message}", (node,), hint=_HINT)


_HINT = (
    "write it in the captured dialect (docs/ir.md): functional operators, and copy_ into inputs as"
    " the only update; or check dependencies alone with verify='dependencies'"
)


@dataclass
class Evaluation:
    """What one run of a graph leaves.

    Attributes:
        results, carried: values that the graph returns.
        states: value of each placeholder that the graph updates, by its target.
        draws: how many operators drew random numbers or moved a generator.
        effects: keys of what the host sees, in order.
        sent: for each kind of collective and term, at which elements more or fewer copies begin
            to be sent than before.
        origins: the first node of each term.
    """

    results: list[Any] = field(default_factory=list)
    carried: list[Any] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    draws: int = 0
    effects: list[Any] = field(default_factory=list)
    sent: dict[Any, Counter[int]] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)


def evaluate_graph(
    gm: fx.GraphModule | fx.Graph,
    terms: Terms,
    inputs: dict[str, Any] | None = None,
) -> Evaluation:
    """What a graph gives for arbitrary inputs, or for some that are terms already.

    Args:
        terms: shared by all graphs that are compared.
        inputs: values of placeholders by target; a placeholder without one is arbitrary.

    Raises:
        NotDecidedError: naming the node that terms cannot speak of.
    """
    return _Evaluator(gm.graph if isinstance(gm, fx.GraphModule) else gm, terms, inputs or {}).run()


def input_value(terms: Terms, node: fx.Node) -> Any:
    """An arbitrary value of a placeholder."""
    return _fresh(terms, ("input", str(node.target)), node.meta.get("val"))


class _Evaluator:
    def __init__(self, graph: fx.Graph, terms: Terms, inputs: dict[str, Any]) -> None:
        self._graph, self._terms, self._inputs = graph, terms, inputs
        self._values: dict[fx.Node, Any] = {}
        self._root: dict[fx.Node, fx.Node] = {}
        self._version: Counter[fx.Node] = Counter()
        self._seen: dict[fx.Node, int] = {}
        self._found = Evaluation()

    def run(self) -> Evaluation:
        for node in self._graph.nodes:
            if node.op == "output":
                break
            self._values[node] = self._value(node)
            self._note(node)
        self._finish()
        return self._found

    def _note(self, node: fx.Node) -> None:
        """Remember which node gave a term first, and at which version of its storage."""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and _compat.has_symbolic_shape(value):
            raise NotDecidedError("its shape is not known", node)
        for term in _terms_in(self._values[node]):
            self._found.origins.setdefault(term, node)
        source = node.args[0] if node.args else None
        aliases = (may_alias(node) or traits_of(node).wait) and isinstance(source, fx.Node)
        root = self._root[source] if aliases else node  # type: ignore[index]
        self._root[node] = root
        self._seen[node] = self._version[root]

    def _finish(self) -> None:
        outputs = get_outputs(self._graph)
        self._found.results = [self._read(value) for value in outputs.results]
        self._found.carried = [self._read(value) for value in outputs.carried]
        for node, count in self._version.items():
            if count and node.op == "placeholder":
                self._found.states[str(node.target)] = self._values[node]

    # ------------------------------------------------------------------------------ reading

    def _read(self, value: Any) -> Any:
        """An argument: nodes as their values."""
        if isinstance(value, fx.Node):
            return self._read_node(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._read(entry) for entry in value)
        if isinstance(value, dict):
            return {key: self._read(entry) for key, entry in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._read, (value.start, value.stop, value.step)))
        return value

    def _read_node(self, node: fx.Node) -> Any:
        root = self._root[node]
        if node is not root and self._seen[node] != self._version[root]:
            raise NotDecidedError(
                f"%{node.name} is read after %{root.name}, whose storage it shares, was updated",
                node,
            )
        return self._values[node]

    # ---------------------------------------------------------------------------- computing

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            given = self._inputs.get(str(node.target))
            return input_value(self._terms, node) if given is None else given
        if node.op == "get_attr":
            return _fresh(self._terms, ("attribute", str(node.target)), node.meta.get("val"))
        if node.op != "call_function":
            raise NotDecidedError(f"it calls {node.op} {node.target}", node)
        traits = traits_of(node)
        if traits.copies:
            return self._copy(node)
        if written(node):
            raise NotDecidedError("it updates an argument in place", node)
        if traits.wait:
            return self._waited(node)
        if traits.collective:
            return self._collective(node, traits.reduction)
        if node.target is operator.getitem:
            return self._item(node)
        return self._call(node)

    def _call(self, node: fx.Node) -> Any:
        arguments = self._arguments(node)
        self._refuse_pending(node, arguments)
        if list_schema(node) is not None:
            entries = self._entries(node, arguments)
            if entries is not None:
                return entries
        target = node.target
        extra: tuple[Any, ...] = ()
        if is_random(node):
            extra = ("draw", self._found.draws)
            self._found.draws += 1
        elif isinstance(target, _compat.OpOverload) and isinstance(
            node.meta.get("val"), (torch.Tensor, list, tuple)
        ):
            rule = RULES.get(target._schema.name)
            value = rule and rule.apply(self._terms, target, arguments, node.meta["val"])
            if value is not None:
                return value
        key = ("call", _target_name(target), *extra, canonical(arguments))
        if not extra and node.is_impure():
            self._found.effects.append(key)
        return _fresh(self._terms, key, node.meta.get("val"))

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """Arguments by name, defaults filled in; of Python functions by position."""
        args, kwargs = self._read(node.args), self._read(node.kwargs)
        if not isinstance(node.target, _compat.OpOverload):
            return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
        found = {}
        for index, (name, default) in enumerate(_parameters(node.target)):
            found[name] = args[index] if index < len(args) else kwargs.get(name, default)
        return found

    def _refuse_pending(self, node: fx.Node, arguments: Any) -> None:
        if any(isinstance(value, Pending) for value in _leaves(arguments)):
            raise NotDecidedError("it reads what a collective gives before its wait", node)

    def _entries(self, node: fx.Node, arguments: dict[str, Any]) -> Any:
        """A list operator as one call for each entry; None where entries cannot be told apart."""
        fake = node.meta["val"]
        lists = {
            name: value
            for name, value in arguments.items()
            if isinstance(value, tuple) and name in _list_parameters(node.target)
        }
        length = len(next(iter(lists.values()), ()))
        if any(value and len(value) != length for value in lists.values()):
            return None
        shared = [value for name, value in arguments.items() if name not in lists]
        if any(isinstance(v, TensorValue) and elements(v.shape) != 1 for v in shared):
            return None
        several = isinstance(fake, tuple) or (bool(fake) and isinstance(fake[0], (list, tuple)))
        columns = list(fake) if several else [fake]
        rows = [self._entry(node, arguments, lists, index, columns) for index in range(length)]
        found = tuple(
            tuple(row[number] for row in rows) if column else ()
            for number, column in enumerate(columns)
        )
        return found if several else found[0]

    def _entry(
        self,
        node: fx.Node,
        arguments: dict[str, Any],
        lists: dict[str, Any],
        index: int,
        columns: Sequence[Any],
    ) -> list[Any]:
        one = {
            name: (value[index] if value else None) if name in lists else value
            for name, value in arguments.items()
        }
        key = ("entry", str(node.target), canonical(one))
        return [
            _fresh(self._terms, (*key, number), column[index]) if column else None
            for number, column in enumerate(columns)
        ]

    def _item(self, node: fx.Node) -> Any:
        source, index = self._read(node.args[0]), cast(Any, node.args[1])
        if isinstance(source, Pending):
            return Pending(source.value[index]) if isinstance(source.value, tuple) else source
        if isinstance(source, tuple) and isinstance(index, int):
            return source[index]
        key = ("call", "getitem", canonical(source), canonical(self._read(index)))
        return _fresh(self._terms, key, node.meta.get("val"))

    # ------------------------------------------------------------------------- communication

    def _collective(self, node: fx.Node, reduction: str) -> Any:
        arguments = self._arguments(node)
        self._refuse_pending(node, arguments)
        first, sent = next(iter(arguments.items()))
        options = canonical({name: v for name, v in arguments.items() if name != first})
        kind = (reduction, options)
        self._count(kind, sent)
        fake = node.meta["val"]
        if reduction in _ELEMENTWISE and self._is_static(sent):
            if isinstance(sent, tuple):
                pairs = zip(sent, fake, strict=True)
                return Pending(tuple(reduced(self._terms, kind, v, f) for v, f in pairs))
            return Pending(reduced(self._terms, kind, sent, fake))
        return Pending(_fresh(self._terms, ("collective", *kind, canonical(sent)), fake))

    def _is_static(self, sent: Any) -> bool:
        values = sent if isinstance(sent, tuple) else (sent,)
        return all(isinstance(value, TensorValue) and value.is_static for value in values)

    def _count(self, kind: Any, sent: Any) -> None:
        for value in sent if isinstance(sent, tuple) else (sent,):
            for segment in value.segments if isinstance(value, TensorValue) else ():
                if not self._terms[segment.term].uniform:
                    edges = self._found.sent.setdefault((kind, segment.term), Counter())
                    edges[segment.start] += 1
                    edges[segment.start + segment.length] -= 1

    def _waited(self, node: fx.Node) -> Any:
        value = self._read(node.args[0])
        if not isinstance(value, Pending):
            raise NotDecidedError("it waits for something that is not a collective's", node)
        return value.value

    # -------------------------------------------------------------------------------- state

    def _copy(self, node: fx.Node) -> Any:
        destination = cast(fx.Node, node.args[0])
        root = self._root[destination]
        arguments = self._arguments(node)
        self._refuse_pending(node, arguments)
        written_over, source = self._values[root], arguments["src"]
        if destination is not root and not _is_copy_of(destination, root):
            raise NotDecidedError(f"it updates a part of %{root.name}", node)
        fake = destination.meta["val"]
        value = _copied(self._terms, written_over, source, fake)
        if value is None:
            raise NotDecidedError("what it writes has another shape than its destination", node)
        self._values[root] = value
        self._version[root] += 1
        return value


def _is_copy_of(node: fx.Node, root: fx.Node) -> bool:
    """Whether a node is the result of updates of `root` as a whole."""
    while node is not root:
        if not traits_of(node).copies:
            return False
        node = cast(fx.Node, node.args[0])
    return True


def _copied(terms: Terms, before: Any, source: Any, fake: torch.Tensor) -> TensorValue | None:
    if not isinstance(source, TensorValue) or not isinstance(before, TensorValue):
        return None
    if source.shape != before.shape:
        return None
    if source.dtype == before.dtype:
        return tensor_value(source.segments, fake)
    return cast(TensorValue, RULES["aten::_to_copy"].apply(terms, None, {"self": source}, fake))


def _fresh(terms: Terms, key: tuple[Any, ...], fake: Any) -> Any:
    """A value of which nothing is known but its key."""
    if isinstance(fake, torch.Tensor):
        return whole(terms.make(key), fake)
    if isinstance(fake, (list, tuple)):
        return tuple(_fresh(terms, (*key, index), entry) for index, entry in enumerate(fake))
    return ScalarValue(terms.make(key))


def _terms_in(value: Any) -> list[int]:
    if isinstance(value, Pending):
        return _terms_in(value.value)
    if isinstance(value, TensorValue):
        return [segment.term for segment in value.segments]
    if isinstance(value, ScalarValue):
        return [value.term]
    if isinstance(value, tuple):
        return [term for entry in value for term in _terms_in(entry)]
    return []


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (TensorValue, Pending)):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for entry in value for leaf in _leaves(entry)]
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in _leaves(entry)]
    return [value]


def _target_name(target: Any) -> str:
    if isinstance(target, _compat.OpOverload):
        return str(target)
    module = getattr(target, "__module__", "")
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return f"{module}.{name}" if name and "<" not in name else f"{module}.{name} {id(target)}"


@lru_cache(maxsize=4096)
def _parameters(target: Any) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of the arguments of an operator."""
    return tuple(
        (argument.name, tuple(default) if isinstance(default, list) else default)
        for argument in target._schema.arguments
        for default in [argument.default_value]
    )


@lru_cache(maxsize=4096)
def _list_parameters(target: Any) -> frozenset[str]:
    return frozenset(
        argument.name
        for argument in target._schema.arguments
        if isinstance(argument.type, torch.ListType)
    )
