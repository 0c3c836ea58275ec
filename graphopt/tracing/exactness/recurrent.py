"""oneDNN's kernel for recurrent layers, as one node of a graph.

The kernel asks whether autograd is on: only then it keeps what its backward needs, and it rounds
otherwise where it does not. A graph runs with autograd off. So a node that is recorded while
autograd is on calls the kernel with autograd on, on values that need no gradient.

    mkldnn_rnn_layer(x, w, …)    ==>    graphopt.rnn_layer(x, w, …)     # autograd on

Its backward gives one tensor twice, as the gradients of both biases, of which autograd copies one;
here the operator does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location
from graphopt.tracing.exactness.formulas import functions_behind

KERNELS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions of torch that run a whole recurrent layer, packed or not."""

_library = torch.library.Library("graphopt", "FRAGMENT")


def _define(name: str, operator: Any, kernel: Callable[..., Any], rule: Callable[..., Any]) -> Any:
    """Defines an operator with the schema of an ATen operator and another kernel."""
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
    """True if a torch function is a recurrent layer that cuDNN would run."""
    if getattr(function, "__name__", "") not in KERNELS or not isinstance(args[0], torch.Tensor):
        return False
    backend = torch.backends.cudnn
    return bool(args[0].device.type == "cuda" and backend.enabled and backend.is_available())


def takes_as_padded(data: torch.Tensor, sizes: Sequence[int], states: Sequence[Any]) -> bool:
    """True if torch runs an LSTM on packed sequences by oneDNN: if all have one length, and oneDNN
    would run the unpacked ones.

    Args:
        data: the rows of all steps.
        sizes: how many of them each step has.
        states: the hidden state and that of the cells.
    """
    is_projected = states[0].shape[2] != states[1].shape[2]
    if len(set(sizes)) != 1 or is_projected or data.device.type != "cpu":
        return False
    enabled = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(enabled) and data.dtype in _OF_ONEDNN and _packed_by_onednn()


_OF_ONEDNN = frozenset({torch.float32, torch.bfloat16, torch.float16})


@functools.cache
def _packed_by_onednn() -> bool:
    """True if this torch runs LSTMs on packed sequences by oneDNN, as found by one trial."""
    with _compat.without_modes(), torch.enable_grad():
        rows, state = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1, 1)
        weights = [torch.zeros(4, 1)] * 2
        settings = (False, 1, 0.0, False, False)
        found = torch.lstm(
            rows, torch.ones(1, dtype=torch.int64), (state, state), weights, *settings
        )
        kinds = {type(each).__name__ for each in functions_behind([found[0].grad_fn])}
    return any(kind.startswith("Mkldnn") for kind in kinds)


def refused(function: Any) -> CaptureError:
    """Returns the error for cuDNN, which needs all weights in one buffer of memory when it runs."""
    return CaptureError(
        f"it runs a recurrent layer ({function.__name__}) by cuDNN, which keeps its weights in"
        " memory of its own",
        location=current_location(),
        hint="put the call under torch.backends.cudnn.flags(enabled=False): torch's own kernels"
        " run then, in eager code as well",
    )


def distinct(results: Any) -> Any:
    """Copies results of the backward that share memory."""
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
"""The operator that stands for `aten.mkldnn_rnn_layer` in a graph."""

BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
LAYER_BACKWARD = _define("rnn_layer_backward", BACKWARD, _layer_backward, _layer_backward)
"""The operator that stands for `aten.mkldnn_rnn_layer_backward` in a graph."""


def recorded(target: Any) -> Any:
    """Returns the operator to record in place of another; usually itself."""
    if target is torch.ops.aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():
        return LAYER
    return LAYER_BACKWARD if target is BACKWARD else target
