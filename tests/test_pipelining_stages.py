"""Built stages: what schedules see of them, their backward, and training on real ranks."""

from __future__ import annotations

import gc
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining

import gloo
from graphopt import pipelining
from graphopt.errors import PartitionError
from graphopt.pipelining import (
    Pipe,
    build_stage,
    pipeline,
    reduce_replicated_gradients,
    stage_backward,
)
from graphopt.pipelining.pipe.backward import add_gradients, cut
from pipeline_cases import CASES, MICROBATCHES, Case, reference_gradients
from sketch import skip_without_sends_to_itself


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    skip_without_sends_to_itself()
    path: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(path), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(case: Case, stages: int) -> tuple[nn.Module, list[torch_pipelining.PipelineStage]]:
    torch.manual_seed(0)
    model = case.model(stages)
    args, kwargs = case.microbatch(0)
    pipe = pipeline(model, args, kwargs, multi_use_param_spec=case.sharing)
    return model, [pipe.build_stage(index, "cpu") for index in range(stages)]


@pytest.mark.parametrize("name", list(CASES))
def test_all_stages_on_one_rank(name: str) -> None:
    """Neighbours on one rank hand tensors to each other without communication."""
    case = CASES[name]
    _, stages = build(case, 3)
    loss_fn = case.loss if name != "loss inside" else lambda output, target: output["loss"]
    schedule = torch_pipelining.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_fn)
    args, kwargs, target = case.batch(MICROBATCHES)
    schedule.step(*args, target=target, **kwargs)
    expected = reference_gradients(case, 3, MICROBATCHES)
    reduce_replicated_gradients(*stages)
    gradients = {
        parameter_name: parameter.grad
        for stage in stages
        for parameter_name, parameter in stage.submod.named_parameters(remove_duplicate=False)
    }
    for parameter_name, gradient in expected.items():
        actual = gradients[parameter_name]
        torch.testing.assert_close(actual, gradient, msg=lambda m, n=parameter_name: f"{n}: {m}")


def test_the_last_stage_returns_what_the_model_returns() -> None:
    case = CASES["loss inside"]
    model, stages = build(case, 2)
    schedule = torch_pipelining.ScheduleInterleaved1F1B(
        stages, MICROBATCHES, loss_fn=lambda output, target: output["loss"]
    )
    args, kwargs, target = case.batch(MICROBATCHES)
    merged = schedule.step(*args, target=target, **kwargs)
    expected = model(*args, **kwargs)
    assert list(merged) == ["logits", "loss", "parity"]
    torch.testing.assert_close(merged["logits"], expected["logits"])
    torch.testing.assert_close(merged["loss"].mean(), expected["loss"])
    assert merged["loss"].shape == (MICROBATCHES,)
    assert torch.equal(merged["parity"], expected["parity"])


def test_a_stage_keeps_nothing_else_alive() -> None:
    case = CASES["mlp"]
    torch.manual_seed(0)
    model = case.model(2)
    pipe = pipeline(model, *case.microbatch(0))
    others = [
        weakref.ref(pipe),
        weakref.ref(pipe.get_stage_module(1)),
        weakref.ref(model.get_parameter("blocks.1.0.weight")),
    ]
    stage = pipe.build_stage(0, "cpu")
    del model, pipe
    gc.collect()
    assert [other() for other in others] == [None, None, None]
    assert set(stage.submod.state_dict()) == {"blocks.0.0.weight", "blocks.0.0.bias"}


@pytest.mark.parametrize("name", ["skips", "buffers"])
def test_a_module_of_a_stage_pickles(name: str) -> None:
    _, stages = build(CASES[name], 3)
    for stage in stages:
        loaded = pickle.loads(pickle.dumps(stage.submod))
        assert loaded.code == stage.submod.code
        assert list(loaded.state_dict()) == list(stage.submod.state_dict())


def test_a_microbatch_of_another_shape_is_refused() -> None:
    case = CASES["skips"]
    _, stages = build(case, 2)
    schedule = torch_pipelining.ScheduleInterleaved1F1B(stages, 2)
    message = r"x of a microbatch is torch.float32 of shape \(2, 8\); the pipe was made for"
    with pytest.raises(ValueError, match=message):
        schedule.step(torch.randn(4, 8), scale=torch.randn(4, 1))


def test_frozen_parameters_count_when_the_stage_is_built() -> None:
    case = CASES["mlp"]
    torch.manual_seed(0)
    model = case.model(3)
    pipe = pipeline(model, *case.microbatch(0))
    model.blocks[0].requires_grad_(False)
    stages = [pipe.build_stage(index, "cpu") for index in range(3)]
    schedule = torch_pipelining.ScheduleInterleaved1F1B(stages, 3, loss_fn=case.loss)
    args, _, target = case.batch(3)
    schedule.step(*args, target=target)
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False, False, False]


