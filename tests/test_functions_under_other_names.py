"""Functions without Python code that a step has under a name of its own, or lets others call: a
clock, a draw, a file is refused as under its usual name, and `id`, `hash` and functions that are
traced give what they give in eager code."""

from __future__ import annotations

import collections
import datetime
import functools
import itertools
import math
import operator
import os
import random
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from twins import assert_same

Call = Callable[..., Any]


def by_default(function: Call) -> Call:
    def call(*args: Any, given: Call = function) -> Any:
        return given(*args)

    return call


def by_static_method(function: Call) -> Call:
    class Named:
        now = staticmethod(function)

    return lambda *args: Named().now(*args)


def by_class(function: Call) -> Call:
    class Called:
        __call__ = staticmethod(function)

    called = Called()
    return lambda *args: called(*args)


def by_instance(function: Call) -> Call:
    named = types.SimpleNamespace(function=function)
    return lambda *args: named.function(*args)


def by_method_caller(function: Call) -> Call:
    named = types.SimpleNamespace(function=function)
    return lambda *args: operator.methodcaller("function", *args)(named)


def by_partial(function: Call) -> Call:
    partial = functools.partial(functools.partial(function))
    return lambda *args: partial(*args)


def by_cache(function: Call) -> Call:
    return lambda *args: functools.lru_cache(function)(*args)


def by_iterator(function: Call) -> Call:
    return lambda *args: next(iter(functools.partial(function, *args), None))


def by_key(function: Call) -> Call:
    def call(*args: Any) -> Any:
        if not args:
            return next(iter(collections.defaultdict(function)[name] for name in "a"))
        return next(key for key, _ in itertools.groupby(args, key=function))

    return call


def by_map(function: Call) -> Call:
    return lambda *args: next(map(function, *([each] for each in args)))


def by_star_map(function: Call) -> Call:
    return lambda *args: next(itertools.starmap(function, [args]))


WAYS: dict[str, Callable[[Call], Call]] = {
    "variable": lambda function: lambda *args: function(*args),
    "dictionary": lambda function: lambda *args: {"now": function}["now"](*args),
    "expanded": lambda function: lambda *args: function(*list(args)),
    "__call__": lambda function: lambda *args: function.__call__(*args),
    **{
        way.__name__: way
        for way in (by_default, by_static_method, by_class, by_instance, by_method_caller)
    },
    **{way.__name__: way for way in (by_partial, by_cache, by_iterator, by_key, by_star_map)},
}
"""Ways in which a step comes to call a function."""

HOST: dict[str, tuple[Call, tuple[Any, ...], str]] = {
    "time": (time.perf_counter, (), "reads a clock"),
    "now": (datetime.datetime.now, (), "reads a clock"),
    "random": (random.random, (), "draws from a generator"),
    "numpy": (np.random.rand, (), "draws from a generator"),
    "urandom": (os.urandom, (1,), "draws from a generator"),
    "open": (open, (os.devnull,), "reads from a file"),
    "listdir": (os.listdir, (".",), "reads from a file"),
    "print": (print, ("shown",), "prints"),
}


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", HOST)
def test_work_on_the_host_is_refused(
    kind: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    function, args, reason = HOST[kind]
    call = WAYS[way](function)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        call(*args)
        return _trained(model, optimizer, x)

    states = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
    with pytest.raises(graphopt.CaptureError, match=reason) as caught:
        graphopt.compile(step)(torch.ones(2, 2))
    assert __file__ in str(caught.value) and caught.value.hint
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]) == states
    assert not capsys.readouterr().out


def _steps(ask: Call, kind: str) -> Iterator[Any]:
    """Three calls of a step that asks, eagerly or captured, and what they leave."""
    for compiled in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        frozen = {id(p) for p in model[1].parameters()}

        def step(
            x: Tensor, model: Any = model, optimizer: Any = optimizer, frozen: Any = frozen
        ) -> Tensor:
            loss = model(x).square().mean()
            if kind == "sqrt":
                loss = loss * ask(loss.item() + 1.0)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters() if kind != "sqrt" else ():
                if ask(parameter) in frozen:
                    parameter.grad = None
            optimizer.step()
            return loss.detach()

        run: Any = graphopt.compile(step) if compiled else step
        losses = [run(torch.full((2, 2), float(number))) for number in (1, 2, 3)]
        if compiled:
            run.flush()
        yield [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("way", [*WAYS, "by_map"])
@pytest.mark.parametrize("function", [id, math.sqrt])
def test_answers_are_those_of_eager_code(function: Call, way: str) -> None:
    ask = {**WAYS, "by_map": by_map}[way](function)
    eager, captured = _steps(ask, function.__name__)
    assert_same(captured, eager, way)
