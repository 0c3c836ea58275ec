"""Pipeline stages are shown to do together what the model does: every division of the tests is
accepted, and each that is spoilt is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphopt
from graphopt.errors import VerificationError
from graphopt.graph_utils import get_output, get_outputs, is_copy, set_outputs
from graphopt.pipelining import Stage, pipe_split, pipeline
from graphopt.pipelining.errors import StageCompileError
from graphopt.pipelining.pipe import pipe as pipe_module
from graphopt.pipelining.pipe.backward import add_gradients, stage_backward
from graphopt.pipelining.pipe.placement import module_of, stage_nodes
from graphopt.pipelining.pipe.proof import check_backward
from graphopt.pipelining.stage import building as building_module
from graphopt.pipelining.stage.accumulating import GradientUpdate
from graphopt.pipelining.stage.compiled import CompiledStage
from graphopt.pipelining.stage.division import StageDivision
from graphopt.pipelining.stage.stage_graphs import SLOT, StageGraph
from graphopt.runtime.agreement.agreed import CallCapture
from graphopt.runtime.agreement.joint_capture import JointCapture
from graphopt.testing import fake_ranks
from graphopt.tracing.capture import capture_call, communication_for
from graphopt.tracing.captured_step import CapturedStep
from pipeline_cases import CASES
from stage_cases import BOUNDARIES, problem

aten = torch.ops.aten

MODES = [GradientUpdate.SET, GradientUpdate.ADD, GradientUpdate.AVERAGE]
KEYS: list[tuple[Any, ...]] = [
    ("evaluation",),
    ("forward",),
    *(("backward", mode) for mode in MODES),
    ("input_backward",),
    *(("weight_backward", mode) for mode in MODES),
]


@pytest.fixture(scope="module", autouse=True)
def _two_ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


class Averaging(CallCapture):
    """Averages over a group without agreeing on it: nothing runs."""

    def __init__(self, parallel: graphopt.DataParallel) -> None:
        super().__init__()
        self._parallel = parallel

    def capture(self, call: Any) -> CapturedStep:
        return capture_call(call, communication_for(self._parallel, accumulated=False), lasts=True)


@pytest.fixture
def averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(self: JointCapture, call: Any, parallel: Any, *rest: Any) -> list[CallCapture]:
        return [Averaging(parallel)]

    monkeypatch.setattr(JointCapture, "ways", ways)


def compiled(name: str, index: int, **options: Any) -> CompiledStage:
    alone = dist.new_group([0])
    stage = problem(name).pipe.build_stage(index, "cpu", alone).compile(**options)
    found = stage._compiled
    assert found is not None
    return found


def averaged(name: str, index: int) -> CompiledStage:
    buckets = ["comm_fusion_with_concat(bucket_size_mb=0.002)", "schedule_comm_wait"]
    pipeline = " -> ".join(buckets)
    return compiled(name, index, parallel=graphopt.DataParallel(), pipeline=pipeline)


QUICK = ("buffers", "tied transmitted", "shared-storage")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in {**CASES, **BOUNDARIES}
    ],
)
def test_all_graphs_of_a_stage_are_proven(name: str, averaging: None, caplog: Any) -> None:
    with caplog.at_level("INFO", "graphopt"):
        for index in range(problem(name).pipe.num_stages):
            stage = averaged(name, index)
            for key in KEYS:
                stage._graph(*key)
    assert "not compared" not in caplog.text


# -------------------------------------------------------------------- what is wrong with a stage

Edit = Callable[[StageGraph], None]


def spoilt(monkeypatch: pytest.MonkeyPatch, method: str, edit: Edit) -> None:
    """Let each graph of that name be edited when it is made."""
    made = getattr(StageDivision, method)

    def make(self: StageDivision, *options: Any) -> StageGraph:
        graph: StageGraph = made(self, *options)
        edit(graph)
        graph.recompile()
        return graph

    monkeypatch.setattr(StageDivision, method, make)


def refused(stage: CompiledStage, *keys: tuple[Any, ...]) -> str:
    *before, spoilt = keys
    for key in before:
        stage._graph(*key)
    with pytest.raises(VerificationError) as caught:
        stage._graph(*spoilt)
    return str(caught.value)


def swap_kept(graph: StageGraph) -> None:
    """Two values of one shape are handed over for each other."""
    outputs = get_outputs(graph.graph)
    shapes: dict[Any, int] = {}
    carried = list(outputs.carried)
    for index, node in enumerate(carried):
        kind = tuple(node.meta["val"].shape)
        if kind in shapes:
            other = shapes[kind]
            carried[index], carried[other] = carried[other], carried[index]
            set_outputs(graph.graph, outputs._replace(carried=carried))
            return
        shapes[kind] = index
    raise AssertionError("no two values of one shape are kept")


def swap_slots(graph: StageGraph) -> None:
    kept: dict[Any, fx.Node] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        if SLOT in node.meta:
            other = kept.setdefault(tuple(node.meta["val"].shape), node)
            if other is not node:
                one, two = node.meta[SLOT], other.meta[SLOT]
                node.meta[SLOT], other.meta[SLOT] = two, one
                return
    raise AssertionError("no two values of one shape are taken")


def drop_an_update(graph: StageGraph) -> None:
    """The contribution of one parameter is lost."""
    outputs = get_outputs(graph.graph)
    node = outputs.updates.pop()
    set_outputs(graph.graph, outputs)
    graph.graph.erase_node(node)


def swap_carried(graph: StageGraph) -> None:
    outputs = get_outputs(graph.graph)
    outputs.carried.reverse()
    set_outputs(graph.graph, outputs)


def halve(graph: StageGraph) -> None:
    """Scale what one node gives."""
    node = [n for n in graph.graph.nodes if n.op == "call_function" and not is_copy(n)][-1]
    with graph.graph.inserting_after(node):
        half = graph.graph.call_function(aten.mul.Tensor, (node, 0.5))
    half.meta = dict(node.meta)
    node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)


def shift_positions(graph: StageGraph) -> None:
    graph.positions = graph.positions[1:] + graph.positions[:1]


EDITS: dict[str, tuple[str, int, str, Edit, list[tuple[Any, ...]]]] = {
    "kept for another slot": (
        "mlp", 1, "forward", swap_kept, [("forward",), ("backward", GradientUpdate.SET)],
    ),
    "taken from another slot": (
        "gpt", 1, "backward", swap_slots, [("forward",), ("backward", GradientUpdate.SET)],
    ),
    "taken from another slot later": (
        "gpt", 1, "weight_backward", swap_slots,
        [("forward",), ("input_backward",), ("weight_backward", GradientUpdate.ADD)],
    ),
    "a contribution is dropped": (
        "mlp", 1, "backward", drop_an_update, [("forward",), ("backward", GradientUpdate.ADD)],
    ),
    "a contribution is dropped later": (
        "mlp", 1, "weight_backward", drop_an_update,
        [("forward",), ("input_backward",), ("weight_backward", GradientUpdate.ADD)],
    ),
    "gradients of one another": (
        "tied replicated", 0, "backward", swap_carried,
        [("forward",), ("backward", GradientUpdate.SET)],
    ),
    "an update of a buffer is dropped": ("buffers", 1, "forward", drop_an_update, [("forward",)]),
    "an update in evaluation is dropped": (
        "buffers", 1, "evaluation", drop_an_update, [("evaluation",)],
    ),
    "scaled forward": ("mlp", 0, "forward", halve, [("forward",)]),
    "scaled backward": (
        "mlp", 1, "backward", halve, [("forward",), ("backward", GradientUpdate.ADD)],
    ),
    "scaled gradients of inputs": (
        "mlp", 1, "input_backward", halve, [("forward",), ("input_backward",)],
    ),
    "scaled average": (
        "mlp", 1, "average", halve, [("forward",), ("backward", GradientUpdate.AVERAGE)],
    ),
    "other arguments": ("mlp", 1, "forward", shift_positions, [("forward",)]),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_a_spoilt_graph_is_refused(
    edit: str, averaging: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, index, method, spoil, keys = EDITS[edit]
    stage = averaged(name, index)
    spoilt(monkeypatch, method, spoil)
    text = refused(stage, *keys)
    assert f"of pipeline stage {index} was refused" in text
    assert "\n  >" in text or "it gives" in text


def test_one_graph_may_not_stand_for_another(averaging: None, monkeypatch: Any) -> None:
    """A first microbatch must not add, a later one must, and only the last one averages."""
    made = StageDivision.backward
    others = {GradientUpdate.SET: GradientUpdate.ADD, GradientUpdate.ADD: GradientUpdate.AVERAGE}
    others[GradientUpdate.AVERAGE] = GradientUpdate.ADD
    monkeypatch.setattr(StageDivision, "backward", lambda self, how: made(self, others[how]))
    for how in MODES:
        refused(averaged("mlp", 1), ("forward",), ("backward", how))


def test_the_backward_of_another_stage_is_refused(averaging: None, monkeypatch: Any) -> None:
    other, stage, made = (
        averaged("skips", 1)._backward,
        averaged("skips", 2),
        StageDivision.backward,
    )
    monkeypatch.setattr(StageDivision, "backward", lambda self, how: made(other, how))
    assert "pipeline stage 2" in refused(stage, ("forward",), ("backward", GradientUpdate.ADD))


class Counted(nn.Module):
    """Puts another tensor in the place of a buffer that the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.seen
        self.seen = self.seen * 2.0
        return y


