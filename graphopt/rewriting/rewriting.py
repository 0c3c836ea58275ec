"""`graphopt.rewrite`: find a pattern, and put a replacement in its place.

    t    = t(weight)          pattern(x, w):               t_1 = addmm(bias, x, t)
    mm   = mm(x, t)               return x @ w      ==>
    add  = add(mm, bias)      …

What stands between the inputs and the outputs of a place goes, and what the replacement computes
comes in: its forward side before the first result, its backward side before the first gradient. A
result that lies in memory otherwise than before is copied into the old layout, so that nothing that
reads it computes other bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import call_function_with_meta, tensors_in, written
from graphopt.ir.families import COLLECTIVE_NAMESPACE
from graphopt.iter_graph import IterGraph
from graphopt.rewriting.matching import Match, Search, Targets, match_of
from graphopt.rewriting.patterns import Pattern, RewriteError, parameters_of, trace
from graphopt.rewriting.places import RewrittenPlace, note_place

_SIZE = 4
"""Of each dimension of example tensors."""

_RANKS = (4, 3, 2, 1, 0)

aten = torch.ops.aten


def rewrite(
    gm: fx.GraphModule,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    where: Callable[[Match], bool] | None = None,
    gradients: Sequence[str] = (),
    examples: Mapping[str, torch.Tensor | int] | None = None,
    tolerance: float | None = None,
) -> int:
    """Put `replacement` wherever `pattern` stands in a graph.

    Both are Python functions of the same parameters, written with whatever torch offers, and are
    traced to ATen for the shapes, strides and dtypes of each place. Parameters are tensors; one
    that is annotated ``float`` stands for a number in the graph. Layout, metadata (line, phase,
    module path) and provenance are kept.

    A place is left alone where a value within it is read from outside, where it reaches over two
    phases or into the next iteration, where it overlaps a place before it, where it writes or
    communicates, and where an input is computed too late.

    Inside a pass, a rewrite is proven like any edit. Where a pass is declared with
    ``changes_numerics=True``, everything outside of the rewritten places is proven, and each
    distinct place is run before and after on random inputs, and compared with `tolerance`.

    Args:
        gm: its graph is edited.
        pattern: what to look for; returns a tensor, or several.
        replacement: what to put there; returns as many, of the same shapes and dtypes.
        where: given each `Match`, says whether to rewrite it.
        gradients: parameters through which gradients flow: then the place is the forward side
            together with the backward side that autograd makes of it, and the replacement's
            backward comes with it.
        examples: tensors like those that parameters stand for, or their number of dimensions alone.
            Only that number and the dtype matter, sizes do not. Without an example, all
            parameters have the same, any number of dimensions, and any floating dtype in the graph.
        tolerance: of the comparison, relative to the largest element of an output; None: 1e-6 for
            float64, 1e-3 for float32, 3e-2 for smaller types.

    Returns:
        The number of places that were rewritten.

    Raises:
        RewriteError: pattern or replacement cannot be traced, or give other kinds of tensors.
            Nothing is changed.

    >>> import graphopt, torch
    >>> def step(x):
    ...     return torch.relu(torch.relu(x)) + 1
    >>> gm = graphopt.capture(step, torch.ones(3)).graph_module
    >>> graphopt.rewrite(gm, lambda x: x.relu().relu(), lambda x: x.relu())
    1
    """
    rule = _Rule(pattern, replacement, tuple(gradients), dict(examples or {}))
    exchanges = list(_exchanges(gm.graph, rule, where))
    renamed: dict[fx.Node, fx.Node] = {}
    for exchange in exchanges:
        _exchange(gm.graph, exchange, renamed, rule, tolerance)
    return len(exchanges)


class _Rule:
    """Pattern and replacement, with the traces that were made of them."""

    def __init__(
        self,
        pattern: Callable[..., Any],
        replacement: Callable[..., Any],
        gradients: tuple[str, ...],
        examples: dict[str, torch.Tensor | int],
    ) -> None:
        self.pattern, self.replacement = pattern, replacement
        self.gradients, self.examples = gradients, examples
        self.parameters = parameters_of(pattern)
        self.name = getattr(pattern, "__name__", "pattern")
        _check_parameters(self, parameters_of(replacement))
        self._traces: dict[Any, Pattern | Exception] = {}

    def traced(self, side: str, match: Match | _Rough) -> Pattern:
        """Pattern or replacement for the tensors of a place. Raises what the function raises."""
        arguments = {n: _held(match.inputs[n]) for n in self.parameters}
        incoming = [_held(node) for node in match.incoming]
        key = side, *map(_kind_of, [*arguments.values(), *incoming])
        if key not in self._traces:
            function = self.pattern if side == "pattern" else self.replacement
            try:
                self._traces[key] = trace(function, arguments, self.gradients, incoming or None)
            except Exception as error:
                self._traces[key] = error
        found = self._traces[key]
        if isinstance(found, Exception):
            raise found
        return found


@dataclass(frozen=True)
class _Rough:
    """What the parameters of a pattern may stand for."""

    inputs: Mapping[str, Any]
    incoming: tuple[fx.Node, ...]
    result: tuple[fx.Node, fx.Node] | None


@dataclass(frozen=True)
class _Exchange:
    match: Match
    new: Pattern


def _check_parameters(rule: _Rule, others: Mapping[str, bool]) -> None:
    if len(others) != len(rule.parameters):
        raise RewriteError(
            f"the replacement takes {list(others)}, and the pattern {list(rule.parameters)}",
            hint="both take the same parameters, in the same order",
        )
    if list(others) != list(rule.parameters):
        raise RewriteError(f"name the parameters of the replacement as those of {rule.name}")
    for name in (*rule.gradients, *rule.examples):
        if name not in rule.parameters or rule.parameters[name]:
            raise RewriteError(f"{name!r} is no tensor among the parameters of {rule.name}")


def _held(value: Any) -> Any:
    """The fake tensor of a node, without autograd history; or the number itself."""
    if not isinstance(value, fx.Node):
        return value
    held = value.meta.get("val")
    return held.detach() if isinstance(held, torch.Tensor) else held


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return type(value), value


# -------------------------------------------------------------------------------------- finding


def _exchanges(
    graph: fx.Graph, rule: _Rule, where: Callable[[Match], bool] | None
) -> Iterator[_Exchange]:
    taken: set[fx.Node] = set()
    for match in _matches(graph, rule):
        if not taken.isdisjoint(match.nodes) or not _can_go(graph, match):
            continue
        if where is not None and not where(match):
            continue
        try:
            new = rule.traced("replacement", match)
        except RewriteError:
            raise
        except Exception as error:
            raise RewriteError(
                f"the replacement of {rule.name} cannot be traced for %{match.results[0].name}:"
                f" {type(error).__name__}: {error}"
            ) from error
        _check_outputs(rule, match, new)
        if _is_in_reach(match, new):
            taken.update(match.nodes)
            yield _Exchange(match, new)


def _matches(graph: fx.Graph, rule: _Rule) -> Iterator[Match]:
    targets = Targets(graph)
    for rough in _rough_matches(graph, rule, targets):
        try:
            exact = rule.traced("pattern", rough)
        except Exception:  # for these shapes the function makes no sense, so that it is not this
            continue
        bound: dict[Any, Any] = {exact.inputs[n]: rough.inputs[n] for n in exact.inputs}
        bound.update(zip(exact.incoming, rough.incoming, strict=True))
        if rough.result is not None and exact.results[0].target is rough.result[0].target:
            bound[exact.results[0]] = rough.result[1]
        found = Search(exact, exact=True).at(bound)
        if found is not None:
            yield match_of(exact, found, exact.numbers)


def _rough_matches(graph: fx.Graph, rule: _Rule, targets: Targets) -> Iterator[_Rough]:
    seen: set[Any] = set()
    numbers = {
        _stands_for(n): n for n, is_number in enumerate(rule.parameters.values()) if is_number
    }
    names = list(rule.parameters)
    for pattern in _examples_traced(graph, rule):
        by_value = {value: names[number] for value, number in numbers.items()}
        for bound in Search(pattern, by_value, exact=False).everywhere(targets):
            inputs = {name: bound.get(node) for name, node in pattern.inputs.items()}
            inputs.update({name: bound.get(name) for name in by_value.values()})
            incoming: tuple[Any, ...] = tuple(bound.get(node) for node in pattern.incoming)
            result = pattern.results[0]
            key = *inputs.values(), *incoming, bound.get(result)
            if None in key[:-1] or key in seen:
                continue
            seen.add(key)
            yield _Rough(inputs, incoming, (result, bound[result]) if result in bound else None)


def _stands_for(number: int) -> float:
    """A number that nobody writes, in place of one that a pattern leaves open."""
    return 0.7310585786 + number * 2.0**-20


def _examples_traced(graph: fx.Graph, rule: _Rule) -> Iterator[Pattern]:
    """The pattern for example tensors, in all variants for which it can be traced."""
    values = [value for node in graph.nodes for value in tensors_in(node.meta.get("val"))]
    mode = _compat.fake_mode_of(values)
    if mode is None:
        return
    dtypes = dict.fromkeys(v.dtype for v in values if v.is_floating_point() and v.dim())
    device = next((v.device for v in values if v.dim()), values[0].device)
    traced, failure = False, None
    for rank, dtype in itertools.product(_ranks(rule), dtypes):
        try:
            plain = dict(_example_arguments(rule, rank, dtype, torch.device("meta")))
            with torch.no_grad():
                rule.pattern(**plain)  # torch writes a log where this fails on fake tensors
            with mode:
                arguments = dict(_example_arguments(rule, rank, dtype, device))
            pattern = trace(rule.pattern, arguments, rule.gradients)
        except RewriteError:
            raise
        except Exception as error:  # these examples do not fit the function
            failure = error
            continue
        if not pattern.calls:
            raise RewriteError(f"the pattern {rule.name} computes nothing")
        traced = True
        yield pattern
    if failure is not None and not traced:
        raise RewriteError(
            f"the pattern {rule.name} cannot be traced: {type(failure).__name__}: {failure}",
            hint='examples={"x": torch.empty(2, 3)} says what a parameter is like',
        ) from failure


def _ranks(rule: _Rule) -> Iterable[int]:
    tensors = [name for name, is_number in rule.parameters.items() if not is_number]
    return _RANKS if any(name not in rule.examples for name in tensors) else (0,)


def _example_arguments(
    rule: _Rule, rank: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Any]]:
    for number, (name, is_number) in enumerate(rule.parameters.items()):
        given = rule.examples.get(name, rank)
        if is_number:
            yield name, _stands_for(number)
            continue
        shape = (_SIZE,) * given if isinstance(given, int) else tuple(given.shape)
        kind = dtype if isinstance(given, int) else given.dtype
        yield name, torch.empty(shape, dtype=kind, device=device)


# ------------------------------------------------------------------------------------- checking


def _can_go(graph: fx.Graph, match: Match) -> bool:
    """Whether nobody outside needs what stands within, and all of it runs at one time."""
    nodes, outputs = set(match.nodes), set(match.outputs)
    if not outputs <= nodes or nodes & set(match.inputs.values()):
        return False
    if any(not nodes.issuperset(node.users) for node in nodes - outputs):
        return False
    if any(written(node) or _communicates(node) for node in nodes):
        return False
    if isinstance(graph, IterGraph) and not nodes.isdisjoint(graph.late):
        return False
    forward = _needed_for(match.results, match.nodes)
    sides = [forward, nodes - forward]
    return all(len({node.meta.get("phase") for node in side}) < 2 for side in sides)


def _communicates(node: fx.Node) -> bool:
    namespace = str(getattr(node.target, "namespace", ""))
    return namespace == COLLECTIVE_NAMESPACE


def _needed_for(results: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of `nodes` from which `results` are computed: the forward side."""
    within, found = set(nodes), set[fx.Node]()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node in within and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _check_outputs(rule: _Rule, match: Match, new: Pattern) -> None:
    if len(new.results) != len(match.results):
        raise RewriteError(
            f"the replacement of {rule.name} returns {len(new.results)} tensors,"
            f" and the pattern {len(match.results)}"
        )
    for name, was, now in zip(_names(rule, match), match.outputs, new.outputs, strict=True):
        kinds = [(v.dtype, list(v.shape), str(v.device)) for v in map(_held, (now, was))]
        if kinds[0] != kinds[1]:
            texts = [f"{dtype} of shape {shape} on {device}" for dtype, shape, device in kinds]
            raise RewriteError(
                f"{name} of the replacement of {rule.name} is {texts[0]}; in the pattern it is"
                f" {texts[1]}"
            )


