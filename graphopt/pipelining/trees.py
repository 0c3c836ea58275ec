"""Nested values: their containers, level by level, and readable names of their leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphopt import _compat
from graphopt._compat.trees import children_of
from graphopt.pipelining.microbatch.block_masks import is_block_mask

Key = str | int
Path = tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class Container:
    """One level of a nested value: its children by key, and a function to rebuild it."""

    children: Mapping[Key, Any]
    build: Callable[[Sequence[Any]], Any]


def open_container(value: Any) -> Container | None:
    """The children of `value`, or None if it is a leaf.

    Containers are what pytrees know (tuples, named tuples, lists, mappings, registered classes) and
    dataclass instances. A `BlockMask` is a leaf, though it can be registered.
    """
    if is_block_mask(value):
        return None
    children, spec = children_of(value)
    if len(children) == 1 and children[0] is value:
        return _open_dataclass(value)
    by_key = dict(zip(_keys(value, len(children)), children, strict=True))
    return Container(by_key, lambda new: _compat.tree_unflatten(list(new), spec))


def leaves(value: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> dict[Path, Any]:
    """The leaves of a nested value by path, in order."""
    container = None if is_leaf(value) else open_container(value)
    if container is None:
        return {(): value}
    return {
        (key, *path): leaf
        for key, child in container.children.items()
        for path, leaf in leaves(child, is_leaf).items()
    }


def rebuild(value: Any, new_leaves: Mapping[Path, Any], path: Path = ()) -> Any:
    """A nested value of the structure of `value` with other leaves."""
    if path in new_leaves:
        return new_leaves[path]
    container = open_container(value)
    assert container is not None
    children = container.children.items()
    return container.build([rebuild(child, new_leaves, (*path, key)) for key, child in children])


def path_name(root: str, path: Path) -> str:
    """A path written as Python code: `batch['mask'][0]`."""
    return root + "".join(f"[{key!r}]" for key in path)


def _keys(value: Any, count: int) -> tuple[Key, ...]:
    if isinstance(value, Mapping) and len(value) == count:
        return tuple(value)
    return tuple(getattr(value, "_fields", range(count)))


def _open_dataclass(value: Any) -> Container | None:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    names = tuple(field.name for field in dataclasses.fields(value) if field.init)

    def build(new: Sequence[Any]) -> Any:
        # Not `replace`, which would run __post_init__ again.
        result = copy.copy(value)
        for name, child in zip(names, new, strict=True):
            object.__setattr__(result, name, child)
        return result

    return Container({name: getattr(value, name) for name in names}, build)
