"""Functional forms of kernels that update running statistics although their schemas deny it.

cuDNN's BatchNorm updates the statistics that it is given, and MIOpen's does. In a graph without
declared writes such an update would happen wherever the kernel runs: before an assumption that then
fails, after a reader that should see it, or in a value received from another rank. The operators
here return the new statistics, and a `copy_` puts them where they belong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphopt import _compat

_NAMESPACE = "graphopt_inplace"
_STATISTICS = ("running_mean", "running_var")

aten = torch.ops.aten
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


class _StatisticsKernel(NamedTuple):
    """A kernel that updates running statistics.

    Attributes:
        functional: returns what the kernel does, and after it the statistics.
        positions: of the statistics among the arguments.
        training: position of the argument without which nothing is written.
    """

    functional: _compat.OpOverload
    positions: list[int]
    training: int


def _define(kernel: _compat.OpOverload) -> _StatisticsKernel:
    schema = _compat.schema_of(kernel)
    names = [argument.name for argument in schema.arguments]
    positions = [names.index(name) for name in _STATISTICS]
    name = schema.name.removeprefix("aten::")
    arguments = str(schema).partition("(")[2].partition(") -> ")[0]
    count = len(schema.returns) + len(positions)
    _library.define(f"{name}({arguments}) -> ({', '.join(['Tensor'] * count)})")

    def compute(*args: Any) -> tuple[torch.Tensor, ...]:
        given = list(args)
        for position in positions:
            given[position] = given[position].clone()
        return (*kernel(*given), *(given[position] for position in positions))

    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", compute, lib=_library)
    functional: _compat.OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return _StatisticsKernel(functional, positions, names.index("training"))


KERNELS = {
    kernel: _define(kernel)
    for kernel in (aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)
}


def written_functionally(target: Any, args: Any, kwargs: dict[str, Any]) -> Any | None:
    """Calls the functional form of a kernel with undeclared statistics updates, and writes each
    statistic by a `copy_`. None for other operators.

    Args:
        target: of a node of a raw trace.
        args, kwargs: functional tensors.

    Returns:
        None for other operators, and for calls that update nothing.
    """
    kernel = KERNELS.get(target)
    if kernel is None:
        return None
    names = [argument.name for argument in _compat.schema_of(target).arguments]
    given = [*args, *(kwargs[name] for name in names[len(args) :])]
    if not given[kernel.training]:
        return None
    statistics = [given[position] for position in kernel.positions]
    if any(value is None for value in statistics):
        return None
    results = kernel.functional(*given)
    for old, new in zip(statistics, results[-len(statistics) :], strict=True):
        old.copy_(new)
    return results[: -len(statistics)]
