"""Which training loops graphopt captures: published kinds of them, each in a process of its own.

    python benchmarks/coverage.py                       all cases, as a table
    python benchmarks/coverage.py vision styles.logged  families or single cases
    python benchmarks/coverage.py --write               into docs/coverage.md as well
    python benchmarks/coverage.py --device cuda --jobs 8   on a GPU, several cases at once
    python benchmarks/coverage.py --against aot_eager   CPU seconds of torch.compile beside them

Every case is a loop as people publish it, in a small size (`benchmarks/cases`). It is run eagerly
and through `graphopt.compile`, from the same seed, and everything that it leaves is compared bit
for bit: results, parameters, buffers, optimizer state, random numbers. A refusal is shown with its
reason and line.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from cases import Build, Case, cases, tensors_of
from torch.utils._pytree import tree_leaves, tree_map_only

import graphopt
from graphopt.errors import GraphOptError

TIMEOUT = 120.0
PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"


@dataclass
class Outcome:
    """What became of one case.

    Attributes:
        verdict: "bitwise", "differs", "refused", "failed" (another error) or "too long"; of eager
            itself "not for it" (the device) or "not repeatable".
        reason: of a refusal or a failure.
        captures: how many graphs the calls needed.
        nodes: of the last graph.
        seconds: CPU seconds of the first call.
        against: those of the first call of the same loop with its models compiled by torch, forward
            and backward (the optimizer runs eagerly); None where that fails, or was not asked for.
    """

    name: str
    verdict: str
    reason: str = ""
    captures: int = 0
    nodes: int = 0
    seconds: float = 0.0
    against: float | None = None


def run(case: Case, compiled: bool) -> tuple[list[torch.Tensor], graphopt.TrainStep | None, float]:
    """Run all calls of a case. Returns everything it leaves, and CPU seconds of the first call."""
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
    left = [*results, list(case.state), generators]
    return [tensor.detach() for tensor in tensors_of(left)], step, first


def seconds_of_torch(build: Build, backend: str) -> float | None:
    """CPU seconds of the first call of a case whose models are compiled by torch; None without
    models among its arguments, and where torch fails."""
    case = built(build)
    args = case.calls[0]
    if not any(isinstance(leaf, torch.nn.Module) for leaf in tree_leaves(args)):
        return None
    begin = time.process_time()
    try:
        case.step(*tree_map_only(torch.nn.Module, partial(torch.compile, backend=backend), args))
    except Exception as error:
        print(f"    torch.compile: {type(error).__name__}", flush=True)
        return None
    return time.process_time() - begin


def built(build: Build) -> Case:
    """A case from seed 0."""
    torch.manual_seed(0)
    return build()


def repeats(build: Build, expected: Sequence[torch.Tensor]) -> bool:
    """Whether eager does the same again, and once more."""
    for _ in range(2):
        again, _, _ = run(built(build), compiled=False)
        if first_difference(again, expected) is not None:
            return False
    return True


def first_difference(left: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """Of two lists of tensors, with equal NaNs; None where there is none."""
    if len(left) != len(expected):
        return f"{len(left)} tensors, not {len(expected)}"
    for index, (a, b) in enumerate(zip(left, expected, strict=True)):
        a, b = (value.to_dense() if value.is_sparse else value for value in (a, b))
        if a.dtype != b.dtype or not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            by = float((a.double() - b.double()).abs().max()) if a.shape == b.shape else "shape"
            return f"tensor {index} of {len(left)}, {tuple(b.shape)}, by {by}"
    return None


def judged(name: str, build: Build, device: str = "cpu") -> Outcome:
    """Run a case both ways and compare."""
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


def _child(name: str, build: Build, device: str, backend: str | None, end: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    if device != "cpu":
        torch.set_default_device(device)
    try:
        if backend is not None:
            outcome = Outcome(name, "torch", against=seconds_of_torch(build, backend))
        else:
            outcome = judged(name, build, device)
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        if os.environ.get("COVERAGE_TRACEBACK"):
            text += "\n" + traceback.format_exc()
        outcome = Outcome(name, "failed", text)
    end.send(asdict(outcome))


def in_process(name: str, build: Build, device: str = "cpu", backend: str | None = None) -> Outcome:
    """`judged` in a forked process that ends after `TIMEOUT` seconds; with a backend of
    `torch.compile` the seconds of that alone."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, build, device, backend, there))
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


def chosen(names: Sequence[str]) -> dict[str, Build]:
    """The cases of these families, or with these names; all where there are none."""
    found = cases()
    if not names:
        return found
    return {n: b for n, b in found.items() if n in names or n.partition(".")[0] in names}


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The outcomes as a table in Markdown."""
    rows = ["| case | outcome | captures | nodes | CPU s |", "|---|---|---:|---:|---:|"]
    for each in outcomes:
        if each.verdict == "bitwise":
            figures = f"{each.captures} | {each.nodes} | {each.seconds:.1f}"
            rows.append(f"| {each.name} | bitwise | {figures} |")
        else:
            rows.append(f"| {each.name} | {each.verdict}: {_short(each.reason)} | | | |")
    return rows


def _short(reason: str) -> str:
    first = reason.strip().split("\n", 1)[0]
    return first.partition(": ")[2] or first


def summary(outcomes: Sequence[Outcome]) -> str:
    """The figures of all cases in one sentence."""
    bitwise = [each for each in outcomes if each.verdict == "bitwise"]
    wrong = sum(each.verdict == "differs" for each in outcomes)
    per_node = [1000 * each.seconds / each.nodes for each in bitwise if each.nodes]
    text = f"{len(bitwise)} of {len(outcomes)} captured and bitwise, {wrong} captured and not"
    if not per_node:
        return text
    return f"{text}; CPU seconds per 1,000 nodes: median {median(per_node):.1f}"


def compared(outcomes: Sequence[Outcome], backend: str) -> str:
    """The seconds of the first call beside those of `torch.compile`, where both have captured."""
    pairs = [(each.seconds, each.against) for each in outcomes if each.nodes and each.against]
    if not pairs:
        return f"no case to compare with {backend}"
    ours, theirs = (sum(column) for column in zip(*pairs, strict=True))
    ratio = median(a / b for a, b in pairs)
    less = sum(a <= b for a, b in pairs)
    return (
        f"{len(pairs)} cases beside torch.compile(backend={backend!r}): {ours:.0f} and"
        f" {theirs:.0f} CPU seconds in all, less in {less}, median ratio {ratio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families or cases")
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    parser.add_argument("--reasons", action="store_true", help="show refusals in full")
    parser.add_argument("--device", default="cpu", help="where models and data are; cpu")
    parser.add_argument("--against", metavar="BACKEND", help="time torch.compile with it as well")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once; 1")
    options = parser.parse_args()
    outcomes = []
    builds = chosen(options.names)
    with ThreadPoolExecutor(options.jobs) as pool:
        running = pool.map(lambda name: in_process(name, builds[name], options.device), builds)
        for outcome in running:
            if options.against:
                build = builds[outcome.name]
                by_torch = in_process(outcome.name, build, options.device, options.against)
                outcome.against = by_torch.against
            outcomes.append(outcome)
            show(outcome, options.reasons)
    print(summary(outcomes))
    if options.against:
        print(compared(outcomes, options.against))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    if options.write:
        _write(outcomes)


def show(outcome: Outcome, reasons: bool) -> None:
    """One line, and the reason where it is asked for or unexpected."""
    line = f"{outcome.name:44} {outcome.verdict:14} {outcome.captures:2} {outcome.nodes:5}"
    against = "" if outcome.against is None else f" {outcome.against:5.1f}"
    print(f"{line} {outcome.seconds:5.1f}{against}", flush=True)
    if outcome.reason and (reasons or outcome.verdict in ("failed", "differs")):
        print("    " + outcome.reason.strip().replace("\n", "\n    "), flush=True)


def _write(outcomes: Sequence[Outcome]) -> None:
    before = PAGE.read_text().partition("<!-- cases -->")[0] if PAGE.exists() else "# Coverage\n\n"
    text = [before.rstrip("\n"), "", "<!-- cases -->", "", summary(outcomes) + ".", ""]
    PAGE.write_text("\n".join([*text, *table(outcomes), ""]))


if __name__ == "__main__":
    sys.exit(main())
