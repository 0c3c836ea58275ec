"""Random steps over lists, dictionaries and objects among their arguments, which they change, put
into each other's places, keep outside and return."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

LISTS = ("b['l']", "b['d']['l']", "o.l", "s.l", "o.d['l']")
TABLES = ("b", "b['d']", "o.d", "s.d")
PLACES = (*LISTS, "b['p']", "o.p", "s.p", "s.d['p']", "m.kept", "b['d']['p']")
CONTAINERS = (*LISTS, "b['d']", "o.d", "s.d")
MADE = ("Meter(h)", "Meter(loss.item())", "Meter(i, {l})", "Meter(0.5)")
KEPT = (*CONTAINERS, *MADE, "b", "o", "[{l}, h]", "dict({d})", "list({l})", "{{'in': {c}, 'h': h}}")
VALUES = ("h", "x", "loss.detach()", "h * 2", "i", "1.5", "b['x']", "o.x", "o.k", "loss.item()")
CHANGES = (
    *("{l}.append({v})", "{l}.append({v})", "{l}.insert(0, {v})", "del {l}[:-2]", "{l}[:] = [{v}]"),
    *("{l} = {l}[-2:]", "{l} = [*{k}, {v}]", "{l}, {k} = {k}, {l}", "{l} = list({k})"),
    *("{d}['n'] = {v}", "{d}.pop('p', None)", "{d}['n'] = {c}", "{d}.update(n={v})"),
    *("{p} = {c}", "{p} = {c}", "{p} = {e}", "{p} = {v}", "o.k = o.k + 1", "o.k += loss.item()"),
    *("b['d'] = dict(b['d'])", "s.d = {{'l': s.l, 'h': {v}}}", "b['d'], o.d = o.d, b['d']"),
    *("h = h * len({l})", "h = h + o.k", "h = h + b['x']", "o.x = o.x * 2", "b['x'] = h"),
    *("o.x.mul_(0.5)", "h = h + sum({l}[:1])", "o.l = []", "out = {e}", "out = {c}", "s.p = o"),
    *("s.p = b", "if type(s.p) is list: s.p.append({v})", "if type(s.p) is dict: s.p['n'] = {v}"),
    *("if type(b['p']) is list: b['p'].append({v})", "if s.p is b: h = h + 1"),
    *("if type(s.p) is Meter: s.p.n = s.p.n + 1", "if type(m.kept) is Meter: h = h * m.kept.n"),
    *("if type(s.p) is Meter: s.p.rows.append({v})", "s.p = m.kept = {e}", "m.kept = s.p"),
    *("if type(s.p) is dict and 'x' in s.p: h = h + s.p['x']", "if s.p is o: h = h * o.k"),
    *("if type(s.p) is list and s.p: h = h + s.p[-1]", "if m.kept: h = h + len(m.kept)"),
)
BETWEEN = (
    *("if type(s.p) is Meter: s.p.rows.append(i)", "if type(m.kept) is Meter: m.kept.n = 5.0"),
    *("{l}.append(float(i))", "{l} = [2.5]", "{d}['n'] = i", "del {l}[:1]", "s.p = None"),
    *("{p} = {c}", "o.k = 2.0", "{l} = list({l})", "{l}, {k} = {k}, {l}", "pass", "pass", "pass"),
)
RETURNED = (
    "loss",
    "out",
    "b",
    "o",
    "(loss, {c})",
    "{e}",
    "[b, s.l]",
    "{{'o': o, 'l': {l}}}",
    "s.d",
)


class Meter:
    """An object that a step makes."""

    def __init__(self, n: Any, rows: Any = ()) -> None:
        self.n, self.rows = n, [*rows]


class Batch:
    """An object of tensors, numbers and containers."""

    def __init__(self) -> None:
        self.x, self.k, self.p = torch.randn(3), 0.5, None
        self.l, self.d = [torch.randn(3), 1.0], {"l": [torch.randn(3)], "n": 1}


class State:
    """What a program keeps beside."""

    def __init__(self) -> None:
        self.l, self.d, self.p = [1.0, 2.0], {"l": [3.0], "n": 2}, None


class Model(nn.Linear):
    """A layer that something is kept in."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.kept = None


def batch() -> dict[str, Any]:
    """A dictionary of the same."""
    inner = {"l": [torch.randn(3)], "n": torch.randn(3)}
    return {"x": torch.randn(3), "l": [torch.randn(3), torch.randn(3)], "d": inner, "p": None}


def some(draw: random.Random, forms: tuple[str, ...], count: int) -> str:
    lines = [filled(draw, draw.choice(forms)) for _ in range(count)]
    return "".join(f"        {line}\n" for line in lines)


def filled(draw: random.Random, form: str) -> str:
    kinds = {"l": LISTS, "k": LISTS, "d": TABLES, "c": CONTAINERS, "p": PLACES, "v": VALUES}
    chosen = {name: draw.choice(each) for name, each in kinds.items()}
    return form.format(**chosen, e=draw.choice(KEPT).format(**chosen))


def source(seed: int) -> str:
    """A module with a function `make(s, m, optimizer)`, which gives a step, and a function of what
    the program does behind a call; whether a call has a new batch."""
    draw = random.Random(seed)
    before, behind = some(draw, CHANGES, draw.randrange(2)), some(draw, CHANGES, draw.randint(1, 4))
    return (
        "import torch\nfrom random_arguments import Meter\n\n"
        f"ANEW = {draw.choice(['b, o', 'b', 'o', ''])!r}\n\n"
        "def make(s, m, optimizer):\n    def step(x, i, b, o):\n"
        f"        out, h, loss = None, x, x.sum()\n{before}"
        "        loss = (m(x) + b['x'] * o.x).square().mean()\n        h = x + loss.detach()\n"
        "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n"
        f"{behind}        return {filled(draw, draw.choice(RETURNED))}\n    return step\n\n"
        "def between(i, b, o, s, m):\n        pass\n" + some(draw, BETWEEN, draw.randrange(3))
    )


def shown(*values: Any) -> Any:
    """All that is in values, where each container and object has the number of its first place."""
    known: dict[int, int] = {}

    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.detach().tolist()
        if not isinstance(value, (list, dict, tuple, Batch, State, Model, Meter)):
            return type(value).__name__, value
        if id(value) in known and not isinstance(value, tuple):
            return known[id(value)]
        known[id(value)] = len(known)
        if isinstance(value, Model):
            return form([*value.parameters(), value.kept])
        items = value if isinstance(value, (list, dict, tuple)) else vars(value)
        pairs = items.items() if isinstance(items, dict) else enumerate(items)
        return type(value).__name__, [(key, form(each)) for key, each in pairs]

    return [form(value) for value in values]
