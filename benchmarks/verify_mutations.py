"""Wrong passes and right ones against the verifier: which does it refuse?

    python benchmarks/verify_mutations.py --edits 2000 --json mutations.json
    python benchmarks/verify_mutations.py --edits 200 --dialect late --seed 7

Captured steps of ten models are changed by random edits, single ones and pairs, as a pass would
change them, and checked as a `PassManager` checks by default. An edit that makes the step compute
something else has to be refused, one that does not has to be accepted. Each illegal edit that is
accepted is run on two replicas whose reductions are real: it is harmless if no bit differs, and a
defect of the verifier otherwise.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import mutation_trials as trials
from illegal_edits import ILLEGAL
from legal_edits import LEGAL, LEGAL_IN_PLACE

ROWS = ("edits", "refused", "named", "harmless", "different", "crash")
_ATTEMPTS = 20


def measure(
    cases: list[trials.Case], edits: dict[str, trials.Edit], count: int, draw: Random, pairs: float
) -> dict[str, Any]:
    """`count` edits that changed something, spread over all cases and kinds."""
    verdicts: list[tuple[str, trials.Verdict]] = []
    names = list(edits)
    for attempt in range(count * _ATTEMPTS):
        if len(verdicts) == count:
            break
        chosen = [(name, edits[name]) for name in _names(names, attempt, draw, pairs)]
        of = draw.choice(cases)
        verdict = trials.trial(of, chosen, draw)
        if verdict.outcome != "none":
            verdicts.append((of.model, verdict))
    return summary(verdicts)


def _names(names: list[str], attempt: int, draw: Random, pairs: float) -> list[str]:
    """Each kind in turn, some with a second one."""
    first = names[attempt % len(names)]
    return [first, draw.choice(names)] if draw.random() < pairs else [first]


def summary(verdicts: list[tuple[str, trials.Verdict]]) -> dict[str, Any]:
    """Counts, and what has to be looked at."""
    found = trials.counts([verdict for _, verdict in verdicts])
    kinds: dict[str, Counter[str]] = {}
    for _, verdict in verdicts:
        for name in verdict.edits:
            outcome = "different" if verdict.differs else verdict.outcome
            kinds.setdefault(name, Counter())[outcome] += 1
    return {
        "edits": len(verdicts),
        "kinds": len(kinds),
        "refused": found["refused"],
        "named": found["named"],
        "harmless": found["accepted"],
        "different": found["different"],
        "crash": found["crash"],
        "by kind": {name: dict(counts) for name, counts in sorted(kinds.items())},
        "unnamed": [
            {"model": model, "edits": v.edits, "message": v.message}
            for model, v in verdicts
            if v.outcome == "refused" and not v.named
        ],
        "refusals": [
            {"model": model, "edits": v.edits, "message": v.message}
            for model, v in verdicts
            if v.outcome == "refused"
        ][:50],
        "defects": [
            {"model": model, "edits": v.edits, "why": v.differs or v.message}
            for model, v in verdicts
            if v.differs or v.outcome == "crash"
        ],
    }


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """One column for each dialect and sort of edits."""
    table = Table("", *(f"{d}, {sort}" for d, found in results.items() for sort in found))
    columns = [found for by_sort in results.values() for found in by_sort.values()]
    for row in (*ROWS[:1], "kinds", *ROWS[1:]):
        table.add_row(row, *(str(column[row]) for column in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edits", type=int, default=200, help="of each sort in each dialect")
    parser.add_argument("--dialect", choices=trials.DIALECTS, nargs="+", default=trials.DIALECTS)
    parser.add_argument("--pairs", type=float, default=0.3, help="share of pairs of edits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in ("graphopt", "torch._subclasses.fake_tensor"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    console = Console()
    results: dict[str, dict[str, Any]] = {}
    with trials.two_ranks():
        for dialect in options.dialect:
            start = time.perf_counter()
            cases = [trials.case(*names, dialect) for names in trials.CASES]
            draw = Random(options.seed)
            legal = LEGAL_IN_PLACE if dialect == "finalized" else LEGAL
            results[dialect] = {}
            for sort, edits in (("illegal", ILLEGAL), ("legal", legal)):
                found = measure(cases, edits, options.edits, draw, options.pairs)
                results[dialect][sort] = found
                _write(results, options.json)
                seconds = time.perf_counter() - start
                counts = ", ".join(f"{row} {found[row]}" for row in ROWS)
                console.print(f"{dialect}, {sort}: {counts} ({seconds:.0f} s)")
    console.print(table_of(results))
    for dialect, found in results.items():
        for sort, column in found.items():
            for defect in column["defects"]:
                console.print(f"{dialect}, {sort}: {defect}", markup=False)
        for refusal in found["legal"]["refusals"]:
            console.print(f"{dialect}, legal, refused: {refusal}", markup=False)


def _write(results: dict[str, dict[str, Any]], path: Path | None) -> None:
    """What is known so far: a run may be cut off."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
