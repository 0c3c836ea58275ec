"""Proof that the graphs of a compiled stage together compute the captured stage.

    forward ─kept─► backward ─launched─► average                     =  the captured microbatch
    forward ─kept─► input backward ─kept─► weight backward ─► …      =  the captured microbatch

Pieces are composed as they run: by the positions of their arguments, by the slots of what is kept,
and by what becomes of what they return. Between two pieces of one microbatch others run for other
microbatches: what these update (buffers, gradients) is an arbitrary value for the next piece, and
nothing that is kept may lie in its storage.

A microbatch that is not the last leaves the sum of its gradient and the one before, not averaged;
the first one leaves its gradient alone. So, by induction, a step leaves the sum over all
microbatches in their order, averaged once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from graphopt.errors import VerificationError
from graphopt.graph_utils import Outputs
from graphopt.pipelining.stage.accumulating import GradientUpdate
from graphopt.pipelining.stage.division import GraphResult, StageDivision
from graphopt.pipelining.stage.microbatch_graph import (
    Named,
    gradient_positions,
    left_by_microbatch,
    mutable_inputs,
)
from graphopt.pipelining.stage.stage_graphs import SLOT, StageGraph
from graphopt.tracing.captured_step import CapturedStep
from graphopt.verify import Problem
from graphopt.verify.checks.module_constants import attribute
from graphopt.verify.composition import ComposedGraph, NamedObjects
from graphopt.verify.differences.outcome_differences import differences
from graphopt.verify.symbolic.evaluation import evaluate_graph
from graphopt.verify.symbolic.evaluation_outcome import Evaluation, NotDecidedError
from graphopt.verify.values.terms import Terms

logger = logging.getLogger("graphopt")

_SHOWN = 3

_IN_BACKWARD = ("backward", "weight backward", "average")
"""Pieces that update gradients of parameters."""

Pieces = Mapping[tuple[Any, ...], StageGraph]
"""The graphs of a stage, by name and by what is done with gradients."""


class DivisionProof:
    """Proves that a stage is divided right, graph by graph as they are made.

    Args:
        stage: its index.
        captured: the last microbatch of a step, after all passes.
        forward, backward: the divisions from which forward and backward are taken.
    """

    def __init__(
        self, stage: int, captured: CapturedStep, forward: StageDivision, backward: StageDivision
    ) -> None:
        self._stage, self._captured = stage, captured
        self._forward, self._backward = forward, backward
        self._terms = Terms()
        self._known: dict[GradientUpdate | str, tuple[Evaluation, Named]] = {}

    def check(self, key: tuple[Any, ...], pieces: Pieces) -> None:
        """Proves that a graph does its part, given the graphs that run before it.

        Args:
            key: the key of the graph.
            pieces: the graphs made so far, this one included.

        Raises:
            VerificationError: it does not.
        """
        name, *options = key
        try:
            expected, named = self._whole(options[0] if options else name)
        except NotDecidedError as error:
            logger.info("pieces of stage %d are not compared: %s", self._stage, error)
            return
        try:
            found = list(self._problems(key, pieces, expected, named))
        except NotDecidedError as error:
            found = [error.problem]
        if found:
            raise VerificationError(_refusal(self._stage, key, found))

    def _whole(self, wanted: GradientUpdate | str) -> tuple[Evaluation, Named]:
        """The results and updates of the captured microbatch that the divided graph computes."""
        if wanted not in self._known:
            graph, named = left_by_microbatch(self._captured, wanted)
            self._known[wanted] = evaluate_graph(graph, self._terms), named
        return self._known[wanted]

    def _problems(
        self, key: tuple[Any, ...], pieces: Pieces, expected: Evaluation, named: Named
    ) -> Iterator[Problem]:
        run = _Microbatch(self._captured, self._forward.results, self._backward)
        try:
            composed = run.composed(key, pieces)
        except (ValueError, LookupError, StopIteration) as error:
            yield Problem(f"it does not fit the others: {type(error).__name__}: {error}")
            return
        found = evaluate_graph(composed, self._terms)
        if run.named != named:
            yield Problem(f"it gives {_listed(run.named)}; the stage gives {_listed(named)}")
            return
        if key[0] in ("evaluation", "forward"):  # the backward may draw more
            expected = replace(expected, draws=expected.draws[: len(found.draws)])
        if key[0] in ("forward", "input_backward"):
            yield from _changed_meanwhile(found, run.changing)
            found = _without_kept(found)
        yield from differences(self._terms, expected, found)


class _Microbatch:
    """One microbatch as the divided graphs run it, composed into one graph.

    Args:
        captured: the captured stage, whose placeholders the divided graphs take by position.
        sent: the results that the stage sends.
        backward: says which gradients are whose.

    Attributes:
        named: the names of the results, for messages.
        changing: inputs that other microbatches update.
    """

    def __init__(
        self, captured: CapturedStep, sent: Sequence[GraphResult], backward: StageDivision
    ) -> None:
        self._sent, self._backward = sent, backward
        whole = captured.graph_module
        objects = NamedObjects()
        objects.learn(whole.graph, partial(attribute, whole))
        self._composition = ComposedGraph(objects)
        self._inputs = self._composition.inputs(whole.graph)
        self._mutable = mutable_inputs(captured)
        self._gradients = gradient_positions(captured)
        self._results: list[Any] = []
        self._updates: list[Any] = []
        self.named: Named = []
        self.changing = {self._inputs[position] for position in self._mutable}

    def composed(self, key: tuple[Any, ...], pieces: Pieces) -> fx.Graph:
        """One of the divided graphs inlined after those that run before it."""
        name, *options = key
        if name in ("evaluation", "forward"):
            return self._finish(self._run(pieces[key], [], "forward").carried)
        kept = list(self._run(pieces["forward",], [], "forward").carried)
        if name == "weight_backward":
            kept += self._run(pieces["input_backward",], kept, "input backward").carried
        left = self._run(pieces[key], kept, name.replace("_", " ")).carried
        if GradientUpdate.AVERAGE in options:
            left = self._run(pieces["average",], left, "average").carried
        if GradientUpdate.SET in options:
            owners = [accumulation.index for accumulation in self._backward.accumulations]
            left = [value for _, value in sorted(zip(owners, left, strict=True), key=_first)]
        return self._finish(left)

    def _run(self, piece: StageGraph, kept: Sequence[Any], when: str) -> Outputs:
        """Inlines one divided graph into the composed graph. Values that it takes from a slot
        stay there; a wrong order of taking is found when it runs."""
        positions = iter(piece.positions)
        arguments = [
            kept[node.meta[SLOT]] if SLOT in node.meta else self._input(next(positions), when)
            for node in piece.graph.find_nodes(op="placeholder")
        ]
        results, updates, carried = self._composition.call(piece, arguments)
        of = self._sent if when == "forward" else self._backward.input_gradients
        for index, (result, value) in enumerate(zip(of, results, strict=bool(results))):
            if result is not None:
                name = "a result" if when == "forward" else f"the gradient of argument {index + 1}"
                self.named.append((name, result.view))
                self._results.append(value)
        self._updates += updates
        return Outputs(results, updates, carried)

    def _input(self, position: int, when: str) -> fx.Node:
        """The symbolic value of an input when a graph runs."""
        own = self._inputs[position]
        times = _IN_BACKWARD if position in self._gradients else ("forward",)
        if position not in self._mutable or when in times:
            return own
        changed = self._composition.input(own, f"{own.target} in the {when}")
        self.changing.add(changed)
        return changed

    def _finish(self, carried: Sequence[Any]) -> fx.Graph:
        return self._composition.end((self._results, self._updates, list(carried)))


def _changed_meanwhile(found: Evaluation, changing: Collection[fx.Node]) -> Iterator[Problem]:
    """Yields a problem for each kept value in storage that other microbatches write."""
    for owner, places in found.aliases.items():
        for kind, index in places:
            if owner in changing and kind == "carried":
                yield Problem(
                    f"value {index} that it keeps lies in the storage of %{owner.name}, which other"
                    " microbatches update",
                    (found.nodes[kind, index],),
                )


def _without_kept(found: Evaluation) -> Evaluation:
    """Drops kept values from the comparison: they are for the next graph alone, and may share
    storage with sent values, as in autograd."""
    aliases = {
        owner: [place for place in places if place[0] != "carried"]
        for owner, places in found.aliases.items()
    }
    return replace(found, carried=[], aliases=aliases)


def _refusal(stage: int, key: tuple[Any, ...], problems: Sequence[Problem]) -> str:
    name, *options = key
    how = f" ({options[0].value} gradients)" if options else ""
    first, *more = map(str, problems)
    lines = [f"{name.replace('_', ' ')}{how} of pipeline stage {stage} was refused: {first}"]
    lines += [f"  also: {other.splitlines()[0]}" for other in more[:_SHOWN]]
    return "\n".join(lines)


def _listed(named: Named) -> str:
    return ", ".join(f"{name} ({view})" if view else name for name, view in named) or "nothing"


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]
