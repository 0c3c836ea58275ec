"""oneDNN's kernel of recurrent layers, as a node of a graph.

The kernel asks whether autograd is on, and keeps what its backward needs only where it is; a graph
runs with autograd off. So the node calls the kernel with autograd on, on values that need no
gradient.

    mkldnn_rnn_layer(x, w, …)    ==>    graphopt.rnn_layer(x, w, …)     # autograd on
"""

from __future__ import annotations

from typing import Any

import torch

_SCHEMA = torch.ops.aten.mkldnn_rnn_layer.default._schema
_library = torch.library.Library("graphopt", "FRAGMENT")
_library.define("rnn_layer" + str(_SCHEMA).removeprefix("aten::mkldnn_rnn_layer"))


def _layer(*args: Any) -> Any:
    detached = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*detached)


def _fake(*args: Any) -> Any:
    return torch.ops.aten.mkldnn_rnn_layer.default(*args)


_library.impl("rnn_layer", _layer, "CPU")
torch.library.register_fake("graphopt::rnn_layer", _fake, lib=_library)

LAYER = torch.ops.graphopt.rnn_layer.default
"""What `aten.mkldnn_rnn_layer` is in a graph."""
