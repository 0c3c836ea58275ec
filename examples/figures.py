"""A table of the twelve example passes: `python examples/figures.py`.

By pass: its lines, and CPU seconds of its check on a small step. Of a step four times as wide,
before and after the pass, the peak of memory and the time of a step on two ranks, both by the
simulator's account. The last column says which of both a pass is for; `docs/writing_a_pass.md` says
at which sizes it gains that.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import five_further_passes as five
import seven_passes as seven

import graphopt
from graphopt.manager import Pass
from graphopt.testing import StepUnderTest, fake_ranks

SCALE = 4
OF_CHECK = ("changes", "idempotent")
PROMISES = {
    "compress_bf16": "time",
    "fuse_written_attention": "time",
    "recompute_gelu": "memory",
    "update_late": "time",
    "late_embedding": "time",
}
"""What a pass is for, where it is for one of both."""


Step = Callable[..., Any]


def example_passes() -> list[tuple[Pass, Step, Callable[..., Any], dict[str, Any]]]:
    """Each pass with a step, what makes arguments for it, and options of the pass and its check."""
    first = [(pass_, seven.train_step, seven.arguments, given) for pass_, given in seven.PASSES]
    return first + [(pass_, step, five.arguments, given) for pass_, step, given in five.PASSES]


def seconds_of_check(pass_: Pass, step: Step, args: Any, given: dict[str, Any]) -> float:
    """CPU seconds of testing a pass on a step that is captured already."""
    under_test = StepUnderTest(step, args)
    start = time.process_time()
    under_test.check(pass_, **given)
    return time.process_time() - start


def effect(pass_: Pass, step: Step, args: Any, given: dict[str, Any]) -> tuple[float, ...]:
    """Peak bytes and seconds of a step, before and after a pass and behind its prerequisites."""
    gm = StepUnderTest(step, args).graph_module
    graphopt.PassManager(list(pass_.prerequisites)).run(gm)
    before = graphopt.simulate(gm, world_size=2).step_seconds
    options = {name: value for name, value in given.items() if name not in OF_CHECK}
    (record,) = graphopt.PassManager([(pass_, options)]).run(gm)
    after = graphopt.simulate(gm, world_size=2).step_seconds
    return record.peak_bytes_before, record.peak_bytes_after, before, after


def main() -> None:
    print(f"{'pass':24}{'lines':>6}{'check, s':>10}{'peak, MB':>17}{'step, ms':>17}  is for")
    with fake_ranks(2):
        for pass_, step, arguments, given in example_passes():
            lines = len(inspect.getsource(pass_.function).splitlines())
            seconds = seconds_of_check(pass_, step, arguments(), given)
            *peaks, before, after = effect(pass_, step, arguments(SCALE), given)
            memory = "{:.2f} -> {:.2f}".format(*(peak / 1e6 for peak in peaks))
            times = f"{before * 1e3:.2f} -> {after * 1e3:.2f}"
            promise = PROMISES.get(pass_.name, "")
            print(f"{pass_.name:24}{lines:6}{seconds:10.2f}{memory:>17}{times:>17}  {promise}")


if __name__ == "__main__":
    main()
