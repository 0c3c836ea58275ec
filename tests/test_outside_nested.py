"""What a step reads in objects within objects, all made anew for every call."""

from __future__ import annotations

import itertools
import types
from random import Random

import pytest
import torch
from torch import Tensor, nn

import graphopt
from outside_nested import AROUND, KINDS
from slices import covering

CASES = list(itertools.product(AROUND, KINDS))
PARTS = 4
FEW = [
    ("dictionary", "namespace"),
    ("nothing", "named tuple"),
    ("namespace", "function with an attribute"),
    ("list", "number"),
    ("slots and attributes", "attributes"),
    ("partial", "descriptor"),
    ("named tuple", "data with slots"),
    ("data", "default dictionary"),
    ("nothing", "method with an attribute"),
]


def captures_of(around: str, kind: str) -> int:
    """How often a step is captured whose factor is the same in three calls and then another."""
    outer, inner = AROUND[around], KINDS[kind]
    held = types.SimpleNamespace()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) * inner[1](outer[1](held.given))

    compiled = graphopt.compile(step, pipeline="none")
    model, x, found = nn.Identity(), torch.ones(2), []
    for factor in (0.5, 0.5, 0.5, 0.75):
        held.given = outer[0](inner[0](factor))
        expected = step(model, x)
        result = compiled(model, x)
        assert torch.equal(result, expected), (around, kind, factor)
        found += [each for each in compiled.captures if not any(each is one for one in found)]
    return len(found)


def check(cases: list[tuple[str, str]]) -> None:
    wrong: list[tuple[str, str]] = []
    again: dict[tuple[str, str], int] = {}
    for around, kind in cases:
        try:
            count = captures_of(around, kind)
        except AssertionError:
            wrong.append((around, kind))
            continue
        if count != 2:
            again[around, kind] = count
    print(f"{len(cases)} cases, wrong: {wrong}, captured more often: {again}")
    assert not wrong, wrong


def test_a_change_within_new_objects_is_seen() -> None:
    check(FEW)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_change_within_new_objects_is_seen(part: int, seed: int) -> None:
    """Half of the combinations, among them each object and each one around it."""
    of_each = [dict(zip(("around", "kind"), case, strict=True)) for case in CASES]
    order = Random(seed).sample(range(len(CASES)), len(CASES))
    chosen = sorted(covering(of_each, 1, seed, order[: len(CASES) // 2]))
    check([CASES[number] for number in chosen[part::PARTS]])
