"""Compiled stages, all on one rank, against the stages as they were: bit for bit."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt import _compat
from graphopt.graph_utils import is_view, may_alias
from graphopt.lowering import Options
from graphopt.pipelining import SplitPoint, StageCompileError, pipeline
from graphopt.pipelining.stage.accumulating import GradientUpdate
from graphopt.pipelining.stage.crossing import ValueNames
from graphopt.pipelining.stage.division import StageDivision
from pipeline_cases import CASES, MICROBATCHES, WIDTH
from sketch import one_rank, skip_without_sends_to_itself
from stage_cases import BOUNDARIES, LOSSES, Problem, Training, problem, train, two_heads
from twins import assert_same


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    skip_without_sends_to_itself()
    with one_rank():
        yield


def both(name: str, schedule: str, **options: Any) -> tuple[Training, Training]:
    """The same training, without and with compiled stages."""
    eager = Training(problem(name), schedule, **options)
    return eager, Training(problem(name), schedule, compiled={}, **options)


CHOSEN = [
    ("gpt", "interleaved"),
    ("gpt", "zero bubble"),
    ("convnet", "interleaved"),
    ("tied replicated", "interleaved"),
    ("tied transmitted", "zero bubble"),
    ("loss inside", "interleaved"),
    ("views", "zero bubble"),
]


def combinations() -> list[Any]:
    """All models; those that are not chosen under one schedule each."""
    rest = [name for name in {**CASES, **BOUNDARIES} if name not in dict(CHOSEN)]
    schedules = ("interleaved", "zero bubble")
    return [*CHOSEN, *((name, schedules[index % 2]) for index, name in enumerate(rest))]


@pytest.mark.parametrize(("name", "schedule"), combinations())
def test_training_is_that_of_eager_stages(name: str, schedule: str) -> None:
    """Outputs, losses, gradients, parameters, buffers and the state of the random generator."""
    eager, compiled = both(name, schedule)
    assert_same(train(compiled), train(eager), name)


class Scale(nn.Module):
    """The gradient of the weight is a product, and no sum: the sign of a zero is seen in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_first_gradient_is_set_and_not_added_to_zero(microbatches: int) -> None:
    x = -torch.ones(3 * microbatches, WIDTH)
    pipe = pipeline(Scale(), (x[:3],))
    given = Problem(pipe, (x,), {}, x, lambda output, target: 0.0 * output.sum())
    training = Training(given, "interleaved", compiled={}, microbatches=microbatches)
    training.run()
    gradient = training.gradients()["weight"]
    assert gradient is not None
    assert bool(gradient.signbit().all())


def test_gradients_of_two_steps_add_up() -> None:
    eager, compiled = both("mlp", "interleaved")
    for training in (eager, compiled):
        training.run()
        del training.stages[1].submod.get_parameter("layers.1.bias").grad
        training.run()
    assert_same(compiled.gradients(), eager.gradients(), "gradients")


@pytest.mark.parametrize(
    ("loss", "schedule"),
    [*((loss, "interleaved") for loss in LOSSES), ("the first", "zero bubble")],
)
def test_a_loss_may_depend_on_some_results(loss: str, schedule: str) -> None:
    eager, compiled = (Training(two_heads(loss), schedule, compiled=how) for how in (None, {}))
    assert_same(train(compiled), train(eager), loss)
    missing = [name for name, gradient in compiled.outputs[1].items() if gradient is None]
    assert bool(missing) == (loss != "both")


class Unread(nn.Module):
    """No loss reads the second result, whose computation lies between those of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        aside = self.norm(self.aside(x))
        for _ in range(4):
            x = x + torch.sigmoid(x)
        return x, aside


def test_what_a_loss_does_not_read_leaves_other_gradients_as_they_are() -> None:
    assert_same_gradients(Unread(), lambda output, target: (output[0] - target).square().mean())


class Constants(Unread):
    """Two tensors that the capture names in the order in which it meets them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        aside = torch.sigmoid(self.aside(x) * torch.tensor([3.0]))
        return torch.sigmoid(x * torch.tensor([0.5])), aside


