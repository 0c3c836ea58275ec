"""`graphopt passes`: what passes there are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from graphopt.commands.errors import reported
from graphopt.commands.imports import import_passes
from graphopt.manager import Pass, default_registry, discovery


def run_passes(modules: Sequence[str], as_json: bool) -> None:
    """Print a table of all passes, or the same as JSON."""
    discovery.install()
    registry = default_registry()
    with reported("passes"):
        import_passes(modules)
        known = [registry.get(name) for name in registry.names()]
    if as_json:
        print(json.dumps([described(pass_) for pass_ in known], indent=2))
        return
    Console().print(_table(known))


def described(pass_: Pass) -> dict[str, Any]:
    """A pass as JSON. An option without a default has none here either."""
    return {
        "name": pass_.name,
        "what": pass_.doc,
        "options": [
            {"name": option.name, "type": option.type_name}
            | ({} if option.required else {"default": _plain(option.default)})
            for option in pass_.options.values()
        ],
        "prerequisites": list(pass_.prerequisites),
        "apply_after": list(pass_.apply_after),
        "apply_before": list(pass_.apply_before),
        "repeatable": pass_.repeatable,
        "changes_numerics": pass_.changes_numerics,
        "whole_step": pass_.whole_step,
        "bakes_rank": pass_.bakes_rank,
        "module": pass_.module,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _table(known: list[Pass]) -> Table:
    table = Table(box=None, padding=(0, 2, 1, 0))
    table.add_column("pass", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    table.add_column("numerics", no_wrap=True)
    for pass_ in known:
        numerics = "changes" if pass_.changes_numerics else "same bits"
        table.add_row(escape(pass_.name), _description(pass_), numerics)
    return table


def _description(pass_: Pass) -> Text:
    text = Text(pass_.doc or "(its function has no docstring)")
    for option in pass_.options.values():
        text.append(f"\n{option}", "cyan")
    for heading, names in (
        ("needs", pass_.prerequisites),
        ("after", pass_.apply_after),
        ("before", pass_.apply_before),
    ):
        if names:
            text.append(f"\n{heading} {', '.join(names)}", "magenta")
    if pass_.whole_step:
        text.append("\nneeds a whole step", "magenta")
    if pass_.repeatable:
        text.append("\nmay be applied more than once", "magenta")
    return text
