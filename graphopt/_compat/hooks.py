"""torch.compile from inside: the graphs of AOTAutograd, and Inductor's places for passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass

from graphopt._compat import fake_mode_of, tree_leaves

GraphPass = Callable[[fx.Graph], object]

# What torch calls with `is_inference` as well; not in every supported version.
_InferenceAware: type | tuple[()] = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())


def kind_of_graph() -> str | None:
    """The kind of graph that AOTAutograd is compiling now: "joint", "forward", "backward" or
    "inference".

    None outside of AOTAutograd, as where a graph is given to Inductor directly.
    """
    from torch._dynamo import compiled_autograd

    kind = _aot_kind()
    # A backward that compiled autograd records needs no gradients itself.
    if kind == "inference" and compiled_autograd.in_compiled_autograd_region:
        return "backward"
    return kind


def _aot_kind() -> str | None:
    from torch._functorch.aot_autograd import get_aot_compilation_context

    names, _, _ = get_aot_compilation_context()
    return names[0].partition("_")[2] if names else None


def phase_in_joint_graph(node: fx.Node) -> str | None:
    """The phase in which AOTAutograd has traced a node of a joint graph, if it says so."""
    tag = str(node.meta.get("partitioner_tag"))
    return next((phase for phase in ("backward", "forward") if tag.endswith(phase)), None)


def averages_outside_graphs() -> bool:
    """True if what is compiled now is the forward of a `DistributedDataParallel` whose reducer in
    C++ averages the gradients; not so with ``optimize_ddp="python_reducer"``."""
    if not torch.distributed.is_available():
        return False
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module() is not None


def complete_metadata(graph: fx.Graph) -> None:
    """Give nodes the `meta["tensor_meta"]` that those of AOTAutograd have, which Inductor reads."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and "tensor_meta" not in node.meta:
            node.meta["tensor_meta"] = _extract_tensor_metadata(value)


# ---------------------------------------------------------------------------- decompositions


def has_decomposition(target: Any) -> bool:
    """True if Inductor expects that tracing has written an operator in terms of others."""
    from torch._inductor.decomposition import select_decomp_table

    return target in select_decomp_table()


def trace_decomposed(
    function: Callable[..., Any], values: Sequence[Any], like: fx.Node
) -> fx.GraphModule:
    """Trace a function of fake values, with Inductor's decompositions.

    Args:
        like: a node whose `meta["val"]` lives in the mode of the graph.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode_of([v for v in tree_leaves(like.meta["val"]) if isinstance(v, torch.Tensor)])
    with nullcontext() if mode is None else mode, enable_python_dispatcher(), torch.no_grad():
        # "real": the values are fake already, and sizes that are symbols have to stay these.
        traced = make_fx(function, select_decomp_table(), tracing_mode="real")(*values)
    traced.graph.eliminate_dead_code()
    return traced


# ---------------------------------------------------------------------------- Inductor's passes


def passes_in(value: Any) -> tuple[GraphPass, ...]:
    """The passes that a setting such as `post_grad_custom_post_pass` holds: none, one or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def registered_passes(setting: str) -> tuple[GraphPass, ...]:
    """The passes that one of Inductor's settings holds now."""
    from torch._inductor import config

    return passes_in(getattr(config, setting))


def inductor_settings(settings: Mapping[str, Any]) -> AbstractContextManager[object]:
    """While active, Inductor has these settings; afterwards it has the previous ones again."""
    from torch._inductor import config

    patch: AbstractContextManager[object] = config.patch(dict(settings))
    return patch


def apply_graph_pass(graph_pass: GraphPass, graph: fx.Graph) -> None:
    """Call a pass as Inductor does."""
    if isinstance(graph_pass, _InferenceAware):
        graph_pass(graph, _aot_kind() == "inference")  # type: ignore[call-arg]
    else:
        graph_pass(graph)


def identity_of(graph_pass: GraphPass) -> Any:
    """The identity by which Inductor's caches know a pass; None if it has none, so that nothing is
    cached."""
    return graph_pass.uuid() or None if isinstance(graph_pass, CustomGraphPass) else None


# ---------------------------------------------------------------------------- backends


def inductor_options(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for the `mode` and `options` of `torch.compile`, checked by torch."""
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)
    return dict(wrapper.config)


def names_of_inductor_options() -> list[str]:
    """The names of all options of Inductor."""
    from torch._inductor import config

    return list(config.get_config_copy())


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile as `backend="inductor"` does, with settings that hold for the backward as well."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, inputs, config_patches=dict(settings))
    return compiled  # type: ignore[no-any-return]


def compile_eagerly(
    gm: fx.GraphModule, inputs: Sequence[Any], prepare: Callable[[fx.GraphModule], None]
) -> Callable[..., Any]:
    """Compile as `backend="aot_eager"` does; `prepare` may edit each graph before it is used."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_graph(graph_module: fx.GraphModule, graph_inputs: Any) -> Callable[..., Any]:
        prepare(graph_module)
        return boxed_nop(graph_module, graph_inputs)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled
