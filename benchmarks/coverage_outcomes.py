"""Outcomes of the coverage set's cases, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression, median

CURED = "(cured)"
"""Stands behind the name of a case of which this is the cured form."""


@dataclass
class Outcome:
    """The outcome of one case.

    Attributes:
        verdict: "bitwise", "differs", "refused", "failed" (another error) or "too long"; of eager
            itself "not for it" (the device) or "not repeatable".
        reason: the reason of a refusal or failure.
        captures: the number of graphs that the calls needed.
        nodes: the number of nodes of the last graph.
        seconds: CPU seconds of the first call.
        eager_step: CPU seconds of an eager step later on; None where it was not asked for.
        step_ratio: the ratio of the captured step to eager's.
        torch_ratio: the ratio of the step with models compiled by torch to eager's.
    """

    name: str
    verdict: str
    reason: str = ""
    captures: int = 0
    nodes: int = 0
    seconds: float = 0.0
    eager_step: float | None = None
    step_ratio: float | None = None
    torch_ratio: float | None = None


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The outcomes as a Markdown table."""
    timed = any(each.step_ratio is not None for each in outcomes)
    by_torch = any(each.torch_ratio is not None for each in outcomes)
    more = ["eager step, ms", "ratio"] * timed + ["ratio, torch.compile"] * by_torch
    heads = ["case", "outcome", "captures", "nodes", "CPU s", *more]
    lines = ["---", "---", *["---:"] * (len(heads) - 2)]
    rows = [f"| {' | '.join(heads)} |", f"|{'|'.join(lines)}|"]
    for each in outcomes:
        figures = [""] * (len(heads) - 2)
        verdict = f"{each.verdict}: {_short(each.reason)}"
        if each.verdict == "bitwise":
            verdict = each.verdict
            figures = [str(each.captures), str(each.nodes), f"{each.seconds:.1f}"]
            figures += [_milliseconds(each.eager_step), _ratio(each.step_ratio)] * timed
            figures += [_ratio(each.torch_ratio)] * by_torch
        rows.append(f"| {' | '.join([each.name, verdict, *figures])} |".replace("|  ", "| "))
    return rows


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _short(reason: str) -> str:
    first = reason.strip().split("\n", 1)[0]
    return first.partition(": ")[2] or first


def summary(outcomes: Sequence[Outcome]) -> str:
    """The totals of all cases in one sentence."""
    cured = [each for each in outcomes if each.name.endswith(CURED)]
    outcomes = [each for each in outcomes if each not in cured]
    bitwise = [each for each in outcomes if each.verdict == "bitwise"]
    wrong = sum(each.verdict == "differs" for each in outcomes)
    per_node = [1000 * each.seconds / each.nodes for each in bitwise if each.nodes]
    text = f"{len(bitwise)} of {len(outcomes)} captured and bitwise, {wrong} captured and not"
    if cured:
        right = sum(each.verdict == "bitwise" for each in cured)
        text += f"; {right} of {len(cured)} cured forms captured and bitwise"
    if not per_node:
        return text
    text += (
        f"; CPU seconds per 1,000 nodes: median {median(per_node):.1f}, worst {max(per_node):.1f}"
    )
    points = [(each.nodes / 1000, each.seconds) for each in bitwise if each.nodes]
    if len({nodes for nodes, _ in points}) < 2:
        return text
    slope, fixed = linear_regression(*zip(*points, strict=True))
    return f"{text}; by regression {fixed:.1f} s and {slope:.1f} s per 1,000 nodes"


def steps_compared(outcomes: Sequence[Outcome]) -> str:
    """A comparison of later steps with eager's, for all cases and for those above 5 ms."""
    each = [(o.step_ratio, o.eager_step, o.name) for o in outcomes if o.step_ratio and o.eager_step]
    if not each:
        return "no step was timed"
    slower = [f"{name} ({ratio:.2f})" for ratio, eager, name in each if _slower(ratio, eager)]
    text = f"steps of {len(each)} cases: median {median(ratio for ratio, *_ in each):.2f} of eager"
    pairs = [(o.step_ratio, o.torch_ratio) for o in outcomes if o.step_ratio and o.torch_ratio]
    if pairs:
        text += f", {median(a / b for a, b in pairs):.2f} of torch.compile's in {len(pairs)}"
    return f"{text}; over 5 ms and above 1.05: {', '.join(slower) or 'none'}"


def _slower(ratio: float, eager: float) -> bool:
    return eager > 5e-3 and ratio > 1.05


def show(outcome: Outcome, reasons: bool) -> None:
    """One line about an outcome, with the reason if it is asked for or unexpected."""
    line = f"{outcome.name:44} {outcome.verdict:14} {outcome.captures:2} {outcome.nodes:5}"
    later = ""
    if outcome.eager_step is not None:
        later = f"  {_milliseconds(outcome.eager_step)} ms {_ratio(outcome.step_ratio)}"
        later += f" {_ratio(outcome.torch_ratio)}"
    print(f"{line} {outcome.seconds:5.1f}{later}", flush=True)
    if outcome.reason and (reasons or outcome.verdict in ("failed", "differs")):
        print("    " + outcome.reason.strip().replace("\n", "\n    "), flush=True)
