"""The proof of graphs in the executable dialect: what `finalize` makes computes what the graph that
it was given does, and each of many wrong edits of it is refused."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

import graphopt
from graphopt.executable import finalize
from graphopt.graph_utils import find_nodes, get_outputs, is_operator, is_wait, set_outputs
from graphopt.stages import stages_for
from graphopt.verify import check_finalized, stage_checks
from graphopt.verify.equivalence import Proof
from mutation_trials import two_ranks
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

LATE: list[Any] = [
    "remove_copy_from_optimizer",
    ("comm_fusion_with_concat", {"bucket_size_mb": 0.002}),
    "schedule_comm_wait",
    ("iter_move_grads_and_optimizers", {"held_back": 0.33}),
]


@pytest.fixture(scope="module", autouse=True)
def _two_ranks() -> Iterator[None]:
    with two_ranks():
        yield


def derived(model: str, optimizer: str, pipeline: Any = LATE) -> dict[str, fx.GraphModule]:
    """The graphs of a step that has been taken through the passes."""
    made = MODELS[model].make()
    args = (made, OPTIMIZERS[optimizer](made.parameters()), *MODELS[model].batch(0))
    train_step(*args)
    captured = graphopt.capture(train_step, *args, parallel=graphopt.DataParallel())
    way = stages_for(pipeline, None, "off")
    step = way.apply_passes(captured)
    way.derive(step)
    return step.graphs


@pytest.mark.parametrize("pipeline", ["default", LATE], ids=["default", "late"])
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "adamw-loop", "sgd-fused"])
@pytest.mark.parametrize("model", ["gpt", "convnet", "shared-storage"])
def test_what_finalize_makes_computes_the_same(model: str, optimizer: str, pipeline: Any) -> None:
    for graph in derived(model, optimizer, pipeline).values():
        check_finalized(graph, finalize(graph)).raise_for_failure()


class ReadsAll(torch.nn.Module):
    """Reads a view of all of a parameter, behind the update of the iteration before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 3))
        self.rest = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.rest(x + self.weight[: x.shape[0]])
        return seen


def test_a_view_of_all_of_a_parameter_stands_for_itself() -> None:
    model = ReadsAll()
    args = (model, torch.optim.AdamW(model.parameters(), fused=True), torch.ones(4, 3))

    def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(*args)
    captured = graphopt.capture(step, *args, parallel=graphopt.DataParallel())
    way = stages_for(LATE, None, "off")
    made = way.apply_passes(captured)
    way.derive(made)
    assert "slice" in str(made.graphs["main"].graph)
    for graph in made.graphs.values():
        check_finalized(graph, finalize(graph)).raise_for_failure()


# ------------------------------------------------------------------------------------ wrong edits


def small_step() -> fx.GraphModule:
    """Every form that the dialect has: state on lists and alone, a value of the graph's own, a
    collective in place and one that sends what it is given, a view, a result."""
    graph = fx.Graph()
    n: dict[str, fx.Node] = {}

    def note(name: str, node: fx.Node, value: Any) -> None:
        node.meta["val"], n[name] = value, node

    def add(name: str, target: Any, *args: Any, value: Any = None) -> None:
        given = torch.empty(4, device="meta") if value is None else value
        note(name, graph.create_node("call_function", target, args, name=name), given)

    for name in ("p", "q", "m", "x", "y"):
        note(name, graph.placeholder(name), torch.empty(4, device="meta"))
    add("loss", aten.mul.Tensor, n["p"], n["x"])
    add("g", aten.mul.Tensor, n["q"], n["y"])
    add("doubled", aten.mul.Tensor, n["g"], 2.0)
    add("kept", aten.exp.default, n["doubled"])
    add("scaled", aten.mul.Tensor, n["doubled"], 0.5)
    add("launch", c10d.all_reduce.default, n["scaled"], "sum", "0")
    add("wait", c10d.wait_tensor.default, n["launch"])
    add("decayed", aten.mul.Tensor, n["m"], 0.9)
    add("moment", aten.add.Tensor, n["decayed"], n["wait"])
    pair = [torch.empty(4, device="meta") for _ in range(2)]
    add("steps", aten._foreach_add.List, [n["p"], n["q"]], [n["moment"], n["wait"]], value=pair)
    add("new_p", operator.getitem, n["steps"], 0)
    add("new_q", operator.getitem, n["steps"], 1)
    for name, new in (("p", "new_p"), ("q", "new_q"), ("m", "moment")):
        add(f"copy_{name}", aten.copy_.default, n[name], n[new])
    updates = [n["copy_p"], n["copy_q"], n["copy_m"]]
    graph.output(([n["loss"], n["kept"]], updates, []))
    return fx.GraphModule(torch.nn.Module(), graph)


