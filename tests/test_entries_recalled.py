"""Entries of list operators are evaluated once, and rows of elements are cut in one sweep."""

from __future__ import annotations

import random

import torch

from graphopt.verify.call_terms import entries, fresh, named
from graphopt.verify.terms import Segment, Terms

_EXP = torch.ops.aten._foreach_exp.default
_DECAY = torch.ops.aten._foreach_lerp.Scalar


def test_parts_of_a_row_are_those_that_are_taken_one_by_one() -> None:
    random.seed(5)
    for _ in range(200):
        terms = Terms()
        made = [terms.make(("input", n), uniform=n % 3 == 0) for n in range(4)]
        row = [
            Segment(random.choice(made), random.randrange(9), random.randrange(1, 9))
            for _ in range(random.randrange(1, 9))
        ]
        length = sum(segment.length for segment in row)
        cuts = sorted(random.choices(range(length + 3), k=random.randrange(6)))
        lengths = [end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)]
        lengths = [max(0, n) for n in lengths]
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        one_by_one = [terms.part(row, s, n) for s, n in zip(starts, lengths, strict=True)]
        assert terms.parts(row, lengths) == one_by_one


def _of(
    terms: Terms, target: object, fakes: list[torch.Tensor], *args: object
) -> tuple[object, ...]:
    found = entries(terms, target, named(target, args, {}), fakes)
    assert isinstance(found, tuple)
    return found


def test_an_entry_goes_by_what_it_is_given_and_not_by_its_place() -> None:
    terms, fakes = Terms(), [torch.ones(2, 3), torch.ones(2, 3)]
    x, y = (fresh(terms, ("input", name), torch.ones(2, 3)) for name in "xy")
    first, second = _of(terms, _EXP, fakes, (x, y))
    assert first != second
    assert _of(terms, _EXP, fakes, (y, x)) == (second, first)
    assert _of(terms, _EXP, fakes[:1], (y,)) == (second,)


def test_an_entry_has_the_layout_that_its_metadata_has_now() -> None:
    terms, plain, turned = Terms(), torch.ones(2, 3), torch.ones(3, 2).t()
    x = fresh(terms, ("input", "x"), plain)
    for fake in (plain, turned, plain):
        (found,) = _of(terms, _EXP, [fake], (x,))
        assert found.stride == fake.stride()


def test_numbers_that_all_entries_have_are_told_apart() -> None:
    terms, fakes = Terms(), [torch.ones(2, 3)]
    x, y = (fresh(terms, ("input", name), torch.ones(2, 3)) for name in "xy")
    weights = (0.0, -0.0, 1, 1.0, True, 0.5)
    found = [_of(terms, _DECAY, fakes, (x,), (y,), weight) for weight in weights]
    assert len(set(found)) == len(weights)
    assert [_of(terms, _DECAY, fakes, (x,), (y,), weight) for weight in weights] == found
