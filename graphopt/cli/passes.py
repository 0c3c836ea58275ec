"""`graphopt passes`, which lists all passes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from graphopt.cli.options import Imports

if TYPE_CHECKING:
    from graphopt.manager import Pass

EXAMPLES = """
Examples:

    graphopt passes

    graphopt passes --json

    graphopt passes --import my_passes.py
"""


def passes(
    modules: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List all passes: what each does, its options, what it needs, whether it keeps all bits."""
    from graphopt.commands.errors import reported
    from graphopt.commands.imports import import_passes
    from graphopt.manager import default_registry, discovery

    discovery.install()
    registry = default_registry()
    with reported("passes"):
        import_passes(modules or [])
        known = [_described(registry.get(name)) for name in registry.names()]
    if as_json:
        print(json.dumps(known, indent=2))
        return
    table = Table(box=None, padding=(0, 2, 1, 0))
    table.add_column("pass", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    table.add_column("numerics", no_wrap=True)
    for entry in known:
        numerics = "changes" if entry["changes_numerics"] else "same bits"
        table.add_row(escape(entry["name"]), _description(entry), numerics)
    Console().print(table)


def _described(pass_: Pass) -> dict[str, Any]:
    """Returns a pass as a JSON object; an option without a default has none there."""
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
