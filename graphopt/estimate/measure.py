"""Measurement of a user's step: eager, DistributedDataParallel or FSDP2, and graphopt, in turns."""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import graphopt
from graphopt import _compat
from graphopt.errors import GraphOptError
from graphopt.estimate.fully_sharded import shard_fully
from graphopt.estimate.memory import memory_left, peak_memory
from graphopt.estimate.pacing import pace_connections
from graphopt.estimate.target import StepCalls
from graphopt.ir.bits import same_bits

logger = logging.getLogger("graphopt")

COMPUTE, EAGER, TORCH, FSDP2 = "compute alone", "eager", "torch.compile", "FSDP2"
_OPTIONAL = {TORCH: "torch.compile does not take the models", FSDP2: "FSDP2 does not take the step"}
"""Variants that are left out where they fail, and what is said then."""
DDP_BUCKETS_MB = (25.0, 4.0, 1.0)
PIPELINES = {"graphopt, default": "default", "graphopt, auto": "auto"}
WARM_UP_STEPS = 3


@dataclass
class Variant:
    """One way to run the step, on a copy of the user's model.

    Attributes:
        function: the step: plain, or compiled.
        arguments: the arguments of every call.
        seconds: the seconds of a step, one for each turn: the slowest rank's.
        first_call: seconds of the first call, with capture and compilation.
        peak_bytes: the bytes that one step needs beyond those in use before it.
        random: the states of the random generators before its next step.
        result: the result of its last step, where that is a tensor.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    model: list[nn.Module]
    seconds: list[float] = field(default_factory=list)
    first_call: float = 0.0
    peak_bytes: int = 0
    random: list[torch.Tensor] = field(default_factory=list)
    result: torch.Tensor | None = None


@dataclass(frozen=True)
class MeasuredVariants:
    """The measurements of all variants, by name.

    Attributes:
        baseline: the name of the variant that others are compared with: eager, or DDP with its
            default bucket size.
        differences: the largest difference of any parameter, buffer or optimizer state to the
            baseline's on any rank, by name.
    """

    variants: dict[str, Variant]
    baseline: str
    differences: dict[str, float]
    ranks: int
    device: torch.device


@contextmanager
def process_group() -> Iterator[None]:
    """While active, this rank has its GPU, and is in the group of torchrun or of the user's script.

    Raises:
        GraphOptError: there are fewer GPUs than ranks on this machine.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    use_cuda = torch.cuda.is_available()
    if use_cuda and local >= torch.cuda.device_count():
        raise GraphOptError(
            f"rank {local} of this machine has no GPU: torch sees {torch.cuda.device_count()}."
            " Start as many processes as there are GPUs (torchrun --nproc-per-node), or hide them"
            " with CUDA_VISIBLE_DEVICES= to measure on the CPU"
        )
    if use_cuda:
        torch.cuda.set_device(local)
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if use_cuda else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(
    calls: StepCalls,
    *,
    rounds: int = 8,
    turn: int = 4,
    inductor: bool = True,
    paced: float | None = None,
) -> MeasuredVariants:
    """Trains copies of the model with each variant, in turns; the user's own objects are unchanged.

    Args:
        rounds: turns of each variant.
        turn: steps of a turn; steps of graphopt overlap, so a turn ends with a flush.
        inductor: also compile the regions of the graph, and on one device the models by torch.
        paced: the bytes that each connection of gloo sends in a second; None: as many as it can.

    Raises:
        GraphOptError: the model is not among the arguments of a step on several ranks.
    """
    made = prepared(calls, inductor=inductor)
    if paced is not None:
        pace_connections(paced)
    for number in range(rounds):
        take_turns(made, calls, turn, number)
    return compared(made)


