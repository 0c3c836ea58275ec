"""Measurement of a user's step: eager or DistributedDataParallel and graphopt, in turns."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from graphopt import _compat
from graphopt.errors import GraphOptError
from graphopt.estimate.memory import peak_memory
from graphopt.estimate.target import StepCalls

logger = logging.getLogger("graphopt")

COMPUTE, EAGER, TORCH = "compute alone", "eager", "torch.compile"
DDP_BUCKETS_MB = (25.0, 4.0, 1.0)
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
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    model: list[nn.Module]
    seconds: list[float] = field(default_factory=list)
    first_call: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class MeasuredVariants:
    """The measurements of all variants, by name.

    Attributes:
        baseline: the name of the variant that others are compared with: eager, or DDP with its
            default bucket size.
        differences: the largest difference of any parameter to the baseline's, by name.
    """

    variants: dict[str, Variant]
    baseline: str
    differences: dict[str, float]
    ranks: int
    device: torch.device


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The device of this rank, after joining the group of torchrun or of the user's script.

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
    device = torch.device("cuda", local) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield device
        return
    dist.init_process_group("nccl" if use_cuda else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def measure(
    calls: StepCalls, *, rounds: int = 8, turn: int = 4, inductor: bool = True
) -> MeasuredVariants:
    """Trains copies of the model with each variant, in turns; the user's own objects are unchanged.

    Args:
        rounds: turns of each variant.
        turn: steps of a turn; steps of graphopt overlap, so a turn ends with a flush.
        inductor: also compile the regions of the graph, and on one device the models by torch.

    Raises:
        GraphOptError: the model is not among the arguments of a step on several ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    made = dict(_variants(calls, ranks, inductor))
    device = _device(made)
    for name, variant in list(made.items()):
        try:
            variant.first_call = _seconds(variant, calls, calls.next_batches(1), device)
        except Exception as error:
            if name != TORCH:
                raise
            logger.warning("torch.compile does not take the models: %s", type(error).__name__)
            del made[name]
            continue
        _seconds(variant, calls, calls.next_batches(WARM_UP_STEPS - 1, 1), device)
        variant.peak_bytes = peak_memory(
            lambda v=variant: _run(v, calls, calls.next_batches(1)),  # type: ignore[misc]
            device,
        )
    names = list(made)
    for number in range(rounds):
        begin = number % len(names)
        batches = calls.next_batches(turn, number * turn)
        for name in names[begin:] + names[:begin]:
            made[name].seconds.append(_slowest(_seconds(made[name], calls, batches, device)))
    baseline = EAGER if ranks == 1 else _ddp_name(DDP_BUCKETS_MB[0])
    differences = {name: _difference(v, made[baseline]) for name, v in made.items()}
    return MeasuredVariants(made, baseline, differences, ranks, device)


def _variants(calls: StepCalls, ranks: int, inductor: bool) -> Iterator[tuple[str, Variant]]:
    has_models = any(isinstance(argument, nn.Module) for argument in calls.arguments)
    if ranks > 1 and not has_models:
        raise GraphOptError(
            "on several ranks the step is compared with DistributedDataParallel, so that its model"
            " has to be among its arguments: train_step(model, optimizer, …)"
        )
    if ranks == 1:
        yield EAGER, _variant(calls, calls.function)
        if inductor and has_models:
            yield TORCH, _variant(calls, calls.function, lambda model: torch.compile(model))
    else:
        yield COMPUTE, _variant(calls, calls.function)
        for size in DDP_BUCKETS_MB:
            yield _ddp_name(size), _variant(calls, calls.function, partial(_ddp, size))
    yield "graphopt, default", _variant(calls, graphopt.compile(calls.function))
    if ranks > 1:
        yield "graphopt, auto", _variant(calls, graphopt.compile(calls.function, pipeline="auto"))
    if inductor:
        compiled = graphopt.compile(calls.function, lower="inductor")
        yield "graphopt, Inductor", _variant(calls, compiled)
        if torch.cuda.is_available():
            recorded = graphopt.compile(calls.function, lower="inductor+cudagraphs")
            yield "graphopt, CUDA graphs", _variant(calls, recorded)


def _ddp_name(size: float) -> str:
    return f"DDP, {size:g} MB"


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


def _run(variant: Variant, calls: StepCalls, batches: list[tuple[Any, ...]]) -> None:
    for batch in batches:
        variant.function(*variant.arguments, *batch, **calls.keywords)
    if isinstance(variant.function, graphopt.TrainStep):
        variant.function.flush()


def _seconds(
    variant: Variant, calls: StepCalls, batches: list[tuple[Any, ...]], device: torch.device
) -> float:
    """The mean seconds of a step, by the device's clock."""
    if dist.is_initialized():
        dist.barrier()
    if device.type != "cuda":
        start = time.perf_counter()
        _run(variant, calls, batches)
        return (time.perf_counter() - start) / len(batches)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    _run(variant, calls, batches)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / len(batches)


def _slowest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return max(every)


def _device(made: dict[str, Variant]) -> torch.device:
    variant = next(iter(made.values()))
    leaves: list[Any] = _compat.tree_leaves(variant.arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    parameters = [p for model in variant.model for p in model.parameters()]
    return next((t.device for t in parameters + tensors), torch.device("cpu"))


def _difference(one: Variant, other: Variant) -> float:
    found = [
        float((a.detach() - b.detach()).abs().max())
        for mine, its in zip(one.model, other.model, strict=True)
        for a, b in zip(mine.parameters(), its.parameters(), strict=True)
        if a.numel()
    ]
    return max(found, default=0.0)
