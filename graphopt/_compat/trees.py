"""Flattening of nested arguments and results."""

from __future__ import annotations

import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree

tree_flatten: Callable[..., tuple[list[Any], Any]] = _pytree.tree_flatten

tree_unflatten: Callable[[Sequence[Any], Any], Any] = _pytree.tree_unflatten

tree_map: Callable[..., Any] = _pytree.tree_map

tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves

ONE_VALUE = tree_flatten(None)[1]
"""The structure of a value that is no container."""


class _FlattenedDataclass:
    """The pytree container in place of a dataclass object."""

    def __init__(self, of: object) -> None:
        names = vars(of) if hasattr(of, "__dict__") else [f.name for f in dataclasses.fields(of)]  # type: ignore[arg-type]
        self.kind, self.names = type(of), tuple(names)
        self.values = [getattr(of, name) for name in self.names]


def _made_anew(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    """Rebuilds a dataclass object without calling its `__init__`."""
    kind, names = context
    new: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)
    return new


_pytree.register_pytree_node(
    _FlattenedDataclass, lambda f: (f.values, (f.kind, f.names)), _made_anew
)


class Applied:
    """A pytree container whose leaves are a function's arguments; unflattening calls the function.

    Args:
        function: equal ones have the same structure.
    """

    def __init__(self, function: Callable[..., Any], values: Sequence[Any]) -> None:
        self.function, self.values = function, list(values)


_pytree.register_pytree_node(
    Applied, lambda a: (a.values, a.function), lambda values, function: function(*values)
)


def is_applied(spec: Any) -> bool:
    """True if rebuilding a value by its pytree spec calls functions (`Applied`)."""
    return spec.type is Applied or any(map(is_applied, spec.children()))


def flatten_results(value: Any, is_kept: Callable[[object], bool]) -> tuple[list[Any], Any]:
    """`tree_flatten` that also opens dataclass objects. An object that occurs twice is a leaf the
    second time; tensor sizes are rebuilt as such.

    Args:
        is_kept: whether such an object, a list, queue or dictionary is to stay what it is, a leaf.
    """

    def is_leaf(value: Any) -> bool:
        return _is_size(value) or (isinstance(value, (list, dict, deque)) and is_kept(value))

    found: set[int] = set()

    def opened(leaf: Any) -> Any:
        if type(leaf) is torch.Size:
            return Applied(_size, leaf)
        nest = None if is_kept(leaf) or id(leaf) in found else _open_fields(leaf)
        if nest is None:
            return leaf
        found.add(id(leaf))
        inner, filled = nest
        return filled([tree_map(opened, each, is_leaf=is_leaf) for each in inner])

    return tree_flatten(tree_map(opened, value, is_leaf=is_leaf), is_leaf=is_leaf)


def _size(*numbers: int) -> torch.Size:
    return torch.Size(numbers)


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size


def result_parts(value: Any, is_kept: Callable[[object], bool]) -> Iterator[Any]:
    """A value and all objects in it that `flatten_results` would rebuild."""
    seen, pending = set[int](), [value]
    while pending:
        each = pending.pop()
        yield each
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, tuple):
            pending += each
        elif is_kept(each):
            continue
        elif isinstance(each, dict):
            pending += dict.values(each)
        elif isinstance(each, (list, deque)):
            pending += each
        else:
            nest = _open_fields(each)
            pending += [] if nest is None else nest[0]


def children_of(value: Any) -> tuple[list[Any], Any]:
    """The children of a pytree node, and its spec; a leaf is its own child."""
    return _pytree.tree_flatten(value, is_leaf=lambda child: child is not value)


_Nest = tuple[list[Any], Callable[[list[Any]], Any]]


def open_nest(value: Any) -> _Nest | None:
    """The direct children of a container or dataclass object, and a function to rebuild it; None
    for a leaf."""
    if _is_size(value):
        return list(value), lambda values: Applied(_size, values)
    inner, spec = children_of(value)
    if spec != ONE_VALUE:
        return inner, lambda values: tree_unflatten(values, spec)
    return _open_fields(value)


def _open_fields(value: Any) -> _Nest | None:
    """Splits a dataclass object into its fields; None for anything else."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    fields = _FlattenedDataclass(value)

    def filled(values: list[Any]) -> Any:
        fields.values = values
        return fields

    return fields.values, filled


_NODES = _pytree.SUPPORTED_NODES
_STRINGS = frozenset({str})


class _UncommonError(Exception):
    """A container other than a plain tuple, list or dictionary was met."""


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """A faster `tree_flatten((args, kwargs))` for plain tuples, lists and dictionaries; equal
    structures share one spec."""
    leaves: list[Any] = []
    try:
        structure = _structure((args, kwargs), leaves)
    except _UncommonError:
        return tree_flatten((args, kwargs))
    return leaves, _specification(structure)


def _structure(container: Any, leaves: list[Any]) -> tuple[Any, ...]:
    """The structure of a container: type, keys, and None or a structure for each entry; collects
    the leaves."""
    kind = type(container)
    found: list[Any]
    if kind is dict and _STRINGS.issuperset(map(type, container)):
        found, entries = [dict, tuple(container)], container.values()
    elif kind is tuple or kind is list:
        found, entries = [kind], container
    else:
        raise _UncommonError
    for entry in entries:
        if type(entry) in _NODES or isinstance(entry, tuple):  # named tuples are not registered
            found.append(_structure(entry, leaves))
        else:
            leaves.append(entry)
            found.append(None)
    return tuple(found)


@lru_cache(maxsize=256)
def _specification(structure: tuple[Any, ...]) -> Any:
    return tree_flatten(_example(structure))[1]


def _example(structure: tuple[Any, ...] | None) -> Any:
    """A container with the given structure and placeholder leaves."""
    if structure is None:
        return 0
    if structure[0] is dict:
        return dict(zip(structure[1], map(_example, structure[2:]), strict=True))
    return structure[0](map(_example, structure[1:]))


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
    paths, _ = _pytree.tree_flatten_with_path(tree_unflatten([0] * len(leaves), spec))
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
