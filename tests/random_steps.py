"""Random steps over what stands outside them: lists, queues, dictionaries, numbers, arrays, tensors
and objects, which the program changes between calls as well."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn

LISTS = ["s.rows", "s.losses", 's.table["list"]']
NUMBERS = ["s.count", "s.rate", 's.table["number"]']
ARRAYS = ["s.array", "s.other"]
VALUES = [
    *("loss.item()", "float(loss.detach())", "loss.detach()", "s.count", "s.rate", "1.5", "i"),
    *("float(x.mean())", "round(loss.item(), 2)", "int(y[0])"),
]
QUESTIONS = [
    *("len({l}) > 3", "i % 2 == 0", "s.count > 2", "len(s.queue) == 2", "i == 1", "s.flag"),
    *("{l} and {l}[-1] != 7", "s.rate < 3"),
]
STATEMENTS = [
    # lists
    *("{l}.append({v})", "{l}.insert(0, {v})", "{l}.extend([{v}, {v}])", "{l}.clear()"),
    *("{l} = {l}[-3:]", "{l} = {l}[1:]", "del {l}[:-2]", "{l}.pop() if {l} else None"),
    *("{l}.pop(0) if len({l}) > 2 else None", "{l} = []", "{l} = [{v}]", "{l} += [{v}]"),
    *("{l}[-1:] = [{v}]", "{l} = {l} + [{v}]", "{l} = list(s.queue)", "{l} = {k}", "{l} = {k}[:2]"),
    *("{l} = [h for h in {l} if h != 1.5]", "{l} = sorted({l}, key=float)[:3]", "{l}.reverse()"),
    *("{l}[0] = {v} if {l} else None", "{l}, {k} = {k}, {l}", "h = {l}; h.append({v})"),
    *("h = {l}; {l} = h[-2:]", "last = {l}[-1] if {l} else 0; out.append(last)"),
    # queues, dictionaries and objects
    *("s.queue.append({v})", "s.queue.appendleft({v})", "s.queue.clear()"),
    *("s.queue.popleft() if s.queue else None", "s.queue = collections.deque(maxlen=3)"),
    *("s.table[str(i % 2)] = {v}", 's.table["k"] = s.table.get("k", 0) + {v}'),
    *('s.table.setdefault("z", []).append({v})', 's.table.pop("k", None)'),
    *("s.table.update(number={v})", 's.table["list"] = {l}', 's.counter["a"] += 1'),
    *("s.held.value = {v}", "s.held = Held({v})", "{l}.append(s.held.value)"),
    *("s.tuples.append((i, {v}))", 's.tuples.append({{"i": i, "v": {v}}})'),
    *("s.tuples = s.tuples[-2:]", "s.add({v})", "s.push({v})", "out.append(s.mean())"),
    # numbers, arrays and tensors
    *("{n} += 1", "{n} = {n} * 0.5 + {v}", "{n} = {v}", "{n} -= 1", "{n} = max({n}, {v})"),
    *("{n}, {m} = {m}, {n}", "{n} = len({l})", "{n} = sum(float(h) for h in {l})", "{n} = 0"),
    *("s.flag = not s.flag", "{a} += 1", "{a}[0] = {v}", "{a}[:2] += {v}", "{a}[i % 3] = {v}"),
    *("{a} = {a} * 0.5", "{a} = numpy.append({a}[-3:], {v})", "{a} = numpy.roll({a}, 1)"),
    *("{a}[-1] -= {v}", "s.mixed = loss.detach() * 0.5 + s.mixed * 0.5"),
    *("s.mixed += loss.detach()", "w = loss * (s.count + 1)", "w = loss * s.rate"),
    *("w = w + len({l})", "w = w * float({a}[0])", "w = w + s.mixed"),
    *("for h in {l}: w = w + h * 0.1",),
    # texts
    *("s.texts.append(f'{{loss.item():.3f}}')", "s.texts.append('q')", "s.texts = s.texts[-3:]"),
    *("s.texts.append(s.name)", "s.name = s.name + str(i)", "s.name = f'{{i}} {{s.name}}'[:4]"),
    *(
        "out.append('|'.join(s.texts))",
        "print(', '.join(s.texts[-2:]))",
        "s.texts.insert(0, s.name)",
    ),
    *("out.append(s.name.upper())", "out.append(s.texts[-1].strip() if s.texts else '')"),
    *("s.table[s.name] = {v}", "out.append(s.table.get(s.name))", "s.texts[-1:] = [f'{{{n}}}']"),
    *("out.append('-'.join(str(h) for h in {l}))", "out.append('-'.join([s.name, *s.texts]))"),
    *(
        "out.append(s.words[int(y[0])].title())",
        "s.texts.append(s.words[model(x)[0].argmax().item()])",
    ),
    "out.append(' '.join(s.words[k] for k in model(x).argmax(1).tolist()))",
    "out.append(' '.join([s.words[k] for k in model(x).argmax(1).tolist()]))",
    # what it says and returns
    *(
        "out.append({n})",
        "out.append(len({l}))",
        "out.append(list({l}))",
        "out.append({a}.tolist())",
    ),
    *("out.append(sum({l}) / max(len({l}), 1))", "out.append(max({l}, default=0))"),
    *("out.append(float(numpy.mean({l})) if {l} else 0)", "out.append(list(s.queue))"),
    *("print({n}, {l})", "print(f'{{loss.item():.3f}} {{{n}}}')", "out.append(dict(s.table))"),
    *["if {c}: {s}"] * 4,
]
FOLLOWED = [
    *("s.table[str(i % 2)] = {v}", 's.table["k"] = s.table.get("k", 0) + {v}', "s.add({v})"),
    *('s.table.pop("k", None)', "s.table.update(number={v})", 's.counter["a"] += 1'),
    *("s.held.value = {v}", "s.held = Held({v})", "w = w + s.held.value", "s.table[s.name] = {v}"),
    *("{n} += 1", "{n} = {n} * 0.5 + {v}", "{n} = {v}", "{n} -= 1", "{n} = max({n}, {v})"),
    *("{n}, {m} = {m}, {n}", "{n} = len({l})", "{n} = sum(float(h) for h in {l})", "{n} = 0"),
    *("s.flag = not s.flag", "s.mixed = loss.detach() * 0.5 + s.mixed * 0.5"),
    *("s.mixed += loss.detach()", "w = loss * (s.count + 1)", "w = loss * s.rate"),
    *("w = w + len({l})", "w = w * float({a}[0])", "w = w + s.mixed", "out.append({n})"),
    *("for h in {l}: w = w + h * 0.1", "out.append(s.table.get(s.name))", "{l} = [{v}]"),
    *("out.append(len({l}))", "out.append(dict(s.table))", "last = {l}[-1]; w = w + last"),
    *("s.mixed = w.detach()", "s.pair = (loss.detach(), {v})", "s.table['t'] = loss.detach()"),
    *["if {c}: {s}"] * 3,
]
"""Statements that a graph follows, or reads; of the others, many are refused."""
HEAD = """
import collections

