"""oneDNN's kernel of recurrent layers, as a node of a graph.

The kernel asks whether autograd is on, and keeps what its backward needs only where it is; a graph
runs with autograd off. So the node calls the kernel with autograd on, on values that need no
gradient.

    mkldnn_rnn_layer(x, w, …)    ==>    graphopt.rnn_layer(x, w, …)     # autograd on

Its backward gives one tensor twice, as the gradients of both biases, of which autograd copies one;
here the operator does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.source import current_location

KERNELS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions of torch that run a whole recurrent layer, packed or not."""

_library = torch.library.Library("graphopt", "FRAGMENT")


def _define(name: str, operator: Any, kernel: Callable[..., Any], rule: Callable[..., Any]) -> Any:
    """An operator like one of ATen's, with another kernel."""
    _library.define(
        name + str(_compat.schema_of(operator)).removeprefix(_compat.operator_name(operator))
    )
    _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"graphopt::{name}", rule, lib=_library)
    return getattr(torch.ops.graphopt, name).default


def _layer(*args: Any) -> Any:
    detached = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*detached)


def _layer_backward(*args: Any) -> Any:
    return distinct(torch.ops.aten.mkldnn_rnn_layer_backward.default(*args))


def is_on_cudnn(function: Any, args: Sequence[Any]) -> bool:
    """Whether a torch function is a recurrent layer that cuDNN would run."""
    if getattr(function, "__name__", "") not in KERNELS or not isinstance(args[0], torch.Tensor):
        return False
    backend = torch.backends.cudnn
    return bool(args[0].device.type == "cuda" and backend.enabled and backend.is_available())


def refused(function: Any) -> CaptureError:
    """cuDNN takes all weights as one buffer, which is looked for in their memory when it runs."""
    return CaptureError(
        f"it runs a recurrent layer ({function.__name__}) by cuDNN, which keeps its weights in"
        " memory of its own",
        location=current_location(),
        hint="put the call under torch.backends.cudnn.flags(enabled=False): torch's own kernels"
        " run then, in eager code as well",
    )


def distinct(results: Any) -> Any:
    """Results of the backward, each in memory of its own."""
    known: set[int] = set()
    found = []
    for gradient in results:
        key = _compat.storage_key(gradient)
        found.append(_copied(gradient) if key in known else gradient)
        known.add(key)
    return tuple(found)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if _compat.is_fake(tensor):
        return _compat.fake_laid_out(tensor, tensor.shape, tensor.stride(), tensor.dtype)
    return tensor.clone()


LAYER = _define(
    "rnn_layer",
    torch.ops.aten.mkldnn_rnn_layer.default,
    _layer,
    torch.ops.aten.mkldnn_rnn_layer.default,
)
"""What `aten.mkldnn_rnn_layer` is in a graph."""

BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
LAYER_BACKWARD = _define("rnn_layer_backward", BACKWARD, _layer_backward, _layer_backward)
"""What `aten.mkldnn_rnn_layer_backward` is in a graph."""

KERNEL_OF_GRAPHS: dict[Any, Any] = {
    torch.ops.aten.mkldnn_rnn_layer.default: LAYER,
    BACKWARD: LAYER_BACKWARD,
}
"""What stands in a graph for the operators that a trace records."""