def test_a_stage_that_replaces_a_buffer_is_refused() -> None:
    """When its backward runs, forward has run for other microbatches, too."""
    x, alone = torch.randn(3, 4), dist.new_group([0])
    with pytest.raises(StageCompileError, match=r"replaces module.seen.*\n.*buffer.copy_\(new\)"):
        Stage.from_module(Counted(), 0, 1, "cpu", input_args=(x,), group=alone).compile()


def test_level_off_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = compiled("mlp", 0, verify="off")
    spoilt(monkeypatch, "forward", halve)
    stage._graph("forward")


# ------------------------------------------------------------------------- the graph of stages


class Spoils:
    """Edits what `place_state` gives, before it is proven."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, edit: Callable[..., Any]) -> None:
        self.original, self.edit = pipe_module.place_state, edit
        monkeypatch.setattr(pipe_module, "place_state", self)

    def __call__(self, *args: Any) -> Any:
        top, replicas = self.original(*args)
        self.edit(top, replicas)
        return top, replicas


def stage(top: fx.GraphModule, index: int) -> fx.GraphModule:
    return module_of(top, stage_nodes(top.graph)[index])


def other_boundary(top: fx.GraphModule, replicas: Any) -> None:
    """A stage is given another value of the same shape."""
    call = stage_nodes(top.graph)[2]
    first, *rest = call.args
    assert rest
    call.args = (rest[0], first, *rest[1:])


def swapped_stages(top: fx.GraphModule, replicas: Any) -> None:
    one, two = stage_nodes(top.graph)[1:3]
    one.target, two.target = two.target, one.target


def edited_stage(top: fx.GraphModule, replicas: Any) -> None:
    for node in stage(top, 1).graph.nodes:
        if node.target is aten.relu.default:
            node.target = aten.gelu.default


def other_parameter(top: fx.GraphModule, replicas: Any) -> None:
    """Equal bits, but another tensor: the model's would never be trained."""
    module = stage(top, 1)
    name = str(module.graph.find_nodes(op="get_attr")[0].target)
    owner, _, leaf = name.rpartition(".")
    held = nn.Parameter(module.get_parameter(name).detach().clone())
    setattr(module.get_submodule(owner), leaf, held)


