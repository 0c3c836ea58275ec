"""Layers and functions for which eager code chooses a kernel: a captured step runs the same one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphopt
from graphopt.errors import CaptureError
from graphopt.graph_utils import get_outputs, is_operator
from graphopt.tracing.capture import capture
from graphopt.tracing.exactness.statistics import written_functionally
from loops import Loop, graphs_of, trained


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        output, weights = self.attention(x, x, x, **self.options)
        return output if weights is None else output + weights.sum()


def _masked(options: dict[str, Any]) -> nn.Module:
    return Attention(attn_mask=torch.ones(5, 5).triu(1).bool(), **options)


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first"))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "no weights": lambda: Attention(need_weights=False),
    "weights of each head": lambda: Attention(average_attn_weights=False),
    "masked": lambda: _masked({}),
    "masked, no weights": lambda: _masked({"need_weights": False}),
    "padded": lambda: Attention(key_padding_mask=torch.arange(5).expand(3, 5) > 3),
    "encoder": _encoder,
    "gelu": lambda: _encoder(activation="gelu"),
    "norms first": lambda: _encoder(norm_first=True),
    "odd heads": lambda: nn.TransformerEncoderLayer(15, 3, 32, batch_first=True),
    "sequences first": lambda: nn.TransformerEncoderLayer(16, 4, 32),
}


def left_by(name: str, compiled: bool) -> list[Tensor]:
    """A student learns from a teacher in evaluation, which follows it."""
    torch.manual_seed(0)
    student = MODULES[name]()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)

    def step(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student.train()(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(its, 0.5)
            predicted = student.eval()(x)
        return [loss.detach(), wanted, predicted, teacher(x)]

    run = graphopt.compile(step) if compiled else step
    width = 15 if name == "odd heads" else 16
    left: list[Tensor] = []
    for _ in range(2):
        left += [each.clone() for each in run(torch.randn(3, 5, width))]
    return left + [each.detach() for each in student.parameters()]


@pytest.mark.parametrize("name", MODULES)
def test_layers_in_evaluation(name: str) -> None:
    for expected, found in zip(left_by(name, False), left_by(name, True), strict=True):
        assert torch.equal(expected, found)


def test_nested_tensors_are_refused_with_what_works() -> None:
    mask = torch.arange(5).expand(3, 5) > 3

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(x, src_key_padding_mask=mask)
            return found

    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    x = torch.randn(3, 5, 16)
    with pytest.raises(CaptureError, match="nested tensor") as refused:
        graphopt.compile(step)(nn.TransformerEncoder(layer, 2).eval(), x)
    assert "enable_nested_tensor=False" in str(refused.value)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    assert torch.equal(graphopt.compile(step)(model, x), step(model, x))


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "svdvals": torch.linalg.svdvals,
    "svdvals, by name": lambda a: torch.linalg.svdvals(A=a),
    "eigvals": torch.linalg.eigvals,
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mT),
    "eigvalsh, upper": lambda a: torch.linalg.eigvalsh(a + a.mT, "U"),
    "eigvalsh, by name": lambda a: torch.linalg.eigvalsh(a + a.mT, UPLO="U"),
    "nuclear": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "spectral": lambda a: torch.linalg.matrix_norm(a, 2),
    "smallest": lambda a: torch.linalg.norm(a, -2),
    "norm": lambda a: torch.norm(a, p="nuc"),
    "of a tensor": lambda a: a.norm(p="nuc"),
    "along others": lambda a: torch.linalg.matrix_norm(torch.stack([a, 2 * a]), 2, dim=(0, 2)),
    "condition": torch.linalg.cond,
    "condition, smallest": lambda a: torch.linalg.cond(a, -2),
    "rank": torch.linalg.matrix_rank,
    "with vectors": lambda a: torch.linalg.svd(a)[1],
    "with vectors, older": lambda a: torch.svd(a)[1],
    "eigh": lambda a: torch.linalg.eigh(a + a.mT)[0],
    "pinv": torch.linalg.pinv,
    "one of many": lambda a: torch.func.vmap(torch.linalg.svdvals)(torch.stack([a, -a])),
}


def value_and_gradient(weight: nn.Parameter, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    found = function(weight + x)
    if found.requires_grad:
        found.abs().sum().backward()
    return found.detach(), weight.grad


def without_gradients(weight: nn.Parameter, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    with torch.no_grad():
        return function(weight + x), None


def detached(weight: nn.Parameter, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    return function(weight.detach() + x), None


def left_by_transform(step: Any, name: str, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(17, 17))
    run = graphopt.compile(step) if compiled else step
    left = []
    for _ in range(2):
        found, gradient = run(weight, FUNCTIONS[name], torch.randn(17, 17))
        left += [found.clone(), None if gradient is None else gradient.clone()]
    return left


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("step", [without_gradients, detached, value_and_gradient])
def test_values_without_vectors(step: Any, name: str) -> None:
    expected, found = left_by_transform(step, name, False), left_by_transform(step, name, True)
    for one, other in zip(expected, found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


aten = torch.ops.aten


class CudnnNorm(nn.BatchNorm2d):
    """What `nn.BatchNorm2d` does on a GPU. Shape rules alone know it elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.cudnn_batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.1, 1e-5
        )
        return found[0]  # type: ignore[no-any-return]


