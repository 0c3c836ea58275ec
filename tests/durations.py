"""How long tests take, from records of pytest's: what `tests/durations.txt` holds.

    .venv/bin/python -m pytest --junitxml record.xml
    .venv/bin/python tests/durations.py record.xml > tests/durations.txt

A line is the seconds that one case of a test takes on average, where that is more than `TYPICAL`.
Further records, in which the machine may have done less beside, count where they say less.
By these tests/conftest.py lets the longest files begin, and chooses which cases belong to the
normal run and to `make check`.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from statistics import mean

TYPICAL = 0.1
"""Seconds of a case that is not listed, at most."""
NORMAL = 0.7
"""Seconds that the cases of a test may take together in the normal run. A test of which one case
takes longer is left to `make test-all`, but for one of each file."""
CHECK = 0.3
"""The same in `make check`, without exceptions."""
WHOLE = 2.0
"""The same in `make test-all`, which has one case of each test at least; the seed chooses."""
LISTED = Path(__file__).with_suffix(".txt")


def listed() -> dict[str, float]:
    """Seconds by `test_file::test_function`."""
    lines = (line.split() for line in LISTED.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def recorded(path: Path) -> dict[str, float]:
    """The same, of all tests of a record."""
    functions: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.attrib["classname"].rpartition(".")[2]
        functions[f"{file}::{case.attrib['name'].partition('[')[0]}"].append(
            float(case.attrib["time"])
        )
    return {name: mean(each) for name, each in functions.items()}


def least(record: dict[str, float], *others: dict[str, float]) -> dict[str, float]:
    """Of all tests of a record, where others have them as well."""
    return {
        name: min([seconds, *(other.get(name, seconds) for other in others)])
        for name, seconds in record.items()
    }


if __name__ == "__main__":
    found = least(*(recorded(Path(path)) for path in sys.argv[1:]))
    for name, seconds in sorted(found.items(), key=lambda each: -each[1]):
        if seconds > TYPICAL:
            print(f"{seconds:.1f} {name}")
