"""What the rule about elements says is so: an element has the same bits wherever it is computed, in
whatever loop, in either order where operands may change places, and in a list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from graphopt.verify.elementwise import BY_ELEMENT, elementwise
from graphopt.verify.terms import TensorValue, Terms, whole
from replica_runs import same_bits

aten = torch.ops.aten

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
SPECIAL = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -1.0, 257.0, 2049.0])
LENGTH = 37
NUMBERS = (3, 0.1, -0.0, True, 257, 1e10)


def drawn(dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of many sizes, special ones among them."""
    draw = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        high = 2 if dtype == torch.bool else min(torch.iinfo(dtype).max, 5000)
        return torch.randint(0, high, (LENGTH,), generator=draw).to(dtype)
    powers = torch.randint(-3, 6, (LENGTH,), generator=draw).double()
    found = torch.randn(LENGTH, generator=draw, dtype=torch.float64) * 10**powers
    places = torch.randperm(LENGTH, generator=draw)[: LENGTH // 2]
    found[places] = SPECIAL[torch.randint(0, len(SPECIAL), places.shape, generator=draw)].double()
    return found.to(dtype)


def overload(name: str) -> Any:
    packet = getattr(aten, name.removeprefix("aten::"))
    first = next(o for o in ("Tensor", "self", "default") if o in packet.overloads())
    return getattr(packet, first)


def cases(name: str) -> Iterator[tuple[Any, list[Any]]]:
    """Calls with tensors of all kinds, and with numbers, that the operator takes."""
    target = overload(name)
    count = len([a for a in target._schema.arguments if "Tensor" in str(a.type)])
    kinds = FLOATS + WHOLE
    if name == "aten::where":
        rows: list[list[Any]] = [[torch.bool, *pair] for pair in product(kinds, repeat=2)]
    else:
        rows = [list(row) for row in product(kinds, repeat=count)]
        rows += [[kind, number] for kind in kinds for number in NUMBERS if count == 2]
    for row in rows:
        args = [drawn(k, i) if isinstance(k, torch.dtype) else k for i, k in enumerate(row)]
        try:
            target(*args)
        except (RuntimeError, TypeError):
            continue
        yield target, args


def is_covered(target: Any, args: list[Any]) -> bool:
    """Whether the rule speaks of a call."""
    terms, names = Terms(), [a.name for a in target._schema.arguments]
    values = [
        whole(terms.make(("input", i)), a) if isinstance(a, Tensor) else a
        for i, a in enumerate(args)
    ]
    given = dict(zip(names, values, strict=False))
    return isinstance(elementwise(terms, target, given, target(*args)), TensorValue)


def each(args: list[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
    return [change(arg) if isinstance(arg, Tensor) else arg for arg in args]


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], 1)[:, 0]


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_an_element_wherever_it_stands(name: str) -> None:
    covered = 0
    for target, args in cases(name):
        if not is_covered(target, args):
            continue
        covered += 1
        expected = target(*args)
        for start, end in ((0, 1), (5, 6), (36, 37), (1, 37), (3, 20), (30, 37)):
            part = target(*each(args, lambda t, run=slice(start, end): t[run]))  # type: ignore[misc]
            assert same_bits(part, expected[start:end]), (target, args)
        assert same_bits(target(*each(args, strided)), expected), (target, args)
        if len(args) == 2 and _may_change_places(target, args):
            assert same_bits(target(*reversed(args)), expected), (target, args)
    assert covered


def _may_change_places(target: Any, args: list[Any]) -> bool:
    """Whether the rule takes a call for the same with its operands exchanged."""
    if not all(isinstance(arg, Tensor) for arg in args) or args[0].dtype != args[1].dtype:
        return False
    terms, fake = Terms(), target(*args)
    one, other = (whole(terms.make(("input", i)), arg) for i, arg in enumerate(args))
    names = [a.name for a in target._schema.arguments][:2]
    found = [
        elementwise(terms, target, dict(zip(names, pair, strict=True)), fake)
        for pair in ((one, other), (other, one))
    ]
    return bool(found[0] == found[1])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_list_calls_the_operator_of_each_entry(name: str, dtype: torch.dtype) -> None:
    x, y = drawn(dtype, 0), drawn(dtype, 1)
    listed, alone = getattr(torch, f"_foreach_{name}"), getattr(torch, name)
    for given, number in (([y], y), (0.1, 0.1), ([0.3], 0.3)):
        assert same_bits(listed([x], given)[0], alone(x, number))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_and_whole_numbers_are_not_covered(dtype: torch.dtype) -> None:
    args = [drawn(dtype, 0), drawn(torch.int64, 1)]
    assert not is_covered(aten.mul.Tensor, args) and not is_covered(aten.div.Tensor, args)
    x, y = torch.full((4,), 1.5, dtype=torch.float16), torch.full((4,), 2049)
    assert (x * y)[0] != x[0] * y[0]