def test_constants_are_told_apart_by_value() -> None:
    assert_same_gradients(Constants(), lambda output, target: (output[0] - target).square().mean())
    table, root = ValueNames(), nn.Module()
    names = []
    for values in ((1.0, 2.0), (2.0, 1.0)):
        graph = fx.Graph()
        for index, value in enumerate(values):
            root.register_buffer(f"constant{index}", torch.tensor(value))
        nodes = [graph.get_attr(f"constant{index}") for index in range(2)]
        given = table.of(root, graph, nodes)
        names.append([given[node] for node in nodes])
    assert names[0] == names[1][::-1]


def assert_same_gradients(module: nn.Module, loss: Any, schedule: str = "interleaved") -> None:
    """Of a module in one stage, compiled and not."""
    found = []
    x, target = torch.randn(2, 3 * MICROBATCHES, WIDTH)
    for how in (None, {}):
        given = Problem(pipeline(copy.deepcopy(module), (x[:3],)), (x,), {}, target, loss)
        training = Training(given, schedule, compiled=how)
        training.run()
        found.append(training.gradients())
    assert any(gradient is not None for gradient in found[0].values())
    assert_same(found[1], found[0], "gradients")


def in_place(output: Tensor, target: Tensor) -> Tensor:
    return (output.mul_(2.0) - target).square().mean()


def tanh_trained_by(loss: Any, how: dict[str, Any] | None) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    x, target = torch.randn(2, 3 * MICROBATCHES, WIDTH)
    pipe = pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), (x[:3],))
    training = Training(Problem(pipe, (x,), {}, target, loss), "interleaved", compiled=how)
    training.run()
    return training.gradients()


def test_a_loss_may_change_the_output_in_place() -> None:
    """Autograd refuses it where the backward needs the output; a compiled stage gives a copy."""
    with pytest.raises(RuntimeError) as caught:
        tanh_trained_by(in_place, None)
    assert "modified by an inplace operation" in str(caught.value.__cause__ or caught.value)
    right = tanh_trained_by(lambda o, t: (o * 2.0 - t).square().mean(), None)
    assert_same(tanh_trained_by(in_place, {}), right, "gradients")


def test_a_loss_that_reads_nothing_at_first_settles_nothing() -> None:
    found = []
    for how in (None, {}):
        calls: list[int] = []

        def loss(output: Tensor, target: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            nothing = torch.zeros((), requires_grad=True) * 1.0
            return nothing if len(calls) == 1 else output.square().mean()

        found.append(tanh_trained_by(loss, how))
    assert found[0]["0.weight"] is not None
    assert_same(found[1], found[0], "gradients")


@pytest.mark.parametrize("name", ["convnet", "gpt"])
def test_evaluation_between_two_steps(name: str) -> None:
    """It draws random numbers and updates buffers, as the stages do that are not compiled."""
    results = []
    for how in (None, {}):
        given = problem(name, boundaries=())
        training = Training(given, "gpipe", compiled=how)
        torch.manual_seed(5)
        training.step()
        for _ in range(2):
            losses: list[Tensor] = []
            output = training.schedule.eval(*given.args, target=given.target, losses=losses)
            assert how is None or not output.requires_grad
            training.outputs.append((output.detach(), [value.detach() for value in losses]))
        training.step()
        results.append(training.state())
    assert_same(results[1], results[0], "training")


# ---------------------------------------------------------------------------- what runs


def computed(graph: fx.Graph) -> Counter[str]:
    """Operators that compute something."""
    return Counter(
        str(node.target)
        for node in graph.nodes
        if isinstance(node.target, _compat.OpOverload) and not is_view(node) and not may_alias(node)
    )


@pytest.mark.parametrize("name", ["gpt", "convnet", "skips"])
def test_nothing_is_computed_twice(name: str) -> None:
    for stage in Training(problem(name), "interleaved", compiled={}).stages:
        division: StageDivision = stage._compiled._forward
        forward, whole = division.forward().graph, division.backward(GradientUpdate.ADD).graph
        inputs = division.input_backward().graph
        weights = division.weight_backward(GradientUpdate.ADD).graph
        assert computed(inputs) + computed(weights) == computed(whole)
        assert computed(forward) + computed(whole) == computed(stage.graph_module.graph)


@pytest.mark.parametrize("name", ["gpt", "checkpointed", "skips", "running-mean"])
def test_a_forward_keeps_what_autograd_keeps(name: str) -> None:
    given = problem(name)
    for index in range(given.pipe.num_stages):
        eager = given.pipe.build_stage(index, "cpu")
        compiled = given.pipe.build_stage(index, "cpu").compile()
        arguments = [_like(tensor) for tensor in eager._received]
        own = set(map(_compat.storage_key, eager.submod.state_dict().values()))
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(_note, saved), lambda t: t):
            eager.submod(*arguments)
        kept = compiled._compiled.run_forward(arguments)[1]
        assert _bytes(kept) == _bytes(t for t in saved if _compat.storage_key(t) not in own)


