"""Nested arguments and results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree

tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _pytree.tree_flatten

tree_unflatten: Callable[[Sequence[Any], Any], Any] = _pytree.tree_unflatten

tree_map: Callable[..., Any] = _pytree.tree_map

tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves


def leaf_names(fn: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> list[str]:
    """A name for each leaf of `(args, kwargs)`, after the parameter names of `fn`."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    paths, _ = _pytree.tree_flatten_with_path(tree_unflatten(leaves, spec))
    names = []
    for path, _ in paths:
        entries: tuple[Any, ...] = path
        top, first, *tail = entries
        if top.idx == 1:
            head = first.key
        elif first.idx < len(positional):
            head = positional[first.idx]
        else:
            head = f"{rest}[{first.idx - len(positional)}]"
        names.append(head + _pytree.keystr(tuple(tail)))
    return names
