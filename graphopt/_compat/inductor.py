"""Inductor: graph in, compiled function out. Imported only when something is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

from graphopt import _compat


def decompose(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """`gm` in the operators that Inductor has rules for.

    Args:
        inputs: fake tensors of one mode.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        return list(fx.Interpreter(gm).run(*args))

    traced = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="fake")
    with torch.no_grad():
        return traced(*inputs)


def compile_inner(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """Compile a decomposed graph. The result takes a list, which it clears, and returns a sequence.

    Outputs have the strides that the graph gives them.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.virtualized import V

    mode = _compat.fake_mode_of(inputs)
    with tracing(TracingContext(mode)), torch.no_grad(), V.set_fake_mode(mode):
        _recursive_joint_graph_passes(gm)
        output = next(iter(reversed(gm.graph.nodes)))
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        return compile_fx_inner(gm, inputs)  # type: ignore[no-any-return]


def patched_config(options: dict[str, Any]) -> AbstractContextManager[Any]:
    """Inductor's settings while the context is active."""
    from torch._inductor import config

    return config.patch(options)  # type: ignore[no-any-return]


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing for now."""
    yield
