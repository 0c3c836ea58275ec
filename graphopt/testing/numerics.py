"""Comparison of a rewritten graph's values with the untouched graph's, up to rounding.

Rounding is what a pass may add that declares `changes_numerics`: it sends bfloat16, or adds up in
another order. It may not change by which factor anything goes into a result or a piece of state:

- where only the value that a node reads is another, rounding explains the difference, and what
  follows is that of the rounded value (`graphopt.testing.substitution`);
- elements are near what they were, state by how far the step moved it;
- each change has a factor of one (`graphopt.testing.factors`), over runs with several batches, and
  so has each part of its rows; nothing is added to all of its elements;
- so has each response to a hyperparameter: what differs if that is much larger;
- with large optimizer state, where gradients hardly matter, changes scatter hardly at all;
- state that was kept in float32 still is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from graphopt.testing.comparing import (
    RunValue,
    Values,
    extent,
    largest,
    other_kind,
    response,
    same_elements,
    sample,
    wide,
)
from graphopt.testing.experiments import Experiment
from graphopt.testing.factors import Runs, measured, multiplied, problem_of_runs
from graphopt.testing.substitution import ROUNDING_ALONE, SUBSTITUTED, Substitution

TOLERANCE = 1e-2
"""The tolerance of an element for passes that change numerics, relative to its tensor's largest
element (for state, largest change). The response to noise is added."""

_NOISE, _OTHER_DATA = 12, 3
"""The multiple of the measured noise that a tensor may change by, and a further factor for data on
which noise was not measured."""

_GREW, _SCATTER = 100.0, 5e-3
"""The growth of a change from which gradients are negligible, and the scatter allowed then."""

_NOTHING = 1e-3
"""State that shrinks below this share of its usual change is rounding error of zeros."""

_SEEN = 32
"""The number of last bits by which an element must change to be measured."""


class _Sampled(NamedTuple):
    """A sample of a value's elements, in double precision."""

    end: torch.Tensor
    change: torch.Tensor
    last_bits: float

    @property
    def seen(self) -> torch.Tensor:
        """The changes that exceed rounding; all others are zero."""
        large = self.change.abs() > _SEEN * self.last_bits * self.end.abs()
        return self.change.where(large, 0.0)


def numeric_problems(
    experiments: Iterable[Experiment],
    base: Values,
    run_untouched: Callable[[Experiment], Values],
    graphs: Substitution,
) -> Iterator[tuple[str, str]]:
    """Yields (name, description) of each value that differs by more than rounding.

    Args:
        base: what the untouched graph gives for the inputs as they are.
        graphs: gives what is expected of the rewritten graph, and what it gives.
    """
    comparison, possible, disturbed = _NumericComparison(), [], None
    for experiment in experiments:
        chosen, expected = _finite(experiment, run_untouched, base)
        if expected and chosen.purpose == "disturbed":
            comparison.noise, disturbed = response(base, expected), chosen
        elif expected:
            possible.append(chosen)
    trials = [each for each in possible if each.purpose in ("base", "trial")]
    graphs.choose(trials, disturbed or trials[0])
    for experiment in possible:
        yield from comparison.compare(experiment, *graphs.run(experiment))
    yield from comparison.conclusions()


def _finite(
    experiment: Experiment, run: Callable[[Experiment], Values], base: Values
) -> tuple[Experiment, Values | None]:
    """Runs an experiment or its next best substitute. The values are None if none runs with finite
    results."""
    chosen: Experiment | None = experiment
    while chosen is not None:
        try:
            found = run(chosen)
        except Exception:  # not every step takes all data
            found = {}
        if found and all(_is_finite(v) or not _is_finite(base[k]) for k, v in found.items()):
            return chosen, found
        chosen = chosen.instead
    return experiment, None


