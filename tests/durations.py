"""How long tests take, from a record of pytest's: what `tests/durations.txt` holds.

    .venv/bin/python -m pytest --junitxml record.xml
    .venv/bin/python tests/durations.py record.xml > tests/durations.txt

A line is the seconds that all tests of a file take, or those of one case of a test on average,
where that is more than `QUICK`. tests/conftest.py lets the longest files begin, and `make check`
leave out the tests that are listed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

QUICK = 0.3
LISTED = Path(__file__).with_suffix(".txt")


def listed() -> dict[str, float]:
    """Seconds by `test_file`, and by `test_file::test_function`."""
    lines = (line.split() for line in LISTED.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def recorded(path: Path) -> Iterator[tuple[str, float]]:
    """The same, of a record."""
    files: dict[str, float] = defaultdict(float)
    functions: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.attrib["classname"].rpartition(".")[2]
        seconds = float(case.attrib["time"])
        files[file] += seconds
        functions[f"{file}::{case.attrib['name'].partition('[')[0]}"].append(seconds)
    means = {name: mean(each) for name, each in functions.items()}
    yield from files.items()
    yield from ((name, seconds) for name, seconds in means.items() if seconds > QUICK)


if __name__ == "__main__":
    for name, seconds in sorted(recorded(Path(sys.argv[1])), key=lambda each: -each[1]):
        print(f"{seconds:.1f} {name}")