def test_replicas_of_one_rank_stay_equal() -> None:
    case = CASES["tied replicated"]
    _, stages = build(case, 2)
    weights = [
        stages[0].submod.get_parameter("embedding.weight"),
        stages[1].submod.get_parameter("head.weight"),
    ]
    schedule = torch_pipelining.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=case.loss)
    args, _, target = case.batch(MICROBATCHES)
    schedule.step(*args, target=target)
    assert not torch.equal(weights[0].grad, weights[1].grad)
    reduce_replicated_gradients(*stages)
    assert torch.equal(weights[0].grad, weights[1].grad)
    torch.optim.AdamW(p for stage in stages for p in stage.submod.parameters()).step()
    assert torch.equal(weights[0], weights[1])
    assert weights[0].data_ptr() != weights[1].data_ptr()


def test_reducing_without_replicas_does_nothing() -> None:
    _, stages = build(CASES["mlp"], 2)
    reduce_replicated_gradients(*stages)
    assert all(p.grad is None for stage in stages for p in stage.submod.parameters())


# ---------------------------------------------------------------------------- build_stage


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", ["mlp", "skips", "buffers", "loss inside"])
def test_a_stage_is_built_from_a_module_and_info(name: str, wrapped: bool) -> None:
    """From the stage's module, and from one that calls it."""
    case = CASES[name]
    args, kwargs = case.microbatch(0)
    torch.manual_seed(0)
    pipe = pipeline(case.model(3), args, kwargs)
    info = pipe.info()
    modules = [pipe.get_stage_module(index) for index in range(3)]
    stages = [
        build_stage(CallingConvention(module) if wrapped else module, index, info, "cpu")
        for index, module in enumerate(modules)
    ]
    schedule = torch_pipelining.ScheduleInterleavedZeroBubble(
        stages, MICROBATCHES, loss_fn=pipe.loss_fn if pipe.has_loss_and_backward else case.loss
    )
    args, kwargs, target = case.batch(MICROBATCHES)
    schedule.step(*args, target=target, **kwargs)
    gradients = {n: p.grad for module in modules for n, p in module.named_parameters()}
    for parameter_name, expected in reference_gradients(case, 3, MICROBATCHES).items():
        torch.testing.assert_close(gradients[parameter_name], expected)


class CallingConvention(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: torch.Tensor) -> object:
        return self.module(*args)


def test_what_build_stage_refuses() -> None:
    case = CASES["tied replicated"]
    args, kwargs = case.microbatch(0)
    pipe = pipeline(case.model(2), args, kwargs)
    module, info = pipe.get_stage_module(0), pipe.info()
    with pytest.raises(ValueError, match="there is no stage 2; the pipe has 2"):
        build_stage(module, 2, info, "cpu")
    with pytest.raises(PartitionError, match=r"what pipe.info\(\) returns, not 3"):
        build_stage(module, 0, 3, "cpu")
    with pytest.raises(PartitionError, match="held by several stages"):
        build_stage(CallingConvention(module), 0, info, "cpu")
    replica = nn.parallel.DistributedDataParallel(module)
    with pytest.raises(PartitionError, match="compile\\(parallel=DataParallel"):
        build_stage(replica, 0, info, "cpu")


def test_schedules_are_those_of_torch() -> None:
    for name in torch_pipelining.__all__:
        if name.startswith("Schedule"):
            assert getattr(pipelining, name) is getattr(torch_pipelining, name)
    assert issubclass(pipelining.Stage, torch_pipelining.PipelineStage)
    with pytest.raises(AttributeError, match="no attribute 'Schedule'"):
        _ = pipelining.Schedule


def test_gradients_of_inputs_are_returned_and_those_of_parameters_accumulate() -> None:
    x, w = torch.randn(3, requires_grad=True), torch.ones(3, requires_grad=True)
    w.grad = torch.ones(3)
    (gradient,) = stage_backward(x * w, torch.full((3,), 2.0), [x])
    assert torch.equal(gradient, torch.full((3,), 2.0))
    assert torch.equal(w.grad, 2 * x + 1)
    assert x.grad is None


def test_only_the_named_outputs_start_the_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    outputs = [x * 2, x * 3, 5]
    grads = [torch.ones(3), None, None]
    (gradient,) = stage_backward(outputs, grads, [x], outputs_with_grads_idxs=[0])
    assert torch.equal(gradient, torch.full((3,), 2.0))


def test_a_loss_needs_no_gradient() -> None:
    x = torch.randn(3, requires_grad=True)
    (gradient,) = stage_backward(x.sum(), None, [x])
    assert torch.equal(gradient, torch.ones(3))