def prepared(
    calls: StepCalls,
    *,
    buckets_mb: Sequence[float] = DDP_BUCKETS_MB,
    pipelines: Mapping[str, str] = PIPELINES,
    inductor: bool = True,
) -> dict[str, Variant]:
    """Makes all variants and warms them up, by name; all draw the same random numbers. Where the
    memory would run out, further bucket sizes and pipelines are left out.

    Args:
        buckets_mb: of DistributedDataParallel, the default size first.
        pipelines: of graphopt, by the variant's name; on one device only the first.

    Raises:
        GraphOptError: the model is not among the arguments of a step on several ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    makers = _makers(calls, ranks, buckets_mb, pipelines, inductor)
    wanted = {COMPUTE, EAGER, *map(_of_ddp, buckets_mb[:1]), *list(pipelines)[:1]}
    device = device_of(calls.arguments)
    random = _random_states(device)
    made: dict[str, Variant] = {}
    left_out: list[str] = []
    needed = 0.0
    for name in sorted(makers, key=lambda name: name not in wanted):
        before = memory_left(device)
        if name not in wanted and _slowest(_RESERVE * needed - before) > 0:
            left_out.append(name)
            continue
        try:
            variant = makers[name]()
            variant.random = random
            _warm_up(variant, calls, device)
        except Exception as error:
            if name not in _OPTIONAL:
                raise
            said = next(iter(str(error).splitlines()), type(error).__name__)
            logger.warning("%s: %s", _OPTIONAL[name], said)
            continue
        made[name] = variant
        needed = max(needed, before - memory_left(device) + variant.peak_bytes)
    if left_out:
        logger.warning("left out, since memory would run out: %s", ", ".join(left_out))
    return {name: made[name] for name in makers if name in made}


_RESERVE = 1.25
"""How many times the memory of the largest variant so far has to be free for another one."""


def _of_ddp(bucket_mb: float) -> str:
    return f"DDP, {bucket_mb:g} MB"


def _warm_up(variant: Variant, calls: StepCalls, device: torch.device) -> None:
    """Runs the first steps of a variant, and measures what the first call and a step take."""
    variant.first_call = _seconds(variant, calls, calls.next_batches(1), device)
    _seconds(variant, calls, calls.next_batches(WARM_UP_STEPS - 1, 1), device)
    variant.peak_bytes = peak_memory(
        lambda: _run(variant, calls, calls.next_batches(1), device), device
    )


def take_turns(made: Mapping[str, Variant], calls: StepCalls, turn: int, number: int) -> None:
    """Runs a turn of each variant on the same batches; who goes first changes with `number`."""
    names, device = list(made), _device_of(made)
    begin = number % len(names)
    batches = calls.next_batches(turn, number * turn)
    for name in names[begin:] + names[:begin]:
        made[name].seconds.append(_slowest(_seconds(made[name], calls, batches, device)))


def compared(made: Mapping[str, Variant]) -> MeasuredVariants:
    """Compares the models and optimizers of all variants, on all ranks, with the baseline's."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    baseline = EAGER if ranks == 1 else next(name for name in made if name.startswith("DDP"))
    differences = {n: _slowest(_difference(v, made[baseline])) for n, v in made.items()}
    return MeasuredVariants(dict(made), baseline, differences, ranks, _device_of(made))


def _makers(
    calls: StepCalls,
    ranks: int,
    buckets_mb: Sequence[float],
    pipelines: Mapping[str, str],
    inductor: bool,
) -> dict[str, Callable[[], Variant]]:
    """Functions that make the variants, by name, in the order of the table."""
    has_models = any(isinstance(argument, nn.Module) for argument in calls.arguments)
    if ranks > 1 and not has_models:
        raise GraphOptError(
            "on several ranks the step is compared with DistributedDataParallel, so that its model"
            " has to be among its arguments: train_step(model, optimizer, …)"
        )
    plain = partial(_variant, calls, calls.function)
    makers: dict[str, Callable[[], Variant]] = {}
    if ranks == 1:
        makers[EAGER] = plain
        if inductor and has_models:
            makers[TORCH] = partial(plain, lambda model: torch.compile(model))
    else:
        makers[COMPUTE] = plain
        for size in buckets_mb:
            makers[_of_ddp(size)] = partial(plain, partial(_ddp, size))
        if isinstance(calls.parallel, graphopt.ZeRO):
            makers[FSDP2] = partial(_fully_sharded, calls)

    def compiled(**options: Any) -> Callable[[], Variant]:
        compile_step = partial(graphopt.compile, calls.function, parallel=calls.parallel)
        return lambda: _variant(calls, compile_step(**options))

    for name in list(pipelines)[: None if ranks > 1 else 1]:
        makers[name] = compiled(pipeline=pipelines[name])
    if inductor:
        makers["graphopt, Inductor"] = compiled(lower="inductor")
        if torch.cuda.is_available():
            makers["graphopt, CUDA graphs"] = compiled(lower="inductor+cudagraphs")
    return makers


