"""oneDNN's kernel of recurrent layers, as a node of a graph.

The kernel asks whether autograd is on, and keeps what its backward needs only where it is; a graph
runs with autograd off. So the node calls the kernel with autograd on, on values that need no
gradient.

    mkldnn_rnn_layer(x, w, …)    ==>    graphopt.rnn_layer(x, w, …)     # autograd on

Its backward gives one tensor twice, as the gradients of both biases. Autograd copies one of them;
in a graph the operator does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.source import current_user_line

KERNELS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions of torch that run a whole recurrent layer, packed or not."""

_library = torch.library.Library("graphopt", "FRAGMENT")


def _define(name: str, operator: Any, kernel: Callable[..., Any]) -> Any:
    """An operator like one of ATen's, with another kernel."""
    _library.define(name + str(operator._schema).removeprefix(operator._schema.name))
    _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"graphopt::{name}", operator, lib=_library)
    return getattr(torch.ops.graphopt, name).default


def _layer(*args: Any) -> Any:
    detached = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*detached)


def _layer_backward(*args: Any) -> Any:
    known: set[int | None] = set()
    results = []
    for gradient in torch.ops.aten.mkldnn_rnn_layer_backward.default(*args):
        key = _compat.storage_key(gradient) if isinstance(gradient, torch.Tensor) else None
        results.append(gradient.clone() if key in known else gradient)
        known |= {key} - {None}
    return tuple(results)


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
        location=str(current_user_line()),
        hint="put the call under torch.backends.cudnn.flags(enabled=False): torch's own kernels"
        " run then, in eager code as well",
    )


LAYER = _define("rnn_layer", torch.ops.aten.mkldnn_rnn_layer.default, _layer)
"""What `aten.mkldnn_rnn_layer` is in a graph."""

LAYER_BACKWARD = _define(
    "rnn_layer_backward", torch.ops.aten.mkldnn_rnn_layer_backward.default, _layer_backward
)
"""What `aten.mkldnn_rnn_layer_backward` is in a graph."""
