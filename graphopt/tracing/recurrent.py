"""oneDNN's kernel of recurrent layers, as a node of a graph.

The kernel asks whether autograd is on, and keeps what its backward needs only where it is; a graph
runs with autograd off. So the node calls the kernel with autograd on, on values that need no
gradient.

    mkldnn_rnn_layer(x, w, …)    ==>    graphopt.rnn_layer(x, w, …)     # autograd on

Its backward gives one tensor twice, as the gradients of both biases, of which autograd copies one;
here the operator does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphopt import _compat

_library = torch.library.Library("graphopt", "FRAGMENT")


def _define(name: str, operator: Any, kernel: Callable[..., Any], rule: Callable[..., Any]) -> Any:
    """An operator like one of ATen's, with another kernel."""
    _library.define(name + str(operator._schema).removeprefix(operator._schema.name))
    _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"graphopt::{name}", rule, lib=_library)
    return getattr(torch.ops.graphopt, name).default


def _layer(*args: Any) -> Any:
    detached = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*detached)


def _layer_backward(*args: Any) -> Any:
    return distinct(torch.ops.aten.mkldnn_rnn_layer_backward.default(*args))


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
