"""Which cases of a matrix a run has."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from slices import covering, sample, spread

Case = dict[str, Any]
MATRIX: list[Case] = [
    dict(zip(("model", "optimizer", "ranks", "loss"), values, strict=True))
    for values in product("abcde", ("fused", "loop"), (1, 2, 4), (len, sum))
]


def shown(cases: list[Case], together: int) -> set[Any]:
    return {
        some for case in cases for some in combinations(sorted(case.items(), key=key), together)
    }


def key(item: tuple[str, Any]) -> str:
    return item[0]


def test_a_slice_shows_what_it_can() -> None:
    chosen = [MATRIX[number] for number in sorted(spread(MATRIX, 5))]
    assert len(chosen) == 5 and shown(chosen, 1) == shown(MATRIX, 1)


def test_a_slice_of_one_parameter_has_equal_distances() -> None:
    assert spread([{"x": [number]} for number in range(9)], 3) == {0, 3, 6}
    assert spread([{}], 4) == {0} and spread([{}], 0) == set()


def test_the_seed_chooses_a_sample() -> None:
    samples = [sample(MATRIX, 5, seed) for seed in range(40)]
    assert all(len(numbers) == 5 for numbers in samples)
    assert all(
        shown([MATRIX[number] for number in numbers], 1) == shown(MATRIX, 1) for numbers in samples
    )
    assert len(set().union(*samples)) > len(MATRIX) // 2
    assert sample(MATRIX, 5, 3) == samples[3]
    assert sample(MATRIX, len(MATRIX), 0) == set(range(len(MATRIX)))


@pytest.mark.parametrize("together", [1, 2, 3])
def test_all_values_occur_together(together: int) -> None:
    sets = [covering(MATRIX, together, seed) for seed in range(4)]
    for numbers in sets:
        assert shown([MATRIX[number] for number in numbers], together) == shown(MATRIX, together)
        assert len(numbers) < len(MATRIX)
    assert covering(MATRIX, together, 0) == sets[0]
    assert len(set().union(*sets)) > len(sets[0])


def test_what_a_run_has_in_any_event_stays() -> None:
    numbers = covering(MATRIX, 1, 0, kept=[7, 8])
    assert {7, 8} <= numbers
    assert shown([MATRIX[number] for number in numbers], 1) == shown(MATRIX, 1)


def test_a_value_that_some_case_alone_has_is_never_left_out() -> None:
    cases = [{"x": 1, "y": 1}, {"x": 1, "y": 2}, {"x": 2, "y": 2}, {"x": 2, "y": 3}]
    assert all({0, 3} <= covering(cases, 1, seed) for seed in range(10))
