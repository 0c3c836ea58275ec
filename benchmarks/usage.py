"""What steps take of the machine besides time: seconds of all threads, and fresh pages."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from statistics import median

from spread import Figures


class Usage:
    """Sums up what a process uses, by name.

    Attributes:
        found: per name one dictionary for each run: milliseconds of all threads of the process,
            of these those of other threads than the calling one, pages that were fresh, and
            context switches, each per step.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[dict[str, float]]] = {}

    def of(self, name: str, steps: int, run: Callable[[], float]) -> float:
        """Run something and note what it uses. Returns what it returns."""
        before, before_here = _now()
        result = run()
        after, after_here = _now()
        seconds, here = _seconds(before, after), _seconds(before_here, after_here)
        switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
        used = {
            "cpu_ms": 1e3 * seconds / steps,
            "others_ms": 1e3 * (seconds - here) / steps,
            "fresh_pages": (after.ru_minflt - before.ru_minflt) / steps,
            "switches": switches / steps,
        }
        self.found.setdefault(name, []).append(used)
        return result


def _now() -> tuple[resource.struct_rusage, resource.struct_rusage]:
    """What the process has used, and what this thread has."""
    return resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_THREAD)


def _seconds(before: resource.struct_rusage, after: resource.struct_rusage) -> float:
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def summed_up(found: Sequence[dict[str, list[dict[str, float]]]], warm_up: int) -> Figures:
    """Medians over ranks and rounds, by name; the first rounds are left out."""
    return {
        name: {
            kind: median(run[kind] for rank in found for run in rank[name][warm_up:])
            for kind in found[0][name][0]
        }
        for name in found[0]
    }
