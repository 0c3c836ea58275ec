"""Built stages: what schedules see of them, in a process group of one rank."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as torch_pipelining

from graphopt import pipelining
from graphopt.errors import PartitionError
from graphopt.pipelining import build_stage, pipeline, reduce_replicated_gradients
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
        build_stage(Calling(module) if wrapped else module, index, info, "cpu")
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


class Calling(nn.Module):
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
        build_stage(Calling(module), 0, info, "cpu")
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
