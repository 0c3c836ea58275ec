"""What an operator does to dependencies, read from its schema once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import COLLECTIVE_NAMESPACE, WAITS, is_pointwise

_SAME_ELEMENTS = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy",
        "_unsafe_view",
        "alias",
        "clone",
        "detach",
        "flatten",
        "reshape",
        "squeeze",
        "unflatten",
        "unsqueeze",
        "view",
    )
)
"""Operators whose result has the elements of the first argument in the same row-major order."""

_SPLITS = frozenset(
    f"aten::{name}"
    for name in ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")
) | {"aten::unsafe_split_with_sizes", "aten::split_with_sizes_copy"}

_ELEMENT_COLLECTIVES = ("all_reduce", "broadcast")
"""Collectives whose element number i depends on element number i of what is sent."""


@dataclass(frozen=True)
class Traits:
    """What is known of a target.

    Attributes:
        view: the result may share storage with the first argument.
        item: it picks one of several results.
        writes: an argument is updated in place.
        copies: it is `copy_`, which does not read what it overwrites.
        random: it draws random numbers, or reads or writes the state of a generator.
        wait, collective: it ends or launches a collective.
        reduction: of a collective: its name without the marks of variants, such as "all_reduce".
        listed: a list of independent operations, one for each element of its list arguments.
        elements: how the elements of a concatenation go through it: "cat", "same", "split",
            "slice", "pointwise", or "" where they mix.
    """

    view: bool = False
    item: bool = False
    writes: bool = False
    copies: bool = False
    random: bool = False
    wait: bool = False
    collective: bool = False
    reduction: str = ""
    listed: bool = False
    elements: str = ""


_PLAIN = Traits()
_GETITEM = Traits(view=True, item=True)


def traits_of(node: fx.Node) -> Traits:
    """What is known of the target of a node."""
    if node.op != "call_function":
        return _PLAIN
    return _traits(node.target)


@lru_cache(maxsize=4096)
def _traits(target: Callable[..., Any]) -> Traits:
    if target is operator.getitem:
        return _GETITEM
    if not isinstance(target, _compat.OpOverload):
        return _PLAIN
    schema = target._schema
    name = schema.name
    wait = name in WAITS
    collective = target.namespace == COLLECTIVE_NAMESPACE and not wait
    reduction = ""
    if collective:
        reduction = name.split("::")[1].removesuffix("_").removesuffix("_coalesced")
    return Traits(
        view=any(result.alias_info is not None for result in schema.returns),
        writes=schema.is_mutable,
        copies=name == "aten::copy_",
        random=torch.Tag.nondeterministic_seeded in target.tags or target.namespace == "graphopt",
        wait=wait,
        collective=collective,
        reduction=reduction,
        listed=_is_listed(schema, collective),
        elements=_elements(target, name, wait, reduction),
    )


def _is_listed(schema: Any, collective: bool) -> bool:
    """List operators are known by their first argument, a list of tensors, and by their family:
    `cat` takes a list as well, and an operator like `_fused_rms_norm` does not."""
    if not schema.arguments or str(schema.arguments[0].type) != "List[Tensor]":
        return False
    return collective or schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


def _elements(target: Callable[..., Any], name: str, wait: bool, reduction: str) -> str:
    if name == "aten::cat":
        return "cat"
    if wait or name in _SAME_ELEMENTS:
        return "same"
    if name in _SPLITS:
        return "split"
    if name == "aten::slice":
        return "slice"
    if is_pointwise(target) or reduction in _ELEMENT_COLLECTIVES:
        return "pointwise"
    return ""
