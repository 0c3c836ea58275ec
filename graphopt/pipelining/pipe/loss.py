"""Models that compute their own loss, and the position of the loss among their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from graphopt.errors import PartitionError
from graphopt.pipelining.trees import Path, leaves, path_name


class LossWrapper(nn.Module, ABC):
    """A model with its loss function, which the `forward` of a subclass combines.

    >>> class WithLoss(graphopt.pipelining.LossWrapper):
    ...     def forward(self, x, target):
    ...         return self.loss_fn(self.module(x), target)
    >>> WithLoss(torch.nn.ReLU(), torch.nn.functional.mse_loss)(torch.ones(2), torch.ones(2))
    tensor(0.)
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss from the model's arguments and the targets."""


class TrivialLossWrapper(LossWrapper):
    """A model that returns only its loss, `loss_fn(module(x), targets)`.

    >>> from graphopt.pipelining import TrivialLossWrapper
    >>> model = TrivialLossWrapper(torch.nn.ReLU(), torch.nn.functional.mse_loss)
    >>> model(torch.ones(2), torch.ones(2))
    tensor(0.)
    """

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        return self.loss_fn(self.module(x), targets)


@dataclass(frozen=True)
class LossPicker:
    """A loss function for schedules that picks the loss out of the model's output."""

    index: int

    def __call__(self, output: Any, target: Any = None) -> Any:
        return list(leaves(output).values())[self.index]


def loss_position(module: nn.Module, output: Any, spec: Any) -> int | None:
    """The index of the loss among the leaves of the model's output, or None without a loss.

    Args:
        module: whose class may have a `loss_spec`.
        output: the output as nested as the model returns it.
        spec: nested as the output is, with True for the loss and False for all else; or None: the
            module's own, or the entry "loss" of a mapping.

    Raises:
        PartitionError: `spec` has no True or several, or another structure than the output.
    """
    if spec is None:
        spec = getattr(module, "loss_spec", None) if isinstance(module, LossWrapper) else None
    paths = list(leaves(output))
    if spec is not None:
        return paths.index(_marked_path(paths, spec))
    if isinstance(output, Mapping) and output.get("loss") is not None and ("loss",) in paths:
        return paths.index(("loss",))
    return None


def _marked_path(paths: list[Path], spec: Any) -> Path:
    flags = leaves(spec)
    for path, flag in flags.items():
        if not isinstance(flag, bool):
            raise PartitionError(
                f"the loss spec has {flag!r} at {path_name('output', path)}; it takes True for the"
                " loss and False for all else"
            )
    marked = [path for path, flag in flags.items() if flag]
    if len(marked) != 1:
        raise PartitionError(f"the loss spec has {len(marked)} losses marked True; it must be one")
    differing = set(flags) ^ set(paths)
    if differing:
        where = path_name("output", min(differing, key=str))
        raise PartitionError(f"the loss spec is nested differently than the output: {where}")
    return marked[0]
