"""Division of a captured stage into the graphs that a schedule runs at different times.

    forward ──► full backward                        of one microbatch
    forward ──► input backward ──► weight backward   of one microbatch, under zero-bubble schedules
    last backward ──► average                        of the step

Forward is what the module computed, backward is what autograd computed and all that depends on
received gradients. What crosses is kept, as autograd would have kept it; a view of a kept value, of
an argument or of a parameter is made again where it is needed. The input backward of a zero-bubble
schedule computes what the previous stage waits for; the weight backward does the rest (Qi et al.,
"Zero Bubble Pipeline Parallelism", ICLR 2024).

Each backward exists in up to three forms: the first microbatch of a step sets gradients, others add
to them, and the last one also launches their average over the ranks, where the captured graph does.
It does not wait for it: first the previous stage is sent its gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.errors import GraphOptError
from graphopt.graph_utils import (
    Outputs,
    call_function_with_meta,
    find_all_descendants,
    get_outputs,
    is_collective,
    is_needed,
    is_operator,
    is_random,
    is_wait,
)
from graphopt.ir.metadata import KIND, NAME, RETURNED, phase_of, set_phase
from graphopt.iter_graph.graph import copy_graph
from graphopt.pipelining.stage.accumulating import GradientUpdate, find_accumulation
from graphopt.pipelining.stage.crossing import (
    CrossingValues,
    ValueNames,
    closure,
    find_crossing,
    with_items,
)
from graphopt.pipelining.stage.stage_graphs import StageGraph, extract
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.results.signature import Computed, Live, Recipe, View

aten = torch.ops.aten


@dataclass(frozen=True)
class GraphResult:
    """A result of a graph: the value of `node`, or a view of it."""

    node: fx.Node
    view: View | None = None

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The result itself, computed from the value of its node."""
        return value if self.view is None else self.view.made(value)


