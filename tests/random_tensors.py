"""Random steps over tensors that share memory: in a model, in objects outside, among arguments."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

PLACES = ("s.a", "s.b", "m.buffer", "m.kept", "s.table['k']", "s.rows[-1]")
READ = (*PLACES, "h", "x", "m.weight.detach()", "m.weight.data")
MADE = (
    *("{}.t()", "{}.detach()", "{}.view(3, 3)", "{}.clone()", "({} * 0.5)", "({} + {})"),
    *("{}.reshape(9).view(3, 3)", "{}[[0, 2, 1]]", "{}.contiguous()", "{}.float()", "{}.data"),
    *("torch.stack([{}[0], {}[1], {}[2]])", "{}.flip(0)", "torch.as_tensor({})"),
    *("{}.expand(3, 3)", "{}.narrow(0, 0, 3)", "{}.to(torch.float32)"),
)
CHANGES = (
    *("{0}.mul_(0.5)", "{0}.add_(1)", "{0}.copy_({1})", "{0}.clamp_(-2, 2)", "{0}.sub_({1})"),
    *("{0}.zero_()", "{0}[0] = 1.5", "{0}[:, 0] = i", "{0}[1] = {1}[1, 1]", "{0}.t().mul_(0.9)"),
    *("{0} += 0.5", "{0} *= {1}", "{0} -= {1}", "{0} = {1}", "{0} = {1}", "{0} = {1}"),
    *("{0}, {2} = {2}, {0}", "s.row = {1}[0]", "s.row = {1}[:, 1]", "s.row.mul_(0.5)"),
    *("s.rows.append({1})", "s.rows.append({1}); s.rows = s.rows[-3:]", "out = {1}"),
    *("x.mul_(0.5)", "s.table = dict(s.table)", "s.rows = [*s.rows[-2:], {1}]"),
    *("if i % 2: {0} = {1}", "if i % 2: {0}.mul_(0.5)", "s.table['k'] = {1}"),
)
BETWEEN = (
    *("{0}.add_(1)", "{0} = torch.full((3, 3), float(i))", "{0} = {2}", "{0}.t().mul_(0.5)"),
    *("s.rows.append(torch.ones(3, 3))", "del s.rows[:-1]", "s.row.zero_()", "{0} = {0}.clone()"),
    *("m.weight.data.mul_(0.9)", "{0} = {2}.t()", "pass", "pass"),
)
RETURNED = ("loss", "out", "s.a", "(loss, s.b)", "out, m.buffer", "h", "s.row")


class State:
    """What a program keeps beside."""

    def __init__(self) -> None:
        self.a, self.b, self.row = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
        self.table, self.rows = {"k": torch.randn(3, 3)}, [torch.randn(3, 3)]


class Model(nn.Module):
    """A layer with a buffer and another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.randn(3, 3)), torch.randn(3, 3)
        self.register_buffer("buffer", torch.randn(3, 3))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x @ self.weight)


def made(draw: random.Random, depth: int = 0) -> str:
    """An expression."""
    if depth == 2 or draw.random() < 0.5:
        return draw.choice(READ)
    form = draw.choice(MADE)
    return form.format(*(made(draw, depth + 1) for _ in range(form.count("{}"))))


def some(draw: random.Random, forms: tuple[str, ...], count: int) -> str:
    lines = [
        draw.choice(forms).format(draw.choice(PLACES), made(draw), draw.choice(PLACES))
        for _ in range(count)
    ]
    return "".join(f"            {line}\n" for line in lines) or "            pass\n"


def source(seed: int) -> str:
    """A module with a function `make(s, m, optimizer)`, which gives a step, and a function of what
    the program does behind a call."""
    draw = random.Random(seed)
    before, behind = some(draw, CHANGES, draw.randrange(3)), some(draw, CHANGES, draw.randint(1, 4))
    given = draw.choice(["s=s, m=m", "s, m=m", "s, m"])
    return (
        "import torch\n\n"
        "def make(s, m, optimizer):\n"
        f"    def step(x, i, {given}):\n        out, h = None, x\n"
        f"        with torch.no_grad():\n{before}"
        "        h = m(x)\n        loss = h.square().mean()\n        h = h.detach()\n"
        "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n"
        f"        with torch.no_grad():\n{behind}"
        f"        return {draw.choice(RETURNED)}\n    return step, {given.count('=')}\n\n"
        "def between(s, m, i):\n        with torch.no_grad():\n"
        + some(draw, BETWEEN, draw.randrange(3))
    )


def shown(s: State, m: Model, x: Tensor, returned: Any) -> Any:
    """All tensors, and which of them lie in one memory."""
    results = returned if isinstance(returned, tuple) else (returned,)
    given = [each for each in results if isinstance(each, Tensor)]
    kept = [s.a, s.b, s.row, s.table["k"], *s.rows, m.buffer, m.kept, m.weight, x, *given]
    memory = [each.untyped_storage().data_ptr() for each in kept]
    values = [(type(t).__name__, tuple(t.shape), t.detach().tolist()) for t in kept]
    return values, [memory.index(each) for each in memory], [type(r).__name__ for r in results]
