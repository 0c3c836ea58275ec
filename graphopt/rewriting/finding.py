"""The search for places where a rule's pattern occurs and its replacement fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_collective, is_wait, tensors_in, written
from graphopt.ir.metadata import known_value, phase_of
from graphopt.iter_graph import IterGraph
from graphopt.rewriting.matching import (
    CallsByTarget,
    Match,
    PatternSearch,
    calls_by_target,
    match_of,
)
from graphopt.rewriting.patterns import Pattern, RewriteError, parameters_of, trace

_SIZE = 4
"""The size of each dimension of example tensors."""

_RANKS = (4, 3, 2, 1, 0)


class Rule:
    """A pattern and its replacement, with their traces for different tensors."""

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

    def traced(self, side: str, match: Match | _CandidateBinding) -> Pattern:
        """Traces the pattern or replacement for the tensors of a place. Raises what the function
        raises."""
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
class _CandidateBinding:
    """A candidate binding of a pattern's parameters, not yet checked for these shapes."""

    inputs: Mapping[str, Any]
    incoming: tuple[fx.Node, ...]
    result: tuple[fx.Node, fx.Node] | None


@dataclass(frozen=True)
class Exchange:
    """A place where a rule applies, with the traced replacement."""

    match: Match
    new: Pattern


def _check_parameters(rule: Rule, others: Mapping[str, bool]) -> None:
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
    """Returns a node's fake tensor without autograd history, or the number itself."""
    if not isinstance(value, fx.Node):
        return value
    held = known_value(value)
    return held.detach() if isinstance(held, torch.Tensor) else held


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return type(value), value


# -------------------------------------------------------------------------------------- finding


def exchanges(
    graph: fx.Graph, rule: Rule, where: Callable[[Match], bool] | None
) -> Iterator[Exchange]:
    """Yields all places where a rule applies, disjoint and in graph order."""
    taken: set[fx.Node] = set()
    seen: set[tuple[fx.Node, ...]] = set()
    for match in _matches(graph, rule):
        if (
            match.nodes in seen
            or not taken.isdisjoint(match.nodes)
            or not _is_removable(graph, match)
        ):
            continue
        seen.add(match.nodes)
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
            yield Exchange(match, new)


def _matches(graph: fx.Graph, rule: Rule) -> Iterator[Match]:
    targets = calls_by_target(graph)
    for rough in _rough_matches(graph, rule, targets):
        try:
            exact = rule.traced("pattern", rough)
        except Exception:  # for these shapes the function makes no sense, so that it is not this
            continue
        bound: dict[Any, Any] = {exact.inputs[n]: rough.inputs[n] for n in exact.inputs}
        bound.update(zip(exact.incoming, rough.incoming, strict=True))
        if rough.result is not None and exact.results[0].target is rough.result[0].target:
            bound[exact.results[0]] = rough.result[1]
        found = PatternSearch(exact, exact=True).at(bound)
        if found is not None:
            yield match_of(exact, found, exact.numbers)


def _rough_matches(
    graph: fx.Graph, rule: Rule, targets: CallsByTarget
) -> Iterator[_CandidateBinding]:
    seen: set[Any] = set()
    numbers = {
        _stands_for(n): n for n, is_number in enumerate(rule.parameters.values()) if is_number
    }
    names = list(rule.parameters)
    for pattern in _examples_traced(graph, rule):
        by_value = {value: names[number] for value, number in numbers.items()}
        for bound in PatternSearch(pattern, by_value, exact=False).everywhere(targets):
            inputs = {name: bound.get(node) for name, node in pattern.inputs.items()}
            inputs.update({name: bound.get(name) for name in by_value.values()})
            incoming: tuple[Any, ...] = tuple(bound.get(node) for node in pattern.incoming)
            result = pattern.results[0]
            key = *inputs.values(), *incoming, bound.get(result)
            if None in key[:-1] or key in seen:
                continue
            seen.add(key)
            yield _CandidateBinding(
                inputs, incoming, (result, bound[result]) if result in bound else None
            )


def _stands_for(number: int) -> float:
    """Returns an unlikely number that marks a number parameter in a traced pattern."""
    return 0.7310585786 + number * 2.0**-20


def _examples_traced(graph: fx.Graph, rule: Rule) -> Iterator[Pattern]:
    """Yields the pattern traced for example tensors of each rank and dtype for which that works."""
    values = [value for node in graph.nodes for value in tensors_in(known_value(node))]
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
            hint='examples={"x": torch.empty(2, 3)} says what a parameter is like; a number of'
            f" dimensions stands for a tensor whose sizes are all {_SIZE}, and so should sizes be"
            " beside it",
        ) from failure


def _ranks(rule: Rule) -> Iterable[int]:
    tensors = [name for name, is_number in rule.parameters.items() if not is_number]
    return _RANKS if any(name not in rule.examples for name in tensors) else (0,)


def _example_arguments(
    rule: Rule, rank: int, dtype: torch.dtype, device: torch.device
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


def _is_removable(graph: fx.Graph, match: Match) -> bool:
    """True if no other node reads the inner nodes of a match, and all of them run in the same
    iteration."""
    nodes, outputs = set(match.nodes), set(match.outputs)
    if not outputs <= nodes or nodes & set(match.inputs.values()):
        return False
    if any(not nodes.issuperset(node.users) for node in nodes - outputs):
        return False
    if any(written(node) or is_collective(node) or is_wait(node) for node in nodes):
        return False
    if isinstance(graph, IterGraph) and not nodes.isdisjoint(graph.late):
        return False
    forward = needed_for(match.results, match.nodes)
    sides = [forward, nodes - forward]
    return all(len({phase_of(node) for node in side}) < 2 for side in sides)


def needed_for(results: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns those of `nodes` that `results` depend on: the forward part."""
    within, found = set(nodes), set[fx.Node]()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node in within and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _check_outputs(rule: Rule, match: Match, new: Pattern) -> None:
    if len(new.results) != len(match.results):
        raise RewriteError(
            f"the replacement of {rule.name} returns {len(new.results)} tensors,"
            f" and the pattern {len(match.results)}"
        )
    for name, was, now in zip(names_of(rule, match), match.outputs, new.outputs, strict=True):
        kinds = [(v.dtype, list(v.shape), str(v.device)) for v in map(_held, (now, was))]
        if kinds[0] != kinds[1]:
            texts = [f"{dtype} of shape {shape} on {device}" for dtype, shape, device in kinds]
            raise RewriteError(
                f"{name} of the replacement of {rule.name} is {texts[0]}; in the pattern it is"
                f" {texts[1]}"
            )


def names_of(rule: Rule, match: Match) -> list[str]:
    """Returns the names of a match's results and gradients, for messages."""
    results = [f"result {index}" for index in range(len(match.results))]
    return [*results, *(f"the gradient of {name}" for name in rule.gradients)]


def _is_in_reach(match: Match, new: Pattern) -> bool:
    """True if the inputs of the replacement's forward and backward precede the places where these
    go."""
    forward = needed_for(new.results, new.calls)
    stands_for = {new.inputs[name]: match.inputs[name] for name in new.inputs}
    stands_for.update(zip(new.incoming, match.incoming, strict=True))
    for node in new.calls:
        place = min(match.results if node in forward else match.gradients)
        given = [stands_for[source] for source in node.all_input_nodes if source in stands_for]
        if any(not source < place for source in given):
            return False
    return not match.gradients or min(match.results) < min(match.gradients)
