"""The code of executable graphs calls torch's functions where these are the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import graphopt
from graphopt._compat.bindings import direct_call, is_operator_overload
from graphopt.tracing.call import Call

aten = torch.ops.aten


class Seen(TorchDispatchMode):
    """Notes what is dispatched, with arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Functions say that memory is not pinned, which it is not anyway.
        options = {name: value for name, value in kwargs.items() if value not in (None, False)}
        self.calls.append((func, [_shown(arg) for arg in args], options))
        return func(*args, **kwargs)


def _shown(arg: Any) -> Any:
    return "tensor" if isinstance(arg, Tensor) else (type(arg), str(arg))


class Net(nn.Module):
    """Convolution, normalization, recurrence and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu().transpose(1, 2)
        return self.out(self.attention(self.recurrent(h)[0])[:, -1].clamp(-2, 2))


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "foreach": lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9, foreach=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_code_dispatches_what_the_graph_says(kind: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    run = graphopt.compile(step)
    batch = torch.randn(2, 4, 5), torch.tensor([0, 2])
    for _ in range(2):
        run(model, optimizer, *batch)
    module = run.graph_module
    entry = run._entries[0]
    with torch.no_grad():
        flat = entry.values(Call(run._fn, (model, optimizer, *batch), {}))
        seen = []
        for call in (module.forward, fx.Interpreter(_plain(module.first_executable, module)).run):
            given = [None if v is None else v.detach().clone() for v in flat]
            torch.manual_seed(1)
            with Seen() as mode:
                call(*given)
            seen.append((mode.calls, given))
    (direct, after), (interpreted, expected) = seen
    assert direct == interpreted
    assert all(a is b or torch.equal(a, b) for a, b in zip(after, expected, strict=True))
    bound = [n for n in module.first_executable.nodes if _is_bound(n)]
    assert len(bound) > 50


def _plain(graph: fx.Graph, root: fx.GraphModule) -> fx.GraphModule:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return fx.GraphModule(root, copy)


def _is_bound(node: fx.Node) -> bool:
    target: Any = node.target
    return is_operator_overload(target) and direct_call(node) is not target._op


def called(target: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a call with tensors of one row of 3 in place of text is bound to a function."""
    graph = fx.Graph()
    given = []
    for arg in args:
        node = graph.placeholder(arg) if isinstance(arg, str) else arg
        if isinstance(arg, str):
            node.meta["val"] = torch.empty(3, device="meta")
        given.append(node)
    node = graph.call_function(target, tuple(given), kwargs)
    node.meta["val"] = torch.empty(3, device="meta")
    return _is_bound(node)


def test_only_the_very_operator_is_bound() -> None:
    assert called(aten.add.Tensor, "x", "y", alpha=2)
    assert called(aten.add_.Tensor, "x", 0.5)
    assert not called(aten.add.Scalar, "x", 0.5)  # torch.add calls another overload
    assert not called(aten.zeros.default, [3])  # which obeys the default device
    assert not called(aten.sigmoid_backward.default, "x", "y")  # there is no such function
    assert called(aten.new_empty_strided.default, "x", [3], [1])  # options are those of x
