"""From the graph of one region to compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import LoweringError


class Kind(NamedTuple):
    """What compiled code relies on of one input."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device


def kind_of(tensor: torch.Tensor) -> Kind:
    """The kind of a tensor."""
    return Kind(tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


@dataclass(frozen=True)
class Options:
    """How regions are compiled.

    Attributes:
        max_autotune: try several kernels for each matrix product, and keep the fastest.
    """

    max_autotune: bool = False

    def config(self) -> dict[str, Any]:
        """The settings of Inductor that this stands for."""
        return {"max_autotune": self.max_autotune, "size_asserts": False}


def compile_body(
    body: fx.GraphModule, kinds: Sequence[Kind], options: Options
) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """Compile a region for one kind of each input.

    Raises:
        LoweringError: it cannot be compiled; names the operator where it is known.
    """
    from graphopt._compat import inductor

    mode = _compat.new_fake_mode()
    with mode:
        inputs = [
            torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=kind.device)
            for kind in kinds
        ]
    try:
        with inductor.patched_config(options.config()):
            return inductor.compile_inner(inductor.decompose(body, inputs), inputs)
    except Exception as error:
        raise LoweringError(f"Inductor: {error}") from error