def _names(rule: _Rule, match: Match) -> list[str]:
    results = [f"result {index}" for index in range(len(match.results))]
    return [*results, *(f"the gradient of {name}" for name in rule.gradients)]


def _is_in_reach(match: Match, new: Pattern) -> bool:
    """Whether each side of the replacement has its inputs where it is to stand."""
    forward = _needed_for(new.results, new.calls)
    stands_for = {new.inputs[name]: match.inputs[name] for name in new.inputs}
    stands_for.update(zip(new.incoming, match.incoming, strict=True))
    for node in new.calls:
        place = min(match.results if node in forward else match.gradients)
        given = [stands_for[source] for source in node.all_input_nodes if source in stands_for]
        if any(not source < place for source in given):
            return False
    return not match.gradients or min(match.results) < min(match.gradients)


# ----------------------------------------------------------------------------------- exchanging


def _exchange(
    graph: fx.Graph,
    exchange: _Exchange,
    renamed: dict[fx.Node, fx.Node],
    rule: _Rule,
    tolerance: float | None,
) -> None:
    match, new = exchange.match, exchange.new
    tensors = {n: v for n, v in match.inputs.items() if isinstance(v, fx.Node)}
    inputs = {name: renamed.get(node, node) for name, node in tensors.items()}
    incoming = [renamed.get(node, node) for node in match.incoming]
    made: dict[fx.Node, fx.Node] = {new.inputs[name]: inputs[name] for name in new.inputs}
    made.update(zip(new.incoming, incoming, strict=True))
    _insert(graph, exchange, made)
    outputs = []
    for was, node in zip(match.outputs, new.outputs, strict=True):
        output = _as_it_lay(graph, was, made[node])
        was.replace_all_uses_with(output)
        renamed[was] = output
        outputs.append(output)
    for node in reversed(match.nodes):
        if not node.users:
            graph.erase_node(node)
    names = [*tensors, *(f"gradient of result {i}" for i in range(len(incoming)))]
    note_place(
        graph,
        RewrittenPlace(
            rule.name,
            (*inputs.values(), *incoming),
            tuple(names),
            match.outputs,
            tuple(outputs),
            tuple(_names(rule, match)),
            tolerance,
        ),
    )


def _insert(graph: fx.Graph, exchange: _Exchange, made: dict[fx.Node, fx.Node]) -> None:
    """Put the calls of the replacement in; `made` has its placeholders, and gets its calls."""
    match, new = exchange.match, exchange.new
    forward = _needed_for(new.results, new.calls)
    for node in new.calls:
        assert callable(node.target)
        place = min(match.results if node in forward else match.gradients)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
        with graph.inserting_before(place):
            made[node] = call_function_with_meta(
                graph, node.target, tuple(args), dict(kwargs), like=place
            )


def _as_it_lay(graph: fx.Graph, was: fx.Node, now: fx.Node) -> fx.Node:
    """A value in the layout of another."""
    held, other = was.meta["val"], now.meta["val"]
    if held.stride() == other.stride():
        return now
    with graph.inserting_before(was):
        if held.is_contiguous():
            kwargs = {"memory_format": torch.contiguous_format}
            return call_function_with_meta(graph, aten.clone.default, (now,), kwargs, like=was)
        sizes = list(held.shape), list(held.stride())
        place = call_function_with_meta(
            graph, aten.new_empty_strided.default, (now, *sizes), like=was
        )
        return call_function_with_meta(graph, aten.copy.default, (place, now), like=was)