class StageDivision:
    """The graphs that a captured stage is divided into.

    Args:
        captured: the last microbatch of a step, after all passes.
        inputs: the number of arguments of the stage.
        forward: another division of the same stage, captured with other gradients of what it
            sends, whose forward is to be used: backwards take what that one keeps.

    Attributes:
        results: the results that the stage sends.
        input_gradients: gradients of its arguments, None where there is none.
        accumulations: the gradient accumulations of the parameters that have one.

    Raises:
        GraphOptError: a pass has changed how gradients are added up.
    """

    def __init__(
        self, captured: CapturedStep, inputs: int, forward: StageDivision | None = None
    ) -> None:
        self._captured = captured
        self._root = captured.graph_module
        self._graph, _ = copy_graph(captured.graph_module.graph, into=fx.Graph)
        live = captured.live
        placeholders = self._graph.find_nodes(op="placeholder")
        ends = [len(live.placeholders), len(live.gradients), inputs]
        self._states, rest = placeholders[: ends[0]], placeholders[ends[0] :]
        self._gradients, rest = rest[: ends[1]], rest[ends[1] :]
        self._inputs, self._incoming = rest[: ends[2]], rest[ends[2] :]
        self._outputs = get_outputs(self._graph)
        self._updated = {update.args[0]: update for update in self._outputs.updates}
        self._copies: dict[fx.Node, fx.Node] = {}
        self.results = [self._result(recipe) for recipe in captured.signature.outputs]
        self.input_gradients = self._find_input_gradients()
        self.accumulations = [
            find_accumulation(self._graph, index, node, self._updated[node])
            for index, node in enumerate(self._gradients)
            if node in self._updated
        ]
        self._dependent = find_all_descendants([*self._gradients, *self._incoming])
        self._early = self._forward_nodes()
        self._crossing = self._cross([*self._backward_roots(), *self._weight_roots()], self._early)
        self._launched = self._find_launched()
        if forward is not None:
            self._crossing = self._as_kept_by(forward)

    def _as_kept_by(self, forward: StageDivision) -> CrossingValues:
        """The values that this backward needs, at the slots where `forward` keeps them."""
        table = ValueNames()
        names = table.of(forward._root, forward._graph, forward._early)
        place = {names[node]: slot for node, slot in forward._crossing.slots.items()}
        own = table.of(self._root, self._graph, self._early)
        missing = [node.name for node in self._crossing.slots if own[node] not in place]
        if missing:
            raise GraphOptError(f"the forward of the stage did not keep {', '.join(missing)}")
        slots = {node: place[own[node]] for node in self._crossing.slots}
        return CrossingValues(slots, forward._crossing.kept)

    def evaluation(self) -> StageGraph:
        """The forward graph for evaluation, without a backward; returns the stage's results."""
        return self._forward([])

    def forward(self) -> StageGraph:
        """The forward graph; returns the stage's results and keeps values for the backward."""
        return self._forward(self._crossing.kept)

    def _forward(self, kept: list[fx.Node]) -> StageGraph:
        updates = [update for update in self._outputs.updates if update in self._early]
        results = [result.node for result in self.results]
        random = [node for node in self._early if is_random(node)]
        return self._extract(Outputs(results, updates, list(kept)), {}, random)

    def backward(self, gradients: GradientUpdate) -> StageGraph:
        """The graph of the whole backward, which returns the arguments' gradients."""
        outputs = Outputs(self._gradient_nodes(), *self._left_behind(gradients))
        return self._extract(outputs, self._crossing.slots, self._backward_roots())

    def input_backward(self) -> StageGraph:
        """The graph of the arguments' gradients alone; keeps further values for the weight
        backward."""
        crossing, slots = self._kept_for_weights(), self._crossing.slots
        outputs = Outputs(self._gradient_nodes(), [], list(crossing.kept))
        later = closure(self._weight_roots(), {**slots, **crossing.slots})
        shared = {slots[s] for n in later for s in n.all_input_nodes if s in slots}
        return self._extract(outputs, slots, self._backward_roots(), shared)

    def weight_backward(self, gradients: GradientUpdate) -> StageGraph:
        """The graph of the weights' gradients, from values that the forward and the input
        backward keep."""
        slots = self._crossing.slots | {
            node: len(self._crossing.kept) + slot
            for node, slot in self._kept_for_weights().slots.items()
        }
        return self._extract(Outputs([], *self._left_behind(gradients)), slots)

    def _kept_for_weights(self) -> CrossingValues:
        """The values that the input backward computes and the weight backward needs."""
        needed = closure(self._backward_roots(), self._crossing.slots)
        early = {*with_items(needed), *self._incoming}
        return self._cross(self._weight_roots(), early, self._crossing.slots)

    def average(self) -> StageGraph:
        """The graph that waits for averages launched by the last backward, and updates the
        gradients."""
        updates = [accumulation.averaged for accumulation in self.accumulations]
        return self._extract(Outputs([], updates, []), self._launched.slots)

    def _extract(
        self,
        outputs: Outputs,
        slots: Mapping[fx.Node, int],
        also: Iterable[fx.Node] = (),
        shared: Collection[int] = (),
    ) -> StageGraph:
        return extract(self._root, self._graph, outputs, slots, also, shared)

    def _weight_roots(self) -> list[fx.Node]:
        return [node for acc in self.accumulations for node in (acc.first, acc.averaged)]

    def _left_behind(self, gradients: GradientUpdate) -> tuple[list[fx.Node], list[fx.Node]]:
        """The state updates and the carried values of a backward."""
        if gradients is GradientUpdate.AVERAGE:
            return [], list(self._launched.kept)
        if gradients is GradientUpdate.SET:
            return [], [accumulation.first for accumulation in self.accumulations]
        return [accumulation.added for accumulation in self.accumulations], []

    def _backward_roots(self) -> list[fx.Node]:
        """The values that every backward computes first: gradients of arguments, and random
        numbers, which keep their order."""
        random = [n for n in self._graph.nodes if is_random(n) and n not in self._early]
        return [*(node for node in self._gradient_nodes() if node is not None), *random]

    def _gradient_nodes(self) -> list[fx.Node | None]:
        return [None if gradient is None else gradient.node for gradient in self.input_gradients]

    # ------------------------------------------------------------------------ what crosses

    def _forward_nodes(self) -> set[fx.Node]:
        early = {
            node
            for node in self._graph.nodes
            if node.op == "call_function" and node not in self._dependent and _runs_early(node)
        }
        early = closure([*(result.node for result in self.results), *early])
        return {*with_items(early), *self._inputs} - {*self._states}

    def _find_launched(self) -> CrossingValues:
        """The collectives that the last backward launches and `average` waits for."""
        updates = [accumulation.averaged for accumulation in self.accumulations]
        needed = closure(updates)
        launches = closure(node for node in needed if is_collective(node))
        waits = [node for node in needed if is_wait(node)]
        late = {*waits, *find_all_descendants(waits), *updates} - launches
        return self._cross(updates, {*with_items(needed - late)} - {*self._gradients})

    def _cross(
        self, roots: list[fx.Node], early: set[fx.Node], slots: Collection[fx.Node] = ()
    ) -> CrossingValues:
        """The values that `roots` need from the earlier graph and that are not kept in `slots`
        yet."""
        changing = {node for node in self._states if node in self._updated}
        found = list(find_crossing(roots, (early - {*self._states}) | changing, slots))
        slots_of = {node: slot for slot, node in enumerate(found)}
        return CrossingValues(slots_of, list(map(self._as_it_is, found)))

    def _as_it_is(self, node: fx.Node) -> fx.Node:
        """The value of `node` before any update: itself, or a copy if an update changes it."""
        if node not in self._updated and not is_operator(node.target, "aten::copy_"):
            return node
        if node not in self._copies:
            anchor = (
                node if node.op == "call_function" else self._graph.find_nodes(op="placeholder")[-1]
            )
            with self._graph.inserting_after(anchor):
                copy = call_function_with_meta(self._graph, aten.clone.default, (node,), like=node)
            for key in (KIND, NAME, RETURNED):  # of the input that it was copied from
                copy.meta.pop(key, None)
            set_phase(copy, "forward")
            self._copies[node] = copy
        return self._copies[node]

    # ------------------------------------------------------------------------ results

    def _result(self, recipe: Recipe) -> GraphResult:
        """The result for a recipe: a value of the stage's own, or a view of one of its inputs."""
        if isinstance(recipe, Computed):
            return GraphResult([*self._outputs.results, *self._outputs.carried][recipe.index])
        assert isinstance(recipe, (Live, View)), "a stage sends tensors"
        view = recipe if isinstance(recipe, View) else None
        position = (recipe.of if isinstance(recipe, View) else recipe).placeholder
        assert position is not None, "what a stage sends is a tensor of its own"
        placeholder = self._graph.find_nodes(op="placeholder")[position]
        return GraphResult(self._as_it_is(self._updated.get(placeholder, placeholder)), view)

    def _find_input_gradients(self) -> list[GraphResult | None]:
        found: list[GraphResult | None] = [None] * len(self._inputs)
        for gradient in self._captured.signature.gradients:
            if gradient.argument is None:
                raise GraphOptError(
                    "a hook replaces the gradient of a parameter, which other microbatches add to\n"
                    "  hint:  change the gradient after the step of the schedule"
                )
            found[gradient.argument - 1] = self._result(gradient.recipe)  # the module is leaf 0
        return found


def _runs_early(node: fx.Node) -> bool:
    """True if the forward computes a node that depends on no gradient."""
    phase = phase_of(node)
    return phase == "forward" or (phase != "backward" and is_needed(node))
