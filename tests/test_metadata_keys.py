"""Keys of the metadata of nodes stand in `graphopt.ir.metadata`; all others ask its functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from graphopt.ir import metadata
from test_imports import FILES, tree_of, within

KEYS = frozenset(
    value for name, value in vars(metadata).items() if name.isupper() and isinstance(value, str)
)

OTHER_DIALECTS = ("graphopt._compat", "graphopt.ir.metadata")
"""Modules that read and write the metadata of torch's own graphs."""


def keys_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where a text is used as a key of metadata: `x.meta["val"]`, `x.meta.get("val")`, `"val" in
    x.meta`."""
    for node in ast.walk(tree):
        used: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and _is_metadata(node.value):
            used = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            used = node.args[:1] if _is_metadata(node.func.value) else []
        elif isinstance(node, ast.Compare) and any(map(_is_metadata, node.comparators)):
            used = [node.left]
        for key in used:
            if isinstance(key, ast.Constant) and key.value in KEYS:
                yield node.lineno, str(key.value)


def _is_metadata(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Attribute) and expression.attr == "meta"


def test_keys_of_metadata() -> None:
    modules = [module for module in FILES if not within(module, OTHER_DIALECTS)]
    found = [f"{m}:{line} {key}" for m in modules for line, key in keys_in(tree_of(m))]
    assert not found, f"graphopt.ir.metadata has a function for each: {found}"


def test_what_is_found() -> None:
    written = 'x.meta["val"]; x.meta.get("kind", 0); "phase" in x.meta; x.meta["own"]; x["val"]'
    assert [key for _, key in keys_in(ast.parse(written))] == ["val", "kind", "phase"]
