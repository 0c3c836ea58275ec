"""What passes the files of graphopt declare, read from their text: `graphopt passes` shows that
without torch, whose import takes longer than all else."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DECORATOR = "graph_optimization_pass"

_LISTS = ("prerequisites", "apply_after", "apply_before")
_FLAGS = ("repeatable", "changes_numerics", "changes_communication", "whole_step", "bakes_rank")
_WHOLE_STEP = "IterGraphModule"


class CannotReadError(Exception):
    """A declaration that only running it would tell."""


def shipped_passes() -> list[dict[str, Any]]:
    """A description of each pass in `graphopt.passes`, by name, as `described` gives.

    Raises:
        CannotReadError: one of them is declared with something else than constants.
    """
    found = [entry for path in _files() for entry in _declared(path)]
    return sorted(found, key=lambda entry: str(entry["name"]))


def _files() -> Iterator[Path]:
    spec = find_spec("graphopt")
    assert spec is not None and spec.submodule_search_locations is not None
    for folder in spec.submodule_search_locations:
        yield from sorted((Path(folder) / "passes").glob("*.py"))


def _declared(path: Path) -> Iterator[dict[str, Any]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == DECORATOR:
                yield _description(node, decorator, f"graphopt.passes.{path.stem}")


def _description(function: ast.FunctionDef, decorator: ast.Call, module: str) -> dict[str, Any]:
    given = {str(word.arg): _constant(word.value) for word in decorator.keywords}
    first, *_ = function.args.args
    flags = {name: bool(given.get(name, False)) for name in _FLAGS}
    if decorator.args or first.annotation is None:
        raise CannotReadError
    flags["whole_step"] |= ast.unparse(first.annotation) == _WHOLE_STEP
    return {
        "name": given.get("name", function.name),
        "what": inspect.cleandoc(ast.get_docstring(function) or "").partition("\n")[0],
        "options": list(_options(function)),
        **{name: list(given.get(name, ())) for name in _LISTS},
        **flags,
        "module": module,
    }


def _options(function: ast.FunctionDef) -> Iterator[dict[str, Any]]:
    arguments = function.args
    if arguments.kwonlyargs or arguments.posonlyargs or arguments.vararg or arguments.kwarg:
        raise CannotReadError
    required = len(arguments.args) - len(arguments.defaults)
    for index, argument in enumerate(arguments.args[1:], start=1):
        kind = "any" if argument.annotation is None else ast.unparse(argument.annotation)
        option: dict[str, Any] = {"name": argument.arg, "type": kind.replace("Any", "any")}
        if index >= required:
            option["default"] = _constant(arguments.defaults[index - required])
        yield option


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise CannotReadError from None
