"""Compilation of one region's graph by Inductor."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import LoweringError
from graphopt.graph_utils import without_autocast
from graphopt.ir.generators import generators_apart
from graphopt.ir.operators import is_fused_optimizer
from graphopt.lowering.prepare import ChannelsLast, PreparedRegion, can_change_layout
from graphopt.lowering.updates import FUSED_UPDATE


class InputKind(NamedTuple):
    """The properties of an input that compiled code relies on: shape, strides, dtype, device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    negated: bool = False

    def fake(self) -> torch.Tensor:
        """A fake tensor of this kind; it takes no memory only in an active fake mode."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


NUMBER = InputKind(torch.float64, (), (), torch.device("cpu"))
"""Stands for a number that the graph computes."""


def number_dtypes(body: fx.Graph, kinds: Sequence[InputKind]) -> dict[int, torch.dtype]:
    """The dtype in which each number enters compiled code: the precision of the computation.

    Code that converts them for each element is several times slower. ATen's optimizers take Python
    floats.

    Returns:
        The dtype for each position of a number among the inputs.
    """
    precise = any(k.dtype is torch.float64 and k.shape for k in kinds if k is not NUMBER)
    inputs = body.find_nodes(op="placeholder")
    return {
        index: torch.float64
        if precise or any(map(is_fused_optimizer, inputs[index].users))
        else torch.float32
        for index, kind in enumerate(kinds)
        if kind is NUMBER
    }


def kind_of(value: torch.Tensor | float | torch.SymFloat) -> InputKind:
    """The kind of a region's input; an integer counts as a float."""
    if not isinstance(value, torch.Tensor):
        assert isinstance(value, (int, float, torch.SymFloat))
        return NUMBER
    return InputKind(value.dtype, value.shape, value.stride(), value.device, value.is_neg())


_COMPILING = threading.RLock()
"""Held while compiling, which changes settings of the whole process."""


@dataclass(frozen=True)
class Options:
    """The options of lowering: randomness, autotuning, CUDA graphs, size of regions.

    Attributes:
        random: lower random operators too. The numbers they draw are then not eager's.
        max_autotune: measure several kernels for each matrix product, and keep the fastest.
        cudagraphs: replay the steady state as CUDA graphs.
        min_ops: regions with fewer ATen operators stay as they are.

    >>> from graphopt.lowering import Options
    >>> Options(max_autotune=True).config()["max_autotune"]
    True
    """

    random: bool = False
    max_autotune: bool = False
    cudagraphs: bool = False
    min_ops: int = 10

    def config(self) -> dict[str, Any]:
        """The settings of Inductor that these options stand for."""
        return {
            "max_autotune": self.max_autotune,
            "size_asserts": False,
            "triton.cudagraphs": False,
        }


def compile_body(
    body: fx.GraphModule, kinds: Sequence[InputKind], options: Options
) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """Compiles a region's graph for given kinds of inputs.

    Returns:
        Compiled code, which takes a list of tensors and clears it.

    Raises:
        LoweringError: it cannot be compiled; names the operator where it is known.
    """
    from graphopt._compat import inductor

    mode = _compat.new_fake_mode()
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of Inductor's own code, not the user's
            stack.enter_context(_COMPILING)
            stack.enter_context(without_autocast())
            stack.enter_context(_compat.without_modes())
            stack.enter_context(same_random_numbers())
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            stack.enter_context(inductor.patched_config(options.config()))
            with mode:
                numbers = number_dtypes(body.graph, kinds)
                inputs = [
                    kind._replace(dtype=numbers.get(index, kind.dtype)).fake()
                    for index, kind in enumerate(kinds)
                ]
            return inductor.compile_inner(_decompose(body, inputs), inputs)
    except Exception as error:
        raise LoweringError(_explained(error)) from error


def _decompose(body: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    from graphopt._compat import inductor

    inductor.order_after_reads(FUSED_UPDATE)
    decomposed = inductor.decompose(body, inputs, PreparedRegion)
    if not inductor.prefers_channels_last(decomposed) or not can_change_layout(body.graph):
        return decomposed
    return inductor.decompose(body, inputs, ChannelsLast)


def _explained(error: Exception) -> str:
    """The text of a compile error, with the operator and a cure where they are known."""
    from graphopt._compat import inductor

    text = f"{type(error).__name__}: {error}".strip()
    if inductor.is_missing_compiler(error):
        return (
            "there is no working C++ compiler\n"
            "  hint:  install one, for example with `apt install g++`, or name it in CXX"
        )
    lines = [line.strip() for line in text.splitlines()]
    operator = next((line for line in lines if line.startswith("target:")), None)
    return lines[0] if operator is None or operator in lines[0] else f"{lines[0]} ({operator})"


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """While active, random numbers are drawn that are drawn again afterwards."""
    state = random.getstate()
    devices = [torch.device("cuda")] if torch.cuda.is_initialized() else []
    try:
        with generators_apart(devices):
            yield
    finally:
        random.setstate(state)