import numpy
import torch

from random_steps import Held

"""


class Held:
    def __init__(self, value: Any) -> None:
        self.value = value


class State:
    """What a step works on."""

    def fill(self) -> None:
        self.rows: Any = []
        self.losses: Any = [1.0, 2.0, 3.0, 4.0]
        self.count, self.rate, self.flag = 0, 0.5, False
        self.queue: Any = collections.deque([1.0, 2.0], maxlen=3)
        self.table: Any = {"list": [0.5], "number": 1}
        self.counter: Any = collections.Counter()
        self.array, self.other = numpy.zeros(4), numpy.arange(4.0)
        self.mixed, self.held, self.tuples = torch.zeros(()), Held(1.0), list[Any]()
        self.texts, self.name, self.words = ["a"], "n", ["one", "two ", "Three"]

    def add(self, value: Any) -> None:
        self.count += 1
        self.rate = 0.9 * self.rate + 0.1 * float(value)

    def push(self, value: Any) -> None:
        self.rows.append(value)
        if len(self.rows) > 3:
            self.rows.pop(0)

    def mean(self) -> Any:
        return sum(self.rows) / len(self.rows) if self.rows else 0.0


class Filled(State):
    def __init__(self) -> None:
        self.fill()


class Model(nn.Linear, State):
    """A module with all of that in its attributes."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.fill()


def statement(draw: random.Random, nested: bool = False) -> str:
    """One line of a step."""
    text = draw.choice(FOLLOWED if draw.random() < 0.85 else STATEMENTS)
    if "{s}" in text and nested:
        return statement(draw, nested)
    (one, other), (number, second) = draw.sample(LISTS, 2), draw.sample(NUMBERS, 2)
    names = {"l": one, "k": other, "n": number, "m": second, "a": draw.choice(ARRAYS)}
    if "{c}" in text:
        names["c"] = draw.choice(QUESTIONS).format(l=one)
        names["s"] = "if"
        while names["s"].startswith(("if", "for", "h =", "last")):
            names["s"] = statement(draw, nested=True)
    while "{v}" in text:
        text = text.replace("{v}", draw.choice(VALUES), 1)
    return text.format(**names)


def source(seed: int) -> str:
    """A module with a function `make(s)`, which gives a step over `s`."""
    draw = random.Random(seed)
    lines = [f"        {statement(draw)}\n" for _ in range(draw.randint(2, 5))]
    behind = draw.randint(0, len(lines))
    return (
        HEAD
        + "def make(s):\n    def step(model, optimizer, x, y, i, given):\n"
        + ("        s = given\n" if given_as(seed) == "argument" else "")
        + "        out = []\n        loss = w = model(x).square().mean()\n"
        + "".join(lines[:behind])
        + "        w.backward()\n        optimizer.step()\n        optimizer.zero_grad()\n"
        + "".join(lines[behind:])
        + "        return loss, w, out\n    return step\n"
    )


def given_as(seed: int) -> str:
    """How the step gets to the state."""
    return ("closure", "argument", "module", "closure")[seed % 4]


def shown(value: Any, within: tuple[Any, ...] = ()) -> Any:
    """A value as what can be compared, with its types and bits."""
    if any(value is each for each in within):
        return "itself"
    inner = (*within, value)
    if isinstance(value, Tensor):
        return str(value.dtype), value.detach().tolist()
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, [shown(each, inner) for each in value]
    if isinstance(value, dict):
        return type(value).__name__, [(key, shown(each, inner)) for key, each in value.items()]
    if isinstance(value, (State, Held)):
        names = [name for name in vars(value) if not name.startswith("_")]
        return [(name, shown(vars(value)[name], inner)) for name in names]
    return type(value).__name__, repr(value)


def same_objects(s: Any) -> list[bool]:
    """Which of its lists and arrays are one."""
    lists = (s.rows, s.losses, s.table.get("list"))
    return [lists[0] is lists[1], lists[0] is lists[2], lists[1] is lists[2], s.array is s.other]