def test_inputs_that_are_no_leaves_or_no_tensors() -> None:
    leaf = torch.randn(3, requires_grad=True)
    x, mask = leaf * 2, torch.ones(3, dtype=torch.bool)
    gradients = stage_backward((x * mask,), (torch.ones(3),), [x, mask, 4, torch.ones(3)])
    assert torch.equal(gradients[0], torch.ones(3))
    assert gradients[1:] == (None, None, None)


def test_outputs_without_gradient_are_left_out() -> None:
    x = torch.randn(3, requires_grad=True)
    assert stage_backward([torch.ones(3), x * 2], [torch.ones(3), None], [x]) == (None,)
    with torch.no_grad():
        assert stage_backward(x.sum(), None, [x]) == (None,)


def test_received_values_are_leaves_of_their_stage() -> None:
    x = torch.randn(3, requires_grad=True) * 2
    received = cut(x)
    assert received.is_leaf
    assert received.requires_grad
    assert received.data_ptr() == x.data_ptr()
    assert not cut(torch.ones(3)).requires_grad
    assert cut("text") == "text"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(None, None, None), (1.0, None, 1.0), (None, 2.0, 2.0), (1.0, 2.0, 3.0)],
)
def test_no_gradient_is_nothing_to_add(
    one: float | None, other: float | None, expected: float | None
) -> None:
    total = add_gradients(*(None if v is None else torch.tensor(v) for v in (one, other)))
    assert (None if total is None else total.item()) == expected


SINGLE = {"gpipe": torch_pipelining.ScheduleGPipe, "1f1b": torch_pipelining.Schedule1F1B}


MULTI = {
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "zero bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zero bubble V": torch_pipelining.ScheduleZBVZeroBubble,
}


def make_pipe(case: Case, stages: int) -> Pipe:
    torch.manual_seed(0)
    model = case.model(stages)
    args, kwargs = case.microbatch(0)
    return pipeline(model, args, kwargs, multi_use_param_spec=case.sharing)


def stages_of(rank: int, schedule_name: str, world: int) -> list[int]:
    if schedule_name in SINGLE:
        return [rank]
    return [rank, 2 * world - 1 - rank if schedule_name.endswith("V") else rank + world]


def train_rank(rank: int, case_name: str, schedule_name: str, world: int) -> dict[str, Tensor]:
    """One step of this rank's stages; the gradients by name of the model's parameters."""
    case = CASES[case_name]
    per_rank = 2 if schedule_name in MULTI else 1
    pipe = make_pipe(case, world * per_rank)
    built = [pipe.build_stage(index, "cpu") for index in stages_of(rank, schedule_name, world)]
    last = any(stage.is_last for stage in built)
    loss_fn = pipe.loss_fn if pipe.has_loss_and_backward else case.loss
    schedule: Any
    if schedule_name in MULTI:
        schedule = MULTI[schedule_name](built, MICROBATCHES, loss_fn=loss_fn)
    else:
        schedule = SINGLE[schedule_name](built[0], MICROBATCHES, loss_fn=loss_fn)
    del pipe
    args, kwargs, target = case.batch(MICROBATCHES)
    given = (args, kwargs) if rank == 0 else ((), {})
    losses: list[Tensor] = []
    wanted = {"target": target, "losses": losses} if last else {}
    schedule.step(*given[0], **given[1], **wanted)
    reduce_replicated_gradients(*built)
    return {
        name: parameter.grad
        for stage in built
        for name, parameter in stage.submod.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }


def check(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    assert {name for result in results for name in result} == set(expected)
    for result in results:
        for name, gradient in result.items():
            torch.testing.assert_close(gradient, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", [*SINGLE, *MULTI])
def test_two_ranks_have_the_gradients_of_one_process(
    two_ranks: gloo.Pool, case: str, schedule: str
) -> None:
    stages = 4 if schedule in MULTI else 2
    expected = reference_gradients(CASES[case], stages, MICROBATCHES)
    check(two_ranks.run(train_rank, case, schedule, 2), expected)


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        ("tied replicated", "1f1b"),
        ("skips", "gpipe"),
        ("buffers", "interleaved"),
        ("shared later, transmitted", "zero bubble"),
    ],
)
def test_four_ranks_have_the_gradients_of_one_process(
    four_ranks: gloo.Pool, case: str, schedule: str
) -> None:
    expected = reference_gradients(CASES[case], 8 if schedule in MULTI else 4, MICROBATCHES)
    check(four_ranks.run(train_rank, case, schedule, 4), expected)


EXAMPLE = Path(__file__).parent.parent / "examples" / "pipeline.py"


@pytest.mark.full
def test_the_example_trains_under_torchrun() -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    options = ["--steps", "21", "--replicas", "2"]
    run = subprocess.run(
        [*launch, str(EXAMPLE), *options], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 4
