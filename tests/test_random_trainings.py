"""Random small training steps: whatever they do, the captured step does it with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from slices import examples
from twins import Twins, World

ROWS, WIDTH = 4, 6
STEPS = 3
# A capture takes tenths of a second: too long to search for the smallest failing program as well.
RANDOM = settings(
    max_examples=examples(8),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)


class Weights(nn.Module):
    """The parameters and the buffer that programs use, each any number of times."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.vector = nn.Parameter(torch.randn(WIDTH))
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("running", torch.zeros(WIDTH))


def update_running(x: Tensor, w: Weights) -> Tensor:
    w.running.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - w.running


def write_column(x: Tensor, w: Weights) -> Tensor:
    x = x.clone()
    x[:, 1] = w.vector[2]
    x[0].mul_(w.scalar)
    return x


def write_through_a_view(x: Tensor, w: Weights) -> Tensor:
    x = x.clone()
    x.view(2, -1)[1].add_(w.scalar)
    x.t()[2:4].mul_(0.5)
    return x


def split_and_join(x: Tensor, w: Weights) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([right * w.vector[:3], left], -1)


def attend(x: Tensor, w: Weights) -> Tensor:
    return F.softmax(x @ w.matrix @ x.t() / 3, -1) @ x


# Each takes a matrix with an even number of rows and returns one of the same shape.
OPERATIONS: dict[str, Callable[[Tensor, Weights], Tensor]] = {
    "matrix": lambda x, w: x @ w.matrix,
    "matrix transposed": lambda x, w: F.linear(x, w.matrix, w.vector),
    "other": lambda x, w: x @ w.other.t(),
    "product": lambda x, w: x @ (w.matrix @ w.other) * 0.5,
    "sum of weights": lambda x, w: x @ (w.matrix + w.other),
    "bias": lambda x, w: x + w.vector,
    "scale": lambda x, w: x * w.scalar,
    "power": lambda x, w: x.square() * w.vector,
    "tanh": lambda x, w: torch.tanh(x),
    "gelu": lambda x, w: F.gelu(x),
    "relu in place": lambda x, w: F.relu_(x + w.scalar),
    "add in place": lambda x, w: (x * 1.0).add_(w.vector).mul_(0.7),
    "norm": lambda x, w: F.layer_norm(x, (WIDTH,), w.vector),
    "dropout": lambda x, w: F.dropout(x, 0.3),
    "residual": lambda x, w: x + torch.sin(x @ w.other),
    "permute": lambda x, w: x.reshape(2, -1).t().reshape(x.shape),
    "expand": lambda x, w: x + x.mean(0, keepdim=True).expand_as(x),
    "detach": lambda x, w: x - x.detach().mean(),
    "select": lambda x, w: torch.where(x > 0, x, w.scalar * x),
    "update running": update_running,
    "write column": write_column,
    "write through a view": write_through_a_view,
    "split and join": split_and_join,
    "attend": attend,
}

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
IMPLEMENTATIONS = ({"foreach": False}, {"foreach": True}, {"fused": True})


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(OPTIMIZERS)))
    chosen = draw(st.sampled_from(IMPLEMENTATIONS[: 2 if name == "rmsprop" else 3]))
    options: dict[str, Any] = dict(chosen, lr=draw(st.floats(1e-4, 0.1)))
    options["weight_decay"] = draw(st.sampled_from([0.0, 0.05]))
    options["maximize"] = draw(st.booleans())
    if name == "sgd":
        options["momentum"] = draw(st.sampled_from([0.0, 0.9]))
        options["nesterov"] = options["momentum"] > 0 and draw(st.booleans())
    if name in ("adam", "adamw"):
        options["amsgrad"] = draw(st.booleans())
        options["betas"] = (draw(st.floats(0.5, 0.95)), 0.99)
    return name, options


programs = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=8)
branches = st.lists(programs, min_size=1, max_size=3)
zeroing = st.sampled_from(["start", "end", "end, to zeros", "never"])


def make_step(paths: list[list[str]], zero: str, clip: bool) -> Callable[..., Any]:
    """Paths that start from one input, joined by a sum: a graph with shared weights and reuse."""

    def step(weights: Weights, optimizer: Optimizer, x: Tensor) -> Any:
        if zero == "start":
            optimizer.zero_grad()
        results = []
        for path in paths:
            value = x
            for name in path:
                value = OPERATIONS[name](value, weights)
            results.append(value)
        # Every parameter that no path uses stays without a gradient, but one is always used.
        loss = sum(result.square().mean() for result in results) * weights.scalar
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(weights.parameters(), 0.5)
        optimizer.step()
        if zero.startswith("end"):
            optimizer.zero_grad(set_to_none=zero == "end")
        return loss, results[-1]

    return step


@RANDOM
@given(paths=branches, optimizer=optimizers(), zero=zeroing, clip=st.booleans())
def test_random_step(
    paths: list[list[str]], optimizer: tuple[str, dict[str, Any]], zero: str, clip: bool
) -> None:
    name, options = optimizer

    def build() -> World:
        weights = Weights()
        made = OPTIMIZERS[name](weights.parameters(), **options)
        return World(make_step(paths, zero, clip), [weights], [made])

    twins = Twins(build)
    for i in range(STEPS):
        twins.step(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)))
    twins.finish()


@settings(RANDOM, max_examples=examples(3))
@given(
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=6),
    rates=st.lists(st.floats(1e-5, 1.0), min_size=6, max_size=6),
    path=programs,
)
def test_random_batch_sizes_and_rates(
    sizes: list[int], rates: list[float], path: list[str]
) -> None:
    """One capture for each batch size."""

    def build() -> World:
        weights = Weights()
        made = torch.optim.Adam(weights.parameters(), lr=1e-2, foreach=True)
        return World(make_step([path], "end", clip=False), [weights], [made])

    def set_rate(w: World, rate: float) -> None:
        w.optimizer.param_groups[0]["lr"] = rate

    twins = Twins(build)
    for i, (size, rate) in enumerate(zip(sizes, rates, strict=False)):
        twins.both(lambda w, rate=rate: set_rate(w, rate))
        generator = torch.Generator().manual_seed(i)
        twins.step(torch.randn(2 * size, WIDTH, generator=generator))
    twins.finish(captures=len(set(sizes)))