def _fully_sharded(calls: StepCalls) -> Variant:
    variant = _variant(calls, calls.function)
    shard_fully(variant.arguments)
    return variant


def _variant(
    calls: StepCalls,
    function: Callable[..., Any],
    wrapped: Callable[[nn.Module], Any] = lambda model: model,
) -> Variant:
    """A variant on copies of the arguments, whose models are then `wrapped`."""
    arguments = copy.deepcopy(calls.arguments)
    models = [argument for argument in arguments if isinstance(argument, nn.Module)]
    given = tuple(wrapped(a) if isinstance(a, nn.Module) else a for a in arguments)
    return Variant(function, given, models)


def _ddp(bucket_mb: float, model: nn.Module) -> nn.Module:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


def _run(
    variant: Variant, calls: StepCalls, batches: list[tuple[Any, ...]], device: torch.device
) -> None:
    torch.set_rng_state(variant.random[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(variant.random[1], device)
    for batch in batches:
        result = variant.function(*variant.arguments, *batch, **calls.keywords)
        variant.result = result.detach() if isinstance(result, torch.Tensor) else None
    if isinstance(variant.function, graphopt.TrainStep):
        variant.function.flush()
    variant.random = _random_states(device)


def _random_states(device: torch.device) -> list[torch.Tensor]:
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


def _seconds(
    variant: Variant, calls: StepCalls, batches: list[tuple[Any, ...]], device: torch.device
) -> float:
    """The mean seconds of a step, by the device's clock."""
    if dist.is_initialized():
        dist.barrier()
    if device.type != "cuda":
        start = time.perf_counter()
        _run(variant, calls, batches, device)
        return (time.perf_counter() - start) / len(batches)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    _run(variant, calls, batches, device)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / len(batches)


def _slowest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return max(every)


def device_of(arguments: Sequence[Any]) -> torch.device:
    """The device of the models among the arguments, or else of their tensors."""
    models = [argument for argument in arguments if isinstance(argument, nn.Module)]
    tensors: list[torch.Tensor] = [p for model in models for p in model.parameters()]
    tensors += [leaf for leaf in _compat.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _device_of(made: Mapping[str, Variant]) -> torch.device:
    return device_of(next(iter(made.values())).arguments)


def _difference(one: Variant, other: Variant) -> float:
    """The largest difference of two variants' parameters, buffers and optimizer states: 0 for equal
    bits only, and infinite for states that cannot be compared."""
    mine, its = dict(_state(one)), dict(_state(other))
    if mine.keys() != its.keys():
        return float("inf")
    return max((_distance(mine[name], its[name]) for name in mine), default=0.0)


def _state(variant: Variant) -> Iterator[tuple[str, torch.Tensor]]:
    for number, model in enumerate(variant.model):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield f"{number}.{name}", _whole(tensor.detach())
    optimizers = (a for a in variant.arguments if isinstance(a, torch.optim.Optimizer))
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, (torch.Tensor, float, int)):
                    yield f"optimizer {number}: {index}.{name}", _whole(torch.as_tensor(value))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, gathered on all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if same_bits(one, other):
        return 0.0
    size = float((one.double() - other.double()).abs().max())
    return max(size, sys.float_info.min) if size == size else float("inf")