def cut_from_autograd(top: fx.GraphModule, replicas: Any) -> None:
    """The same value, of which the gradient is lost."""
    graph = stage(top, 1).graph
    argument = graph.find_nodes(op="placeholder")[0]
    with graph.inserting_after(argument):
        detached = graph.call_function(aten.detach.default, (argument,))
    detached.meta = dict(argument.meta)
    argument.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)


def unlisted_replica(top: fx.GraphModule, replicas: Any) -> None:
    replicas.clear()


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("skips", other_boundary),
        ("mlp", swapped_stages),
        ("skips", edited_stage),
        ("skips", other_parameter),
        ("skips", cut_from_autograd),
        ("tied replicated", unlisted_replica),
    ],
)
def test_a_spoilt_pipe_is_refused(name: str, edit: Callable[..., Any], monkeypatch: Any) -> None:
    def made() -> Any:
        return pipeline(CASES[name].model(4), *CASES[name].microbatch(0))

    made()
    Spoils(monkeypatch, edit)
    with pytest.raises(VerificationError, match="division into stages was refused"):
        made()


@pytest.mark.parametrize("spoil", ["order", "value"])
def test_a_spoilt_chain_is_refused(spoil: str, monkeypatch: Any) -> None:
    pipe = problem("skips").pipe
    original = building_module.chain_stage

    def chained(module: Any, call: fx.Node, index: int, plan: Any) -> Any:
        made = original(module, call, index, plan)
        output = get_output(made.graph)
        sent: Any = output.args[0]
        if index == 1 and spoil == "order":
            output.args = (sent[::-1],)
        elif index == 1:
            output.args = ((sent[0], *sent[:-1]),)
        return made

    monkeypatch.setattr(building_module, "chain_stage", chained)
    with pytest.raises(VerificationError, match="chain of stages was refused"):
        pipe.build_stage(1, "cpu")


