"""Checks of each traced node before it is functionalized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import CaptureError, GraphOptError
from graphopt.graph_utils import is_operator, same_kind, written
from graphopt.ir.entries import list_call
from graphopt.ir.metadata import known_value, source_line
from graphopt.ir.operators import operator_of
from graphopt.ir.views import viewed
from graphopt.ir.writing_operators import form_of
from graphopt.tracing.functional.overlapping import refuse_overlapping
from graphopt.tracing.layouts.parts_of_storage import overlap

aten = torch.ops.aten


@contextmanager
def explained_at(node: fx.Node) -> Iterator[None]:
    """A context in which an operator that torch cannot functionalize is refused with its source
    line."""
    try:
        yield
    except GraphOptError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n", 1)[0]
        raise CaptureError(
            f"torch cannot write {node.target} without changing its argument: {first}",
            location=source_line(node),
            hint="use the operator that returns a new tensor",
        ) from error


def refuse_unusual_writes(node: fx.Node) -> None:
    """Refuses in-place operators that no copy into an input can represent.

    One is a change of an argument's own shape or strides. Another is writing to an expanded
    tensor, some elements of which are one in memory, or to a part of one: eager refuses most such
    operators, lets the order of its kernel decide in the others, and what stands for the write in
    a graph rounds. So is writing to what is read elsewhere, see `overlapping`, and through what
    `unfold` gives: torch's functionalization loses what lies between the windows. Another one is a
    list operator of which one entry reads or writes what another one writes, such as a weight that
    is given twice.
    """
    if _is_view_in_place(node.target):
        _refuse_reshaped_input(node)
        return
    _refuse_entries_in_order(node)
    if form_of(node.target) is not None:
        _refuse_given_twice(node)
    for target in written(node):
        through = list(viewed(target))
        if any(is_expanded(known_value(each)) for each in through):
            raise expanded_write(node)
        if any(is_operator(each.target, "aten::unfold") for each in through):
            raise CaptureError(
                f"it writes through what unfold gives ({node.target}), which torch makes zeros of"
                " the elements between the windows",
                location=source_line(node),
                hint="write to the tensor itself, by an index, or through as_strided",
            )
    refuse_overlapping(node)


def expanded_write(node: fx.Node) -> CaptureError:
    """Returns the error for a step in which `node` writes to a tensor whose elements share
    memory."""
    return CaptureError(
        f"it writes to an expanded tensor, elements of which share memory ({node.target})",
        location=source_line(node),
        hint="write to a copy: tensor.clone()",
    )


def _refuse_entries_in_order(node: fx.Node) -> None:
    """Refuses a list operator whose entries read what its other entries write."""
    call = list_call(node) if operator_of(node).writes else None
    if call is None:
        return
    places: defaultdict[int, list[tuple[torch.Tensor, int, bool]]] = defaultdict(list)
    for item in range(call.count):
        changed = set(call.writes(item))
        for source, at in call.reads(item):
            value = known_value(source) if at is None else known_value(source)[at]
            if isinstance(value, torch.Tensor) and value.numel():
                there = places[_compat.storage_key(value)]
                there.append((value, item, source in changed))
    for there in places.values():
        for (one, item, changes), (other, of_other, other_changes) in combinations(there, 2):
            if item != of_other and (changes or other_changes) and overlap(one, other):
                raise CaptureError(
                    f"{node.target} changes a tensor that stands in its lists twice",
                    location=source_line(node),
                    hint="let it stand there once: each parameter with a gradient of its own"
                    " (gradient.clone()), and once in its optimizer; or go from tensor to tensor:"
                    " foreach=False, which optimizers and clip_grad_norm_ take",
                )


def _refuse_given_twice(node: fx.Node) -> None:
    """Refuses a custom operator that writes to memory which another argument shares, since the
    order of its kernel's accesses is unknown."""
    given = [each for each in _compat.tree_leaves((node.args, node.kwargs)) if _is_strided(each)]
    for target in filter(_is_strided, written(node)):
        changed = known_value(target)
        others = [known_value(each) for each in given if each is not target]
        shown = (o for o in others if _compat.storage_key(o) == _compat.storage_key(changed))
        if given.count(target) > 1 or any(overlap(changed, other) for other in shown):
            raise CaptureError(
                f"{node.target} writes to a tensor that it is given a second time",
                location=source_line(node),
                hint="give it a copy in the other place: tensor.clone()",
            )


def _is_strided(node: Any) -> bool:
    value = known_value(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


_RESHAPING = ("aten::resize_", "aten::resize_as_", "aten::set_")


def _is_view_in_place(target: Any) -> bool:
    if not isinstance(target, _compat.OpOverload):
        return False
    return torch.Tag.inplace_view in target.tags or is_operator(target, *_RESHAPING)


def _refuse_reshaped_input(node: fx.Node) -> None:
    source = node.args[0]
    if isinstance(source, fx.Node) and source.op == "placeholder" and not same_kind(source, node):
        raise CaptureError(
            f"it changes the shape or strides of an input in place ({node.target})",
            location=source_line(node),
            hint="use the operator that returns a view, such as x.t() in place of x.t_()",
        )


def is_expanded(tensor: Any) -> bool:
    """True if a value is a tensor with several elements at one address."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    if not tensor.numel():
        return False
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def keep_strides(wrapper: Any, traced: Any) -> None:
    """Gives a value the strides that it has in the trace, which are eager's.

    What functionalization makes of a tensor that was written to may be dense where the tensor has
    gaps, or contiguous where it is transposed. Kernels that go through memory then round otherwise
    (vectorized `sigmoid`, `exp`, …), draw other random numbers, and give other strides themselves.
    """
    value = _compat.from_functional(wrapper)
    if not has_strides_of(value, traced):
        _compat.replace_functional_value(wrapper, with_strides(value, traced))


def has_strides_of(value: Any, traced: Any) -> bool:
    """True if a value has the traced strides, or its strides do not matter."""
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return True
    return is_expanded(traced) or bool(value.stride() == traced.stride())


def with_strides(value: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """Copies a value to the traced memory layout."""
    strided = aten.new_empty_strided.default(value, list(traced.shape), list(traced.stride()))
    copy: torch.Tensor = aten.copy.default(strided, value)
    return copy
