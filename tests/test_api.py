"""The public names: each is described with an example that runs; the pages about them are whole."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt import comm, graph_utils, optim
from graphopt.testing import fake_ranks

ROOT = Path(__file__).resolve().parent.parent
HELPERS = (ROOT / "docs" / "helpers.md").read_text()
FIXTURE = re.compile(r"\bgm\b")
MODULES = re.search(r"^DOCUMENTED := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
assert MODULES is not None
PUBLIC = MODULES.group(1).replace("\\", " ").split()
"""Modules of which `make docs` writes pages: each lists its public names."""


def captured_step() -> fx.GraphModule:
    """What examples call `gm`: a training step of a linear layer, on two ranks."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with fake_ranks(2):
        parallel = graphopt.DataParallel()
        return graphopt.capture(
            step, model, optimizer, torch.ones(3, 4), parallel=parallel
        ).graph_module


def example_of(name: str, value: Any) -> doctest.DocTest | None:
    """The example of one name: in its docstring, or that of its class."""
    source = value if hasattr(value, "__qualname__") else type(value)
    module = importlib.import_module(source.__module__)
    found = doctest.DocTestFinder(recurse=False).find(source, name, module, globs={})
    return found[0] if found and found[0].examples else None


def public() -> Iterator[tuple[str, Any]]:
    """Functions, classes and objects of graphopt's that are public, by name. What torch defines,
    and constants, need no example."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        for entry in module.__all__:
            value = getattr(module, entry)
            if getattr(value, "__module__", type(value).__module__).startswith("graphopt"):
                yield f"{name}.{entry}", value


@pytest.mark.parametrize("name", [name for name, _ in public()])
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "riton" in name and find_spec("triton") is None:
        pytest.skip("needs Triton")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHOPT_DUMP", "")  # what an example sets is taken back
    monkeypatch.delenv("GRAPHOPT_DUMP")
    example = example_of(name, dict(public())[name])
    assert example is not None, f"{name} has no example"
    example.globs.update(graphopt=graphopt, torch=torch)
    if FIXTURE.search("".join(line.source for line in example.examples)):
        example.globs["gm"] = captured_step()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example, out=sys.stderr.write)
    assert runner.failures == 0


def methods_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A public name, and the public methods and properties of a class."""
    yield name, value
    for entry, held in vars(value).items() if isinstance(value, type) else ():
        called = isinstance(held, FunctionType | property | classmethod | staticmethod)
        if called and not entry.startswith("_"):
            yield f"{name}.{entry}", getattr(value, entry)


def raised_by(function: Any) -> Iterator[str]:
    """Names of the errors of graphopt that a function itself raises."""
    source = function.fget if isinstance(function, property) else function
    if not isinstance(source, FunctionType | MethodType):
        return
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(source)))):
        error = node.exc if isinstance(node, ast.Raise) else None
        called = error.func if isinstance(error, ast.Call) else error
        if isinstance(called, ast.Name) and isinstance(getattr(graphopt, called.id, None), type):
            yield called.id


def test_public_functions_are_described() -> None:
    """Every public function, class, method and property says what it is for, and what it raises."""
    entries = [entry for name, value in public() for entry in methods_of(name, value)]
    texts = {name: inspect.getdoc(value) or "" for name, value in entries}
    assert not [name for name, text in texts.items() if not text]
    silent = [
        (name, error)
        for name, value in entries
        for error in raised_by(value)
        if "Raises:" not in texts[name] and error not in texts[name]
    ]
    assert not silent, "their docstrings do not say what they raise"


def test_page_of_helpers() -> None:
    """docs/helpers.md has every helper of passes, and nothing that is not there."""
    sections = dict(re.findall(r"^## `(graphopt\.\w+)`.*?$(.*?)(?=^## |\Z)", HELPERS, re.M | re.S))
    for module in (graph_utils, comm, optim):
        named = re.findall(r"^\| `(\w+)", sections[module.__name__], re.M)
        assert sorted(named) == sorted(module.__all__), module.__name__
