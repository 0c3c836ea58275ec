"""Captures the coverage set, published kinds of training loops, each in a process of its own.

    python benchmarks/coverage.py                       all cases, as a table
    python benchmarks/coverage.py vision styles.logged  families or single cases
    python benchmarks/coverage.py --write               into docs/coverage.md as well
    python benchmarks/coverage.py --device cuda --jobs 8   on a GPU, several cases at once
    python benchmarks/coverage.py --steps 40            what a step takes beside eager's as well

Every case is a loop as people publish it, in a small size (`benchmarks/cases`). It is run eagerly
and through `graphopt.compile`, from the same seed, and everything that it leaves is compared bit
for bit: results, parameters, buffers, optimizer state, random numbers. A refusal is shown with its
reason and line; behind it stands the cured form of the loop, in which the lines that the message
names are where it says.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import torch
from cases import Build, Case, cases, cured_cases, tensors_of
from coverage_outcomes import CURED, Outcome, show, steps_compared, summary, table
from coverage_steps import step_times

import graphopt
from graphopt.errors import GraphOptError

TIMEOUT = 120.0
PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"


def run(case: Case, compiled: bool) -> tuple[list[torch.Tensor], graphopt.TrainStep | None, float]:
    """Runs all calls of a case; returns everything it leaves, and the first call's CPU seconds."""
    step = graphopt.compile(case.step) if compiled else None
    results: list[object] = []
    first = 0.0
    for index, args in enumerate(case.calls):
        begin = time.process_time()
        result = (step or case.step)(*args)
        first = first or time.process_time() - begin
        # Numbers and tensors are kept as they are now.
        results.append([tensor.clone() for tensor in tensors_of(result)])
        if case.after is not None:
            case.after(index, result)
    if step is not None:
        step.flush()
    generators = [torch.random.get_rng_state()]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.get_rng_state())
    generators.append(torch.tensor(random.getstate()[1]))
    generators.append(torch.from_numpy(numpy.random.get_state()[1].astype("int64")))
    left = [*results, list(case.state), generators]
    return [tensor.detach() for tensor in tensors_of(left)], step, first


def built(build: Build) -> Case:
    """Builds a case with seed 0."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return build()


def repeats(build: Build, expected: Sequence[torch.Tensor]) -> bool:
    """True if two more eager runs give the same results."""
    for _ in range(2):
        again, _, _ = run(built(build), compiled=False)
        if first_difference(again, expected) is not None:
            return False
    return True


def first_difference(left: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """The first difference of two lists of tensors, NaNs counting as equal, or None."""
    if len(left) != len(expected):
        return f"{len(left)} tensors, not {len(expected)}"
    for index, (a, b) in enumerate(zip(left, expected, strict=True)):
        a, b = (value.to_dense() if value.is_sparse else value for value in (a, b))
        if a.dtype != b.dtype or not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            by = float((a.double() - b.double()).abs().max()) if a.shape == b.shape else "shape"
            return f"tensor {index} of {len(left)}, {tuple(b.shape)}, by {by}"
    return None


def judged(name: str, build: Build, device: str = "cpu") -> Outcome:
    """Runs a case eagerly and captured, and compares."""
    try:
        expected, _, _ = run(built(build), compiled=False)
    except Exception as error:
        if device == "cpu":
            raise
        return Outcome(name, "not for it", f"eager: {error}")
    if device != "cpu" and not repeats(build, expected):
        return Outcome(name, "not repeatable", "eager differs from itself")
    case = built(build)  # kept: a step forgets the graphs of models that are gone
    try:
        left, step, seconds = run(case, compiled=True)
    except GraphOptError as error:
        return Outcome(name, "refused", str(error))
    assert step is not None
    outcome = Outcome(name, "bitwise", seconds=seconds)
    outcome.captures = len(step.captures)
    outcome.nodes = len(step.captures[-1].graph_module.graph.nodes)
    difference = first_difference(left, expected)
    if difference is not None:
        outcome.verdict, outcome.reason = "differs", difference
    return outcome


def _child(name: str, device: str, job: Callable[[], Outcome], end: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    if device != "cpu":
        torch.set_default_device(device)
    try:
        outcome = job()
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        if os.environ.get("COVERAGE_TRACEBACK"):
            text += "\n" + traceback.format_exc()
        outcome = Outcome(name, "failed", text)
    end.send(asdict(outcome))


def in_process(name: str, job: Callable[[], Outcome], device: str = "cpu") -> Outcome:
    """Runs `job` on a case in a forked process, which ends after `TIMEOUT` seconds."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, device, job, there))
    process.start()
    there.close()
    try:
        if not here.poll(TIMEOUT):
            process.kill()
            return Outcome(name, "too long", f"more than {TIMEOUT:.0f} s")
        return Outcome(**here.recv())
    except EOFError:
        return Outcome(name, "failed", f"the process ended with {process.exitcode}")
    finally:
        process.join()


def found(name: str, build: Build, options: argparse.Namespace) -> Outcome:
    """Runs everything that is asked for on one case, each in a process of its own."""
    outcome = in_process(name, partial(judged, name, build, options.device), options.device)
    if options.steps and outcome.verdict == "bitwise":

        def timed() -> Outcome:
            times = step_times(partial(built, build), options.steps, options.against)
            return replace(outcome, **times)

        times = in_process(name, timed, options.device)
        return times if times.verdict == "bitwise" else outcome
    return outcome


def chosen(names: Sequence[str]) -> dict[str, Build]:
    """The cases of these families or names, or all; each cured form follows its refused case."""
    found: dict[str, Build] = {}
    for name, build in cases().items():
        found[name] = build
        if name in cured_cases():
            found[f"{name} {CURED}"] = cured_cases()[name]
    if not names:
        return found
    wanted = set(names)
    return {n: b for n, b in found.items() if {n.split()[0], n.partition(".")[0]} & wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families or cases")
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    parser.add_argument("--reasons", action="store_true", help="show refusals in full")
    parser.add_argument("--device", default="cpu", help="where models and data are; cpu")
    parser.add_argument("--steps", type=int, default=0, help="time as many later steps; 0")
    parser.add_argument("--against", metavar="BACKEND", help="time those of torch.compile as well")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once; 1")
    options = parser.parse_args()
    outcomes = []
    builds = chosen(options.names)
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda name: found(name, builds[name], options), builds):
            outcomes.append(outcome)
            show(outcome, options.reasons)
    print(summary(outcomes))
    if options.steps:
        print(steps_compared(outcomes))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    if options.write:
        said = [summary(outcomes)] + [steps_compared(outcomes)] * bool(options.steps)
        _write(outcomes, said)


def _write(outcomes: Sequence[Outcome], said: Sequence[str]) -> None:
    before = PAGE.read_text().partition("<!-- cases -->")[0] if PAGE.exists() else "# Coverage\n\n"
    text = [before.rstrip("\n"), "", "<!-- cases -->", "", *(f"{each}." for each in said), ""]
    PAGE.write_text("\n".join([*text, *table(outcomes), ""]))


if __name__ == "__main__":
    sys.exit(main())
