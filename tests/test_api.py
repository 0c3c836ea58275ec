"""The public names: each is described with an example that runs; the pages about them are whole."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graphopt
from graphopt import comm, graph_utils, optim

ROOT = Path(__file__).resolve().parent.parent
HELPERS = (ROOT / "docs" / "helpers.md").read_text()
ELSEWHERE = [
    "graphopt.testing.fake_ranks",
    "graphopt.viewing.dot_text",
    "graphopt.viewing.view_page",
]


def example_of(name: str, value: Any) -> doctest.DocTest | None:
    """The example of one name: in its docstring, or that of its class."""
    source = value if hasattr(value, "__qualname__") else type(value)
    module = importlib.import_module(source.__module__)
    found = doctest.DocTestFinder(recurse=False).find(source, name, module, globs={})
    return found[0] if found and found[0].examples else None


def public() -> Iterator[tuple[str, Any]]:
    yield from ((f"graphopt.{name}", getattr(graphopt, name)) for name in graphopt.__all__)
    for name in ELSEWHERE:
        module, _, attribute = name.rpartition(".")
        yield name, getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", [name for name, _ in public()])
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHOPT_DUMP", "")  # what an example sets is taken back
    monkeypatch.delenv("GRAPHOPT_DUMP")
    example = example_of(name, dict(public())[name])
    assert example is not None, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example, out=sys.stderr.write)
    assert runner.failures == 0


def test_page_of_helpers() -> None:
    """docs/helpers.md has every helper of passes, and nothing that is not there."""
    sections = dict(re.findall(r"^## `(graphopt\.\w+)`.*?$(.*?)(?=^## |\Z)", HELPERS, re.M | re.S))
    for module in (graph_utils, comm, optim):
        named = re.findall(r"^\| `(\w+)", sections[module.__name__], re.M)
        assert sorted(named) == sorted(module.__all__), module.__name__
