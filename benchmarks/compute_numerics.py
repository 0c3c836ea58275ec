"""How far float32 is from float64, in eager PyTorch, torch.compile and graphopt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from compute_models import WORKLOADS, Batch, Loss, without_dropout
from compute_variants import COMPILED_MODEL, EAGER, INDUCTOR
from spread import Figures
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import graphopt

STEPS = 3


def numerics(task: Figures) -> Figures:
    """Relative L2 errors of loss, gradients and parameters after some steps of SGD, by variant."""
    workload = WORKLOADS[task["model"]]
    torch.manual_seed(0)
    model = without_dropout(workload.build())
    generator = torch.Generator().manual_seed(0)
    data = [workload.batch(generator) for _ in range(STEPS)]
    with everything_in_float64():
        doubled = [tuple(map(_double, batch)) for batch in data]
        exact = train(workload.loss, copy.deepcopy(model).double(), EAGER, doubled)
    assert exact["loss"][0].dtype == torch.float64
    found = {}
    for variant in (EAGER, COMPILED_MODEL, INDUCTOR):
        values = train(workload.loss, copy.deepcopy(model), variant, data)
        found[variant] = {key: relative_error(values[key], exact[key]) for key in exact}
    return found


def train(
    loss_of: Loss, model: nn.Module, variant: str, batches: Iterable[Batch]
) -> dict[str, list[Tensor]]:
    """The last loss, its gradients, and the parameters after it."""

    def step(model: nn.Module, optimizer: Optimizer, *batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Callable[..., Tensor] = step
    if variant == INDUCTOR:
        run = graphopt.compile(step, lower="inductor")
    trained = torch.compile(model) if variant == COMPILED_MODEL else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
    for batch in batches:
        loss = run(trained, optimizer, *batch)
    if isinstance(run, graphopt.TrainStep):
        run.flush()
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters)
    return {"loss": [loss], "gradients": gradients, "parameters": parameters}


def relative_error(values: list[Tensor], exact: list[Tensor]) -> float:
    """L2 norm of the difference over that of the exact values, all tensors together."""
    pairs = list(zip(values, exact, strict=True))
    with torch.no_grad():
        difference = sum((value.double() - wanted).square().sum() for value, wanted in pairs)
        norm = sum(wanted.square().sum() for _, wanted in pairs)
        return float((difference / norm).sqrt())


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """Inside, float32 means float64: models ask for float32 by name, as in norms and losses."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args, kwargs = tree_map(_float64_for_float32, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _float64_for_float32(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
