"""Random steps that store tensors, numbers and containers in places outside and among their
arguments, move what stands there to other places, delete it, and update it in place."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

TENSORS = (
    "h.detach().mean(0)",
    "h.detach().sum(0)",
    "s.u * 0.9 + h.detach().mean(0) * 0.1",
    "loss.detach()",
    "torch.zeros(3)",
    "s.t.clone()",
    "s.t + 1",
    "s.t[:2]",
    "s.u.detach()",
    "(s.t if s.n > 2 else s.u)",
    *("s.t", "s.rows[0]", "s.rows[-1]", "s.inner.t", "OUT['t']", "s.table['a']", "model.cache"),
    *("s.pair[0]", "s.nest[0]['a']", "s.named.x"),
)
NUMBERS = (
    *("s.n + 1", "s.n * s.n", "s.n % 3", "max(s.n, 3)", "int(s.n > 2)", "s.n > 1", "len(s.rows)"),
    *("s.x * 0.5", "-s.x", "round(s.x, 2)", "s.x + loss.item()", "0.25", "2", "None", "'text'"),
    *("s.n", "s.inner.n", "OUT['n']", "model.count", "s.pair[1]"),
)
LISTS = (
    *("s.rows", "s.other", "s.rows[:]", "s.rows[::-1]", "[]", "[v * 2 for v in s.rows]"),
    *("[{t}, {t}]", "s.rows[1:] + [{t}]", "[{t}, *s.rows[:1]]", "[{n}, {n}]", "[[{t}], s.rows]"),
)
TUPLES = (
    *("s.pair", "s.nest", "s.named", "s.pair[:1]", "tuple(s.rows)", "s.named._replace(y={n})"),
    *("({t}, {n})", "(s.pair[1], {t})", "({n}, {n})", "(s.rows, {t})", "(s.nest, s.pair)"),
)
TABLES = (
    *("s.table", "s.further", "dict(s.table)", "{{}}", "s.nest[0]"),
    *("{{'a': {t}, 'b': {n}}}", "{{**s.table, 'b': {n}}}", "dict(s.table, a={t})"),
)
PLACES = {
    TENSORS: ("s.t", "s.u", "s.table['a']", "s.deep.h", "s.rows[0]", "s.rows[-1]", "s.inner.t",
              "OUT['t']", "model.cache", "s.new", "opt.mark"),
    NUMBERS: ("s.n", "s.x", "s.table['b']", "s.inner.n", "OUT['n']", "model.count", "OUT['new']"),
    LISTS: ("s.rows", "s.other", "model.kept", "OUT['rows']"),
    TUPLES: ("s.pair", "s.nest", "OUT['pair']"),
    TABLES: ("s.further", "model.table"),
}  # fmt: skip
WHOLE = (
    "s.t, s.u = s.u, s.t",
    "s.n, s.x = s.x, s.n",
    "s.table.update(a={t})",
    "s.table.update({{'b': {n}, 'c': {t}}})",
    "s.table.pop('b', None)",
    "s.table.setdefault('z', s.t)",
    "s.table.clear()",
    "del s.extra",
    "del model.extra",
    "vars(model).pop('extra', None)",
    "setattr(s, 'u', {t})",
    "s.rows.append(s.t)",
    "s.rows[:] = [s.t, s.u]",
    "s.rows.pop()",
    "for i in range(len(s.rows)): s.rows[i] = s.rows[i] * 0.5",
    "if s.n > 2: s.x = {n}",
    "if loss > 1.0: s.t = {t}",
)
IN_PLACE = ("mul_(0.5)", "add_(1)", "zero_()", "copy_({t})", "copy_(loss.detach())")
BETWEEN = (
    *("pass", "pass", "pass", "s.n = 7", "s.x = 0.125", "s.t = torch.full((3,), 2.0)"),
    *("s.u = s.t", "s.other = s.rows", "s.rows.append(torch.ones(3))", "OUT['t'] = s.t"),
    *("s.table = {'a': torch.ones(3), 'b': 4}", "s.inner = type(s.inner)(t=torch.ones(3), n=5)"),
    *("s.rows = [torch.ones(3), torch.ones(3)]", "s.pair = (s.t, 3)", "s.t.add_(1)"),
)


def _expression(draw: random.Random, kind: tuple[str, ...]) -> str:
    text = draw.choice(kind)
    while "{t}" in text or "{n}" in text:
        text = text.replace("{t}", draw.choice(TENSORS), 1).replace("{n}", draw.choice(NUMBERS), 1)
    return text.replace("{{", "{").replace("}}", "}")


def _statement(draw: random.Random) -> str:
    kinds = list(PLACES)
    kind = draw.choices(kinds, (5, 3, 2, 2, 1))[0]
    what = draw.random()
    if what < 0.7:
        source = kind if draw.random() < 0.92 else draw.choice(kinds)
        return f"{draw.choice(PLACES[kind])} = {_expression(draw, source)}"
    if what < 0.85:
        place = draw.choice(PLACES[TENSORS][:-2])
        return f"{place}.{_expression(draw, IN_PLACE)}"
    return _expression(draw, WHOLE)


def source(seed: int) -> str:
    """The module of a step and of what a program changes between its calls."""
    draw = random.Random(seed)
    statements = [_statement(draw) for _ in range(draw.randint(1, 4))]
    update = ["loss.backward()", "opt.step()", "opt.zero_grad()"]
    body = [*statements, *update] if draw.random() < 0.4 else [*update, *statements]
    reads = draw.random() < 0.4
    loss = "(h * s.t.sum() if torch.is_tensor(s.t) else h)" if reads else "h"
    returned = draw.choice(("loss", "loss.detach()", "(loss, s.t)", "s.rows", "(loss, s.n)"))
    lines = ["h = model(x)", f"loss = {loss}.square().mean()", *body, f"return {returned}"]
    given = draw.random() < 0.6
    changes = [f"if i == {i}: {draw.choice(BETWEEN)}" for i in range(4)]
    return "\n".join(
        [
            "import torch\n\nOUT = {'t': torch.full((3,), 7.0), 'n': 4, 'held': []}\n",
            "def step(model, opt, x, s):",
            *([] if given else ["    s = OUT['held'][0]"]),
            *(f"    {line}" for line in lines),
            "\ndef between(i, s, model):",
            *(f"    {line}" for line in changes),
        ]
    )


class Named(NamedTuple):
    x: torch.Tensor
    y: int


ATTRIBUTES = ("cache", "count", "extra", "kept", "table")


class Model(nn.Linear):
    """A layer with attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.cache, self.count, self.extra = _full(0.5), 0, 1