def _note(saved: list[Tensor], tensor: Tensor) -> Tensor:
    saved.append(tensor)
    return tensor


def _like(described: Tensor) -> Tensor:
    if not described.dtype.is_floating_point:
        return torch.zeros(described.shape, dtype=described.dtype)
    return torch.randn(described.shape).requires_grad_(described.requires_grad)


def _bytes(tensors: Any) -> list[int]:
    sizes = {_compat.storage_key(t): t.untyped_storage().nbytes() for t in tensors}
    return sorted(sizes.values())


def test_kept_values_are_freed_in_the_backward() -> None:
    stage = problem("gpt").pipe.build_stage(1, "cpu").compile()
    sent, kept = stage._compiled.run_forward([_like(tensor) for tensor in stage._received])
    stage._compiled.run_backward(kept, [torch.ones_like(tensor) for tensor in sent])
    assert kept == [None] * len(kept)


def test_passes_apply_and_are_reported() -> None:
    stage = problem("mlp").pipe.build_stage(1, "cpu").compile(pipeline="comm_fusion_with_concat")
    assert [record.name for record in stage.report] == ["capture", "comm_fusion_with_concat"]
    assert graphopt.applied_passes(stage.graph_module) == ["comm_fusion_with_concat"]
    assert stage.lowered == []


# ---------------------------------------------------------------------------- lowering