def train(model: Any, average: Tensor, x: Tensor) -> Tensor:
    loss: Tensor = model(model(x)).square().mean()
    loss.backward()
    average.copy_(model.running_mean)
    return loss


def _captured(model: nn.Module) -> fx.GraphModule:
    return capture(train, model, torch.zeros(3), torch.randn(2, 3, 4, 4)).graph_module


def test_statistics_are_values_of_the_graph() -> None:
    graph = _captured(CudnnNorm(3)).graph
    norms = [n for n in graph.nodes if is_operator(n.target, "graphopt_inplace::cudnn_batch_norm")]
    first, second = norms
    assert not any(is_operator(n.target, "aten::cudnn_batch_norm") for n in graph.nodes)
    assert [node.op for node in first.args[3:5]] == ["placeholder", "placeholder"]
    # The second call goes on from what the first has made of them.
    assert [(node.args[0], node.args[1]) for node in second.args[3:5]] == [(first, 4), (first, 5)]
    updates = {copy.args[0]: copy.args[1] for copy in get_outputs(graph).updates}
    mean, average = first.args[3], next(n for n in updates if "average" in n.name)
    assert updates[mean].args == (second, 4)
    assert updates[average] is updates[mean]  # read after the update, and not before it


def test_nothing_is_updated_in_evaluation() -> None:
    graph = _captured(CudnnNorm(3).eval()).graph
    assert sum(is_operator(n.target, "aten::cudnn_batch_norm") for n in graph.nodes) == 2
    updated = [copy.args[0].name for copy in get_outputs(graph).updates]
    assert len(updated) == 1 and "average" in updated[0]


def test_without_statistics_the_kernel_stays() -> None:
    x = torch.randn(2, 3, 4, 4)
    arguments = (x, torch.ones(3), torch.zeros(3), None, None, True, 0.1, 1e-5)
    assert written_functionally(aten.cudnn_batch_norm.default, arguments, {}) is None


class WeightDrop(nn.Module):
    """AWD-LSTM's: some recurrent weights are zero in a forward."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 5)
        weight = self.rnn.weight_hh_l0
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.register_parameter("weight_hh_l0_raw", nn.Parameter(weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        raw = self.rnn.weight_hh_l0_raw
        setattr(self.rnn, "weight_hh_l0", F.dropout(1 * raw, 0.5, self.training))  # noqa: B010
        y: Tensor = self.rnn(x.unsqueeze(1))[0]
        return y


def dropping(kind: type[nn.RNNBase]) -> Loop:
    return dropping_of(WeightDrop(kind))


def dropping_of(model: WeightDrop) -> Loop:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def seen() -> Any:
        return [model, model.rnn.weight_hh_l0.detach()]

    return Loop(lambda number, x: trained(model, optimizer, x), seen)


def evaluated_between(kind: type[nn.RNNBase]) -> Loop:
    """The program runs the layer itself, which takes the weight that the last call has left."""
    model: Any = WeightDrop(kind)
    loop, found = dropping_of(model), []

    def evaluate(number: int) -> None:
        if number:
            with torch.no_grad():
                found.append(model.rnn(torch.ones(2, 1, 4))[0].clone())
        if number % 3 == 2:
            model.eval() if model.training else model.train()

    return Loop(loop.step, lambda: [*loop.left(), *found], evaluate)


def set_for_good(kind: type[nn.RNNBase]) -> Loop:
    """A weight that a forward of the program has set, and the step does not."""
    model = WeightDrop(kind)
    with torch.no_grad():
        model(torch.ones(3, 4))
    layer, head = model.rnn, nn.Linear(5, 2)
    layer.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def step(number: int, x: Tensor) -> Tensor:
        loss = head(layer(x.unsqueeze(1))[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def anew(number: int) -> None:
        if number % 2:
            with torch.no_grad():
                model(torch.ones(3, 4))

    return Loop(step, lambda: [head, layer.weight_hh_l0.detach()], anew)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("make", [dropping, evaluated_between, set_for_good])
def test_every_call_is_eager_s(make: Any, kind: type[nn.RNNBase]) -> None:
    assert graphs_of(lambda: make(kind), calls=6) <= 4
