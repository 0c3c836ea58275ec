"""Private torch APIs of torch.compile: AOTAutograd's graphs and Inductor's custom passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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
    """The kind of graph that AOTAutograd compiles now: "joint", "forward", "backward" or
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
    """The phase of a node in a joint graph, or None if AOTAutograd does not tell."""
    tag = str(node.meta.get("partitioner_tag"))
    return next((phase for phase in ("backward", "forward") if tag.endswith(phase)), None)


def averages_outside_graphs() -> bool:
    """True if the forward of a `DistributedDataParallel` is compiled whose C++ reducer averages
    gradients, not so with ``optimize_ddp="python_reducer"``."""
    if not torch.distributed.is_available():
        return False
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module() is not None


def complete_metadata(graph: fx.Graph) -> None:
    """Adds the `meta["tensor_meta"]` that Inductor reads to nodes that lack it."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and "tensor_meta" not in node.meta:
            node.meta["tensor_meta"] = _extract_tensor_metadata(value)


# ---------------------------------------------------------------------------- decompositions


def has_decomposition(target: Any) -> bool:
    """True if Inductor expects an operator to be decomposed during tracing."""
    from torch._inductor.decomposition import select_decomp_table

    return target in select_decomp_table()


def trace_decomposed(
    function: Callable[..., Any], values: Sequence[Any], like: fx.Node
) -> fx.GraphModule:
    """Traces a function on fake values with Inductor's decompositions.

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
    """The list of passes in a setting such as `post_grad_custom_post_pass`."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def registered_passes(setting: str) -> tuple[GraphPass, ...]:
    """The passes that an Inductor setting holds now."""
    from torch._inductor import config

    return passes_in(getattr(config, setting))


def apply_graph_pass(graph_pass: GraphPass, graph: fx.Graph) -> None:
    """Calls a custom graph pass the way Inductor calls it."""
    if isinstance(graph_pass, _InferenceAware):
        graph_pass(graph, _aot_kind() == "inference")  # type: ignore[call-arg]
    else:
        graph_pass(graph)


def identity_of(graph_pass: GraphPass) -> Any:
    """The cache identity of an Inductor pass; None disables caching."""
    return graph_pass.uuid() or None if isinstance(graph_pass, CustomGraphPass) else None


# ---------------------------------------------------------------------------- backends


def inductor_options(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for `mode` and `options` of `torch.compile`, as torch checks them."""
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)
    return dict(wrapper.config)


def names_of_inductor_options() -> list[str]:
    from torch._inductor import config

    return list(config.get_config_copy())


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compiles as `backend="inductor"`, with settings that also hold for the backward."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, inputs, config_patches=dict(settings))
    return compiled  # type: ignore[no-any-return]


def compile_eagerly(
    gm: fx.GraphModule, inputs: Sequence[Any], prepare: Callable[[fx.GraphModule], None]
) -> Callable[..., Any]:
    """Compiles as `backend="aot_eager"`; `prepare` may edit each graph first."""
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