@pytest.mark.parametrize(
    ("name", "min_ops"), [("mlp", 3), pytest.param("gpt", 4, marks=pytest.mark.full)]
)
def test_lowered_stages(name: str, min_ops: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each part is compiled; the gradients of the first step are close to eager's."""
    eager = Training(problem(name), "zero bubble")
    how = {"lower": Options(min_ops=min_ops)}
    lowered = Training(problem(name), "zero bubble", compiled=how)
    for training in (eager, lowered):
        torch.manual_seed(5)
        training.run()
    torch.testing.assert_close(lowered.gradients(), eager.gradients(), rtol=1e-4, atol=1e-5)
    regions = [region for stage in lowered.stages for region in stage.lowered]
    assert regions
    assert all(region.is_compiled for region in regions)
    counts = [len(stage.lowered) for stage in lowered.stages]
    lowered.run()
    assert [len(stage.lowered) for stage in lowered.stages] == counts
    own = [record for record in caplog.records if record.name.startswith("graphopt")]
    assert not [record for record in own if record.levelno >= logging.WARNING]


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


def test_a_lowered_stage_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubled())
    x, target = torch.randn(2, 3 * MICROBATCHES, WIDTH)
    pipe = pipeline(model, (x[:3],), split_spec={"1": SplitPoint.BEGINNING})
    given = Problem(pipe, (x,), {}, target, lambda o, t: (o - t).square().mean())
    training = Training(given, "zero bubble", compiled={"lower": Options(min_ops=1)})
    training.run()
    model(x).sub(target).square().mean().backward()
    right = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(training.gradients(), right, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------- what is refused


def stage_of(name: str = "mlp", index: int = 1) -> Any:
    return problem(name).pipe.build_stage(index, "cpu")


def test_compiling_twice_is_refused() -> None:
    stage = stage_of()
    assert stage.compile() is stage
    with pytest.raises(StageCompileError, match=r"stage 1 .* compiled already\n  hint:  build"):
        stage.compile()


def test_compiling_within_a_step_is_refused() -> None:
    given = problem("mlp")
    training = Training(given, "interleaved")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        training.stages[0].compile()
        return output.sum()

    training.schedule._loss_fn = loss
    with pytest.raises(StageCompileError, match=r"microbatches \[0\] have .*\n .*call compile\("):
        training.run()


def test_other_kinds_of_parallelism_are_refused() -> None:
    with pytest.raises(StageCompileError, match=r"pass graphopt.DataParallel\(group\)"):
        stage_of().compile(parallel=graphopt.Manual())


def test_cuda_graphs_are_refused() -> None:
    with pytest.raises(StageCompileError, match="use lower='inductor'"):
        stage_of().compile(lower="inductor+cudagraphs")


class Branching(torch.autograd.Function):
    """Its backward depends on the value of a tensor."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] if float(gradients[0].sum()) > 0 else -gradients[0]


def branching(x: Tensor) -> Tensor:
    return Branching.apply(x)


def test_a_module_that_cannot_be_captured_is_refused() -> None:
    stage = stage_of()
    graph = stage.submod.graph
    output: Any = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):
        branch = graph.call_function(branching, (output.args[0][0],))
    output.args = ((branch,),)
    stage.submod.recompile()
    message = "stage 1 cannot be compiled: Python code depends on the value of a tensor"
    with pytest.raises(StageCompileError, match=message):
        stage.compile()
    assert all(parameter.grad is None for parameter in stage.submod.parameters())


def test_a_microbatch_of_another_shape_is_refused() -> None:
    training = Training(problem("mlp"), "interleaved", compiled={})
    with pytest.raises(ValueError, match=r"x of a microbatch is torch.float32 of shape \(2, 8\)"):
        training.schedule.step(training.given.args[0][:8], target=training.given.target[:8])


def test_a_stage_that_changes_after_compile_is_refused() -> None:
    training = Training(problem("mlp"), "interleaved", compiled={})
    training.run()
    training.stages[1].submod.get_parameter("layers.1.bias").requires_grad_(False)
    with pytest.raises(StageCompileError, match=r"layers.1.bias changed \(requires_grad .*\n"):
        training.run()


class Halves(nn.Module):
    """Two parameters in one storage."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(2, WIDTH, WIDTH)
        self.first, self.second = nn.Parameter(whole[0]), nn.Parameter(whole[1])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second


def test_parameters_that_share_storage_no_more_are_refused() -> None:
    x = torch.randn(3 * MICROBATCHES, WIDTH)
    given = Problem(pipeline(Halves(), (x[:3],)), (x,), {}, x, lambda o, t: (o - t).square().mean())
    training = Training(given, "interleaved", compiled={})
    training.run()
    second = training.stages[0].submod.get_parameter("second")
    second.data = second.data.clone()
    with pytest.raises(StageCompileError, match="share storage changed"):
        training.run()


def test_copies_of_a_compiled_stage_are_refused() -> None:
    stage = stage_of().compile()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StageCompileError, match=r"copy the stage before compile\(\)"):
            copied(stage)


def test_another_loss_is_refused() -> None:
    training = Training(two_heads("the first"), "interleaved", compiled={})
    training.run()
    training.schedule._loss_fn = LOSSES["both"]
    with pytest.raises(RuntimeError) as caught:
        training.run()
    assert isinstance(caught.value.__cause__, StageCompileError)
    assert "the loss depends on results on which it did not" in str(caught.value.__cause__)


def test_a_stage_that_is_not_compiled_has_no_graph() -> None:
    for name in ("graph_module", "report", "lowered"):
        with pytest.raises(graphopt.GraphOptError, match=r"stage 1 is not compiled.* compile\(\)"):
            getattr(stage_of(), name)


@graphopt.graph_optimization_pass(name="test_next_iteration")
def next_iteration(gm: graphopt.IterGraphModule) -> None:
    """Moves an update of a buffer to the next iteration."""
    updates = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    update = next(node for node in updates if node.args[0].meta["kind"] == "buffer")
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    gm.graph.move_to_next_iter_before([update], first)


def test_work_in_the_next_iteration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StageCompileError, match="moves work to the next iteration"):
        stage_of("running-mean", 0).compile(pipeline=[next_iteration])
