"""Result metadata of list operators, computed entry by entry.

The metadata of an entry does not depend on the others, so a list of a thousand tensors of three
kinds takes three evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from graphopt.ir.entries import list_positions
from graphopt.ir.metadata import fake_value, known_value
from graphopt.verify.values.call_terms import named, parameters

Evaluated = Callable[[Any, dict[str, Any], dict[str, Any]], Iterator[Any]]
"""(operator, arguments of all entries by name, lists by name) -> result metadata of each entry."""


def entries_of(node: fx.Node, evaluated: Evaluated) -> Iterator[tuple[Any, Any]]:
    """Yields, for each entry of a functional list operator, the metadata as recorded and as
    computed. Ends where there is no metadata or no shape rule."""
    says = known_value(node)
    if not says:
        return
    values = fx.node.map_arg((node.args, node.kwargs), _value)
    arguments = named(node.target, *values)
    known = [name for name, _ in parameters(node.target)]
    names = [known[position] for position in list_positions(node.target)]
    names = [name for name in names if isinstance(arguments[name], (list, tuple))]
    lists = {name: arguments[name] for name in names if len(arguments[name])}
    columns = says if isinstance(says[0], (list, tuple)) else [says]
    shared = {name: value for name, value in arguments.items() if name not in lists}
    rows = evaluated(node.target, shared, lists)
    for index in range(min(map(len, lists.values()), default=0)):
        try:
            gives = next(rows)
        except Exception:  # there is no rule, or none for such numbers
            return
        yield [tensor for column in columns for tensor in column[index : index + 1]], gives


def _value(node: fx.Node) -> Any:
    """Returns a node's metadata, with 1 in place of numbers that the graph computes."""
    return _plain(fake_value(node))


def _plain(value: Any) -> Any:
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return 1.0 if isinstance(value, torch.SymFloat) else 1
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