class _NumericComparison:
    """Compares two graphs, experiment by experiment."""

    def __init__(self) -> None:
        self.noise: dict[str, float] = {}
        self._base: dict[str, tuple[_Sampled, _Sampled]] = {}
        self._pairs: dict[tuple[str, bool], Runs] = {}

    def compare(
        self, experiment: Experiment, expected: Values, actual: Values
    ) -> Iterator[tuple[str, str]]:
        """Yields (name, description) of the values that differ in one experiment."""
        for where, value in expected.items():
            problem = self._compare(where, experiment, value, actual[where])
            if problem is not None:
                yield where, problem

    def conclusions(self) -> Iterator[tuple[str, str]]:
        """Yields (name, description) of the values that differ over all batches together."""
        for (where, fresh), pairs in self._pairs.items():
            problem = problem_of_runs(pairs)
            if problem is not None:
                yield where, problem + " with no state" * fresh

    def _compare(
        self, where: str, experiment: Experiment, was: RunValue, now: RunValue
    ) -> str | None:
        if not isinstance(was.value, torch.Tensor):
            return None if now.value == was.value else f"{now.value!r} instead of {was.value!r}"
        other = other_kind(now.value, was.value)
        if other is not None:
            return other
        if was.value.is_complex():
            was, now = _real(was), _real(now)
        if not was.value.is_floating_point():
            return self._elements(where, experiment, was, now)
        if experiment.purpose == "base":
            self._base[where] = _sampled(was), _sampled(now)
        if experiment.purpose == "finite" or was.kind == SUBSTITUTED:
            lost = _is_finite(was) and not _is_finite(now)
            return f"it is not finite with {experiment.name}" if lost else None
        if experiment.purpose in ("base", "trial", "elements"):
            found = self._elements(where, experiment, was, now) or self._kept(was, now)
            if found is not None:
                return found
        return self._factors(where, experiment, _sampled(was), _sampled(now), was.kind)

    def _factors(
        self, where: str, experiment: Experiment, was: _Sampled, now: _Sampled, kind: str | None
    ) -> str | None:
        if experiment.purpose == "state":
            known = kind in ("parameter", "optimizer_state")
            return self._scatter(where, was, now) if known else None
        if experiment.purpose == "fresh" and kind != "optimizer_state":
            return None
        if self.noise.get(where, 0.0) > ROUNDING_ALONE:
            return multiplied(was.change, now.change) if experiment.purpose == "base" else None
        if experiment.purpose in ("base", "trial"):
            self._pairs.setdefault((where, False), []).append((was.seen, now.change))
        elif experiment.purpose == "fresh":
            if largest(was.change) > _NOTHING * largest(self._base[where][0].change):
                self._pairs.setdefault((where, True), []).append((was.seen, now.change))
        elif experiment.purpose == "response":
            return self._response(where, experiment, was, now)
        return None

    def _response(
        self, where: str, experiment: Experiment, was: _Sampled, now: _Sampled
    ) -> str | None:
        base = self._base[where]
        old, new = was.end - base[0].end, now.end - base[1].end
        seen = old.abs() > _SEEN * torch.finfo(torch.float32).eps * was.end.abs()
        factor = measured([(old[seen], new[seen])])
        if factor is None or factor.is_one:
            return None
        return f"its response to {experiment.name} is {factor}"

    def _scatter(self, where: str, was: _Sampled, now: _Sampled) -> str | None:
        if not largest(was.change) > _GREW * largest(self._base[where][0].change):
            return None
        factor = measured([(was.seen, now.change)])
        if factor is None:
            return None
        if not factor.is_one:
            return f"it changes {factor}"
        if factor.spread > _SCATTER:
            return (
                f"its elements scatter by {factor.spread:.1e} where gradients hardly matter;"
                f" allowed is {_SCATTER:g}. Is state that was kept in float32 read in fewer bits?"
            )
        return None

    def _elements(
        self, where: str, experiment: Experiment, was: RunValue, now: RunValue
    ) -> str | None:
        same = same_elements(now.value, was.value)
        if bool(same.all()):
            return None
        gap = (wide(now.change) - wide(was.change)).abs()
        is_base = experiment.purpose == "base"
        allowed = self._allowed(where, was, 1 if is_base else _OTHER_DATA)
        wrong = ~(same | (gap <= allowed))
        if not bool(wrong.any()):
            return None
        worst = int((gap - allowed).nan_to_num(torch.inf).flatten().argmax())
        limit = float(allowed.flatten()[worst])
        by = "" if is_base else f", with {experiment.name}"
        return f"{extent(~same, gap)}; at element {worst} {limit:.3g} is allowed{by}"

    def _allowed(self, where: str, was: RunValue, often: float) -> torch.Tensor:
        rounding = wide(was.value).abs() * _last_bits(was.value)
        noise = self.noise.get(where)
        if not noise:  # such as a count of steps
            return rounding
        return often * (TOLERANCE + _NOISE * noise) * largest(was.change) + rounding

    def _kept(self, was: RunValue, now: RunValue) -> str | None:
        """Describes float32 state whose new values fit into fewer bits, or returns None."""
        if was.start is None or was.kind not in ("parameter", "optimizer_state"):
            return None
        if was.value.dtype != torch.float32 or not bool(was.start.any()):
            return None
        for dtype in (torch.bfloat16, torch.float16):
            if _fits(now.value, dtype) and not _fits(was.value, dtype):
                return f"all of it is representable in {dtype} now, and was not: it has lost bits"
        return None


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _sampled(value: RunValue) -> _Sampled:
    """Samples a value's elements."""
    last_bits = 0.0 if value.start is None else torch.finfo(value.value.dtype).eps
    return _Sampled(sample(value.value), sample(value.change), last_bits)


def _last_bits(tensor: torch.Tensor) -> float:
    return 4 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _real(value: RunValue) -> RunValue:
    """Converts complex numbers to pairs of real ones."""
    start = None if value.start is None else torch.view_as_real(value.start)
    return RunValue(torch.view_as_real(value.value.resolve_conj()), start, value.kind)


def _is_finite(value: RunValue) -> bool:
    return not isinstance(value.value, torch.Tensor) or bool(value.value.isfinite().all())