def at(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def read_late(graph: fx.Graph) -> None:
    at(graph, "steps").append(at(graph, "loss"))


def read_own_late(graph: fx.Graph) -> None:
    at(graph, "scaled").append(at(graph, "kept"))


def update_lost(graph: fx.Graph) -> None:
    graph.erase_node(at(graph, "steps"))


def copy_lost(graph: fx.Graph) -> None:
    """The last update of the moment goes to a tensor of its own, and is not copied back."""
    at(graph, "moment").target = aten.add.Tensor


def entry_lost(graph: fx.Graph) -> None:
    steps = at(graph, "steps")
    steps.args = tuple(values[:1] for values in steps.args)  # type: ignore[index, arg-type]


def wait_lost(graph: fx.Graph) -> None:
    wait = at(graph, "wait")
    wait.replace_all_uses_with(at(graph, "launch"))
    graph.erase_node(wait)


def read_before_wait(graph: fx.Graph) -> None:
    at(graph, "moment").update_arg(1, at(graph, "launch"))


def read_what_was_sent(graph: fx.Graph) -> None:
    """By the name that it had before it was reduced in place."""
    at(graph, "moment").update_arg(1, at(graph, "scaled"))


def updates_swapped(graph: fx.Graph) -> None:
    decayed, moment = at(graph, "decayed"), at(graph, "moment")
    moment.append(decayed)
    moment.update_arg(0, at(graph, "m"))
    decayed.update_arg(0, moment)
    at(graph, "steps").args = ([at(graph, "p"), at(graph, "q")], [decayed, at(graph, "wait")])
    decayed.append(at(graph, "steps"))


def update_moved_behind(graph: fx.Graph) -> None:
    """The list reads the moment while only half of its update has been made."""
    steps = at(graph, "steps")
    steps.args = ([at(graph, "p"), at(graph, "q")], [at(graph, "decayed"), at(graph, "wait")])
    at(graph, "decayed").append(at(graph, "moment"))
    at(graph, "moment").prepend(steps)


def entries_swapped(graph: fx.Graph) -> None:
    steps = at(graph, "steps")
    steps.args = (steps.args[0], list(reversed(steps.args[1])))  # type: ignore[arg-type, call-overload]


def entries_alias(graph: fx.Graph) -> None:
    steps = at(graph, "steps")
    steps.args = ([at(graph, "p"), at(graph, "p")], steps.args[1])


def result_overwritten(graph: fx.Graph) -> None:
    kept = at(graph, "kept")
    with graph.inserting_after(kept):
        graph.call_function(aten.mul_.Tensor, (kept, 2.0)).meta.update(kept.meta)


def result_in_state(graph: fx.Graph) -> None:
    outputs = get_outputs(graph)
    at(graph, "loss").target = aten.mul_.Tensor
    set_outputs(graph, outputs)


def input_overwritten(graph: fx.Graph) -> None:
    at(graph, "g").args = (at(graph, "y"), at(graph, "q"))
    at(graph, "g").target = aten.mul_.Tensor


def copy_added(graph: fx.Graph) -> None:
    with graph.inserting_after(at(graph, "loss")):
        graph.call_function(aten.copy_.default, (at(graph, "x"), at(graph, "loss")))


def other_argument(graph: fx.Graph) -> None:
    at(graph, "kept").update_arg(0, at(graph, "x"))


def overlapping(graph: fx.Graph) -> None:
    at(graph, "doubled").meta["val"] = torch.empty(1, device="meta").expand(4)


def other_number(graph: fx.Graph) -> None:
    at(graph, "decayed").update_arg(1, 0.8)


WRONG: list[Callable[[fx.Graph], None]] = [
    *(read_late, read_own_late, update_lost, copy_lost, entry_lost, wait_lost, read_before_wait),
    *(read_what_was_sent, updates_swapped, update_moved_behind, entries_swapped, entries_alias),
    *(result_overwritten, result_in_state, input_overwritten, copy_added, other_argument),
    *(overlapping, other_number),
]


def test_the_small_step_has_every_form() -> None:
    before = small_step()
    after = finalize(before)
    check_finalized(before, after).raise_for_failure()
    names = {str(node.target) for node in after.graph.nodes}
    assert {"aten.mul_.Tensor", "aten.add_.Tensor", "aten._foreach_add_.List"} <= names
    assert "_c10d_functional.all_reduce_.default" in names and "aten.copy_.default" not in names


HARMLESS = [
    *(read_before_wait, read_what_was_sent),  # by another name of the memory, behind the wait
    overlapping,  # what metadata says of a node that computes what it did
]


@pytest.mark.parametrize("edit", [edit for edit in WRONG if edit not in HARMLESS])
def test_a_wrong_graph_is_refused(edit: Callable[[fx.Graph], None]) -> None:
    before = small_step()
    after = finalize(before)
    edit(after.graph)
    assert not check_finalized(before, after).ok, after.graph


@pytest.mark.parametrize("which", ["main", "drain"])
def test_a_wrong_graph_of_a_step_with_late_work_is_refused(which: str) -> None:
    before = derived("mlp", "adamw-fused")[which]
    after = finalize(before)
    wait = find_nodes(after.graph, is_wait)[0]
    wait.replace_all_uses_with(wait.all_input_nodes[0])
    after.graph.erase_node(wait)
    assert not check_finalized(before, after).ok
    after = finalize(before)
    last = find_nodes(after.graph, lambda node: is_operator(node.target, "aten::_fused_adamw_"))[0]
    after.graph.erase_node(last)
    assert not check_finalized(before, after).ok


# ------------------------------------------------------------------------------------- the stage


def test_a_graph_of_which_terms_cannot_speak_is_not_checked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = small_step()
    x, loss = at(before.graph, "x"), at(before.graph, "loss")
    before.add_submodule("unknown", torch.nn.Identity())
    with before.graph.inserting_after(x):
        unknown = before.graph.call_module("unknown", (x,))
    unknown.meta["val"] = torch.empty(4, device="meta")
    loss.update_arg(1, unknown)
    after = finalize(before)
    with caplog.at_level(logging.INFO, "graphopt"):
        assert not stage_checks.StageProof(Proof()).problems("setup", before.graph, after)
    assert "the graph setup is not checked" in caplog.text