def state() -> Any:
    """The object that most of the places are in."""
    return SimpleNamespace(
        t=_full(1),
        u=torch.arange(3.0),
        n=1,
        x=0.5,
        extra="text",
        rows=[_full(2), _full(3)],
        other=[_full(4)],
        table={"a": _full(5), "b": 2},
        further={"y": _full(6)},
        pair=(_full(7), 2),
        nest=({"a": _full(8)}, _full(9)),
        named=Named(_full(10), 1),
        deep=SimpleNamespace(h=_full(11)),
        inner=SimpleNamespace(t=_full(12), n=3),
    )


def _full(value: float) -> torch.Tensor:
    return torch.full((3,), float(value))


def shown(value: Any) -> list[Any]:
    """All that can be reached from a value, and which of it is one container or one storage."""
    known: dict[Any, int] = {}
    found: list[Any] = []

    def see(each: Any) -> None:
        if isinstance(each, torch.Tensor):
            assert not isinstance(each, FakeTensor), "a stand-in of the trace"
            place = (each.untyped_storage().data_ptr(), each.storage_offset())
            found.append((known.setdefault(place, len(known)), each.dtype, each.tolist()))
            return
        inner = vars(each) if isinstance(each, SimpleNamespace) else each
        if not isinstance(inner, (list, tuple, dict)):
            found.append((type(each), repr(each)))
            return
        again, first = id(inner) in known, None
        if not isinstance(inner, tuple):  # of which an equal one is as good
            first = known.setdefault(id(inner), len(known))
        found.append((type(each), first, len(inner)))
        for key, part in () if again else _items(inner):
            found.append(key)
            see(part)

    see(value)
    return found


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)