def test_a_moved_pipe_and_other_tensors_of_a_stage_are_no_reason(tmp_path: Any) -> None:
    """What a stage holds is known by what it holds when it is built."""
    pipe = problem("buffers").pipe
    module = pipe.get_stage_module(1)
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    pipe.to(torch.float64).to(torch.float32)
    for index in range(pipe.num_stages):
        pipe.build_stage(index, "cpu")


class Reads(nn.Module):
    """What the first stage makes is read by both later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        pipe_split()
        y = self.second(x)
        pipe_split()
        return {"loss": F.mse_loss(self.third(y), x)}


def backward_of(top: fx.GraphModule, index: int) -> fx.Node:
    return top.graph.find_nodes(op="call_function", target=stage_backward)[index]


def drop_a_gradient(top: fx.GraphModule) -> None:
    total = top.graph.find_nodes(op="call_function", target=add_gradients)[0]
    total.replace_all_uses_with(total.args[0])


def add_one_twice(top: fx.GraphModule) -> None:
    total = top.graph.find_nodes(op="call_function", target=add_gradients)[0]
    total.args = (total.args[0], total.args[0])


def swap_backwards(top: fx.GraphModule) -> None:
    one, two = backward_of(top, 0), backward_of(top, 1)
    one.kwargs, two.kwargs = two.kwargs, one.kwargs


def leave_out_a_backward(top: fx.GraphModule) -> None:
    top.graph.erase_node(backward_of(top, 2))


@pytest.mark.parametrize(
    "edit", [drop_a_gradient, add_one_twice, swap_backwards, leave_out_a_backward]
)
def test_a_spoilt_backward_of_a_pipe_is_refused(edit: Callable[[fx.GraphModule], None]) -> None:
    top = pipeline(Reads(), (torch.randn(3, 4),)).split_gm
    check_backward(top, 0)
    edit(top)
    with pytest.raises(VerificationError, match="backward"):
        check_backward(top, 0)
