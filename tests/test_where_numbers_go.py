"""Numbers from outside the step, by where one statement puts what it makes of them."""

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import graphopt

SOURCES = {
    "attribute": ("k.n", "k.n += 1"),
    "item of a list": ("k.l[0]", "k.l[0] += 1"),
    "item of a dictionary": ("k.d['a']", "k.d['a'] += 1"),
    "the first of two": ("k.d['b'] * k.d['a']", "k.d['b'] += 1"),
    "the second of two": ("k.d['a'] * k.d['b']", "k.d['b'] += 1"),
    "two kinds": ("k.n * k.l[0]", "k.n += 1"),
    "attribute of another": ("k.other.n", "k.other.n += 1"),
}
SINKS = {
    "item of a tensor": ["v = torch.zeros(2)", "v[1] = {} * 3", "w = v.sum()"],
    "own dictionary": ["t = {{}}", "t['x'] = {} * 2", "w = t['x']"],
    "own list": ["t = [0.0]", "t[0] = {} * 2", "w = t[0]"],
    "own object": ["t = K()", "t.n = {} * 2", "w = t.n"],
    "item of what is in an own list": ["t = [{{}}]", "t[0]['a'] = {} * 2", "w = t[0]['a']"],
    "added to an own one": ["t = {{'a': 1.0}}", "t['a'] += {} * 1", "w = t['a']"],
    "another attribute": ["k.z = {} * 2", "w = k.z"],
    "an attribute of the same name": ["k.third.n = {} * 2", "w = k.third.n"],
    "another item": ["k.d['c'] = {} * 0.5", "w = k.d['c']"],
    "an attribute that counts": ["k.n = k.n * 0.5 + {} * 0.1", "w = k.n"],
    "an item that counts": ["k.d['a'] = k.d['a'] * 0.5 + {} * 0.1", "w = k.d['a']"],
    "added in place": ["k.l[0] += {} * 0.1", "w = k.l[0]"],
    "exchanged": ["k.n, k.q = k.q * 0.5 + {} * 0.1, k.n * 0.5", "w = k.n - k.q"],
    "two that count": ["k.n, k.q = k.n * 0.5, k.q + {} * 0.1", "w = k.n - k.q"],
    "written on its way": ["k.third.n = k.n * half(k) + {} * 0.1", "w = k.third.n + k.n"],
}
PROGRAM = """
import torch

class K:
    pass

def half(k):
    k.n = k.n * 0.5
    return 0.5

def build():
    k = K()
    k.other, k.third = K(), K()
    k.n, k.q, k.l, k.d = 1.0, 3.0, [1.0, 2.0], {{"a": 1.0, "b": 2.0, "c": 0.0}}
    k.z, k.other.n, k.third.n = 0.0, 1.5, 0.0
    k.model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(k.model.weight, 0.3)
    torch.nn.init.zeros_(k.model.bias)
    k.optimizer = torch.optim.SGD(k.model.parameters(), lr=0.1)
    return k

def stepping(k, model, optimizer):
    def step(x):
        {}
        loss = (model(x) * w).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step

def change(k):
    {}
"""


def trained(program: Any, *, compiled: bool) -> list[Any]:
    k = program.build()
    step = program.stepping(k, k.model, k.optimizer)
    if compiled:
        step = graphopt.compile(step)
    results: list[Any] = []
    for call in range(6):
        results.append(step(torch.full((2, 3), 0.1 * (call + 1))).item())
        results.append((k.n, k.q, list(k.l), dict(k.d), k.z, k.other.n, k.third.n))
        if call % 2:
            program.change(k)
    return [*results, k.model.weight.tolist(), k.model.bias.tolist()]


@pytest.mark.parametrize(("source", "sink"), [*itertools.product(SOURCES, SINKS)])
def test_where_a_number_goes(source: str, sink: str, tmp_path: Path) -> None:
    value, change = SOURCES[source]
    lines = "\n        ".join(line.format(value) for line in SINKS[sink])
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(lines, change))
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert trained(program, compiled=True) == trained(program, compiled=False)
