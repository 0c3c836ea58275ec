"""Inductor, from graph to compiled function; imported only when something is lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import fx

from graphopt import _compat

Compiled: TypeAlias = Callable[[list[Any]], Sequence[torch.Tensor]]


def decompose(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], interpreter: type[fx.Interpreter]
) -> fx.GraphModule:
    """Rewrites `gm` in the operators that Inductor has rules for.

    Args:
        inputs: fake tensors of one mode.
        interpreter: runs `gm`; may run something else that computes the same.
    """
    import torch._inductor.lowering  # some decompositions expect it to be there
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        return list(interpreter(gm).run(*args))

    traced = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="fake")
    with torch.no_grad():
        return traced(*inputs)


def order_after_reads(operator: _compat.OpOverload) -> None:
    """Makes compiled code read a tensor before the given operator updates it.

    Inductor computes what reads a tensor where the result is needed. When an operator is about to
    update that tensor it computes what is still due, but puts that behind the operator itself (seen
    in torch 2.13 and 2.15).

    Args:
        operator: its second argument is the list of tensors that it updates.
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    if operator in lowering.lowerings:
        return
    call = lowering.fallback_handler(operator)

    def lower(name: str, written: list[Any], *args: Any) -> Any:
        for tensor in written:
            V.graph.mark_buffer_mutated(tensor.get_name())
        return call(name, written, *args)

    lowering.add_layout_constraint(operator, lowering.constrain_to_fx_strides)
    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def prefers_channels_last(gm: fx.GraphModule) -> bool:
    """True if Inductor would compute a graph's convolutions in channels-last layout."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(gm, is_inference=False))


def compile_inner(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], mode: Any = None) -> Compiled:
    """Compiles a decomposed graph to a function of a list, which it empties.

    Outputs have the strides that the graph gives them.

    Args:
        mode: the fake mode; None: that of the inputs.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.virtualized import V

    mode = _compat.fake_mode_of(inputs) if mode is None else mode
    with tracing(TracingContext(mode)), torch.no_grad(), V.set_fake_mode(mode):
        _recursive_joint_graph_passes(gm)
        output = next(iter(reversed(gm.graph.nodes)))
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        return compile_fx_inner(gm, inputs)


def patched_config(options: dict[str, Any]) -> AbstractContextManager[Any]:
    """While active, Inductor's configuration has the given options."""
    from torch._inductor import config

    return config.patch(options)  # type: ignore[no-any-return]


def is_missing_compiler(error: BaseException) -> bool:
    """True if an error says that there is no working C++ compiler."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, InvalidCxxCompiler):
            return True
        if isinstance(seen, CppCompileError) and "No such file" in str(seen):
            return True
        seen = getattr(seen, "inner_exception", None) or seen.__cause__
    return False
