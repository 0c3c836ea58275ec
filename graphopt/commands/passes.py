"""Implementation of `graphopt passes`, which lists all passes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from graphopt.commands.errors import reported
from graphopt.commands.imports import import_passes
from graphopt.manager import Pass, default_registry, discovery


def run_passes(modules: Sequence[str], as_json: bool) -> None:
    """Prints a table of all passes, or the same as JSON."""
    known = _known(modules)
    if as_json:
        print(json.dumps(known, indent=2))
        return
    Console().print(_table(known))


def _known(modules: Sequence[str]) -> list[dict[str, Any]]:
    discovery.install()
    registry = default_registry()
    with reported("passes"):
        import_passes(modules)
        return [described(registry.get(name)) for name in registry.names()]


def described(pass_: Pass) -> dict[str, Any]:
    """A pass as a JSON object; an option without a default has none there."""
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
        "changes_communication": pass_.changes_communication,
        "whole_step": pass_.whole_step,
        "bakes_rank": pass_.bakes_rank,
        "module": pass_.module,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _table(known: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 1, 0))
    table.add_column("pass", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    table.add_column("numerics", no_wrap=True)
    for entry in known:
        numerics = "changes" if entry["changes_numerics"] else "same bits"
        table.add_row(escape(entry["name"]), _description(entry), numerics)
    return table


def _description(entry: Mapping[str, Any]) -> Text:
    text = Text(entry["what"] or "(its function has no docstring)")
    for option in entry["options"]:
        default = f" = {option['default']!r}" if "default" in option else ""
        text.append(f"\n{option['name']}: {option['type']}{default}", "cyan")
    for heading, key in (
        ("needs", "prerequisites"),
        ("after", "apply_after"),
        ("before", "apply_before"),
    ):
        if entry[key]:
            text.append(f"\n{heading} {', '.join(entry[key])}", "magenta")
    if entry["whole_step"]:
        text.append("\nneeds a whole step", "magenta")
    if entry["repeatable"]:
        text.append("\nmay be applied more than once", "magenta")
    return text
