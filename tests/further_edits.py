"""More illegal edits: arguments, reductions, state and communication that are a little wrong."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, fx

from edit_tools import (
    Edit,
    added,
    calls,
    computed,
    is_tensor,
    is_update,
    launches,
    layout,
    pick,
    plain,
    renewed,
    waits,
)
from graphopt.graph_utils import is_list_operator, is_operator, is_random, is_wait

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def detour(*targets: tuple[Any, ...], dims: int = 1) -> Edit:
    """Values that somebody reads, of so many dimensions at least, go through some calls first."""

    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        node = pick(draw, [n for n in computed(gm) if n.meta["val"].dim() >= dims])
        return None if node is None else _detoured(node, targets)

    return edit


def written_through(*targets: tuple[Any, ...]) -> Edit:
    """What is written to state goes through some calls first."""

    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        update = pick(draw, (n for n in calls(gm) if is_update(n) and is_tensor(n.args[1])))
        if update is None:
            return None
        new = update.args[1]
        for target, *args in targets:
            new = added(new, target, new, *args)
        return _reading(update, 1, new)

    return edit


def with_old(target: Any, *args: Any) -> Edit:
    """State becomes a mixture of what it was and what it would become."""

    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        updates = [n for n in calls(gm) if is_update(n) and is_tensor(n.args[1])]
        update = pick(draw, [n for n in updates if n.args[0].op == "placeholder"])
        if update is None:
            return None
        state, value = update.args
        return _reading(update, 1, added(value, target, state, value, *args))

    return edit


def _detoured(node: fx.Node, targets: Sequence[tuple[Any, ...]]) -> list[fx.Node] | None:
    users, new = list(node.users), node
    for target, *args in targets:
        new = added(new, target, new, *args)
        if not isinstance(new.meta["val"], Tensor):
            new = added(new, _first, new, 0)
    if layout(new.meta["val"]) != layout(node.meta["val"]):
        return None
    for user in users:
        user.replace_input_with(node, new)
    return [node, new]


_first = operator.getitem


def _reading(node: fx.Node, index: int, new: fx.Node) -> list[fx.Node] | None:
    old = node.args[index]
    if not isinstance(old, fx.Node) or layout(old.meta["val"]) != layout(new.meta["val"]):
        return None
    node.update_arg(index, new)
    return [node, new]


def arguments_exchanged(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Two arguments of one kind of a call with several."""
    found = []
    for node in plain(gm):
        places = [i for i, a in enumerate(node.args) if is_tensor(a, floating=False)]
        found += [
            (node, i, j)
            for i in places
            for j in places
            if i < j
            and node.args[i] is not node.args[j]
            and layout(node.args[i].meta["val"]) == layout(node.args[j].meta["val"])
            and not is_operator(node.target, "aten::add", "aten::mul")
        ]
    chosen = pick(draw, found)
    if chosen is None:
        return None
    node, i, j = chosen
    first, second = node.args[i], node.args[j]
    node.update_arg(i, second)
    node.update_arg(j, first)
    return [node]


def columns_exchanged(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Whole lists of a list operator, such as both moments of Adam."""
    return _with_columns(gm, draw, lambda lists: (lists[1], lists[0]))


def column_rotated(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """One list of a list operator stands one entry further."""
    return _with_columns(gm, draw, lambda lists: ([*lists[0][1:], lists[0][0]], lists[1]))


def _with_columns(
    gm: fx.GraphModule, draw: Random, change: Callable[[list[Any]], tuple[Any, Any]]
) -> list[fx.Node] | None:
    found = []
    for node in calls(gm):
        if not is_list_operator(node):
            continue
        lists = [i for i, a in enumerate(node.args) if isinstance(a, (list, tuple)) and len(a) > 1]
        found += [(node, i, j) for i in lists for j in lists if i < j]
    chosen = pick(draw, found)
    if chosen is None:
        return None
    node, i, j = chosen
    first, second = change([list(node.args[i]), list(node.args[j])])
    node.update_arg(i, first)
    node.update_arg(j, second)
    return [node]


def tensor_dropped(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """An optional tensor is not given: the weight of a norm, a bias."""
    found = []
    for node in plain(gm):
        schema = getattr(node.target, "_schema", None)
        for index, value in enumerate(node.args if schema is not None else ()):
            kind = str(schema.arguments[index].type)
            if isinstance(value, fx.Node) and kind == "Optional[Tensor]":
                found.append((node, index))
    chosen = pick(draw, found)
    if chosen is None:
        return None
    node, index = chosen
    node.update_arg(index, None)
    renewed(node)
    return [node]


def list_changed(kind: type) -> Edit:
    """A list of numbers or flags: strides, padding, dimensions, masks of outputs."""

    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        found = [
            (node, i)
            for node in plain(gm)
            for i, a in enumerate(node.args)
            if isinstance(a, (list, tuple)) and a and all(type(e) is kind for e in a)
        ]
        chosen = pick(draw, found)
        if chosen is None:
            return None
        node, index = chosen
        values = list(node.args[index])
        at = draw.randrange(len(values))
        values[at] = not values[at] if kind is bool else values[at] + draw.choice([1, -1])
        node.update_arg(index, values)
        renewed(node)
        return [node]

    return edit


def text_changed(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """An option that is text, such as the approximation of gelu."""
    others = {"none": "tanh", "tanh": "none", "floor": "trunc", "trunc": "floor"}
    places = [
        (node, name, value)
        for node in plain(gm)
        for name, value in [*enumerate(node.args), *node.kwargs.items()]
        if isinstance(value, str) and value in others
    ]
    chosen = pick(draw, places)
    if chosen is None:
        return None
    node, name, value = chosen
    if isinstance(name, int):
        node.update_arg(name, others[value])
    else:
        node.update_kwarg(name, others[value])
    return [node]


def called_instead(names: dict[str, Any]) -> Edit:
    """Another operator with the same arguments."""

    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        node = pick(draw, [n for n in plain(gm) if str(n.target) in names])
        if node is None:
            return None
        node.target = names[str(node.target)]
        renewed(node)
        return [node]

    return edit


def order_of_parts(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """What is joined stands in the other order."""
    joined = [n for n in calls(gm, "aten::cat", "aten::stack") if len(n.args[0]) > 1]
    node = pick(draw, joined)
    if node is None:
        return None
    node.update_arg(0, list(reversed(node.args[0])))
    renewed(node)
    return [node]


def drawn_once(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Who reads one draw reads another one of its kind."""
    drawn = [n for n in calls(gm) if is_random(n) and n.users]
    pairs = [
        (a, b)
        for i, a in enumerate(drawn)
        for b in drawn[i + 1 :]
        if layout(a.meta["val"]) == layout(b.meta["val"])
    ]
    chosen = pick(draw, pairs)
    if chosen is None:
        return None
    first, second = chosen
    second.replace_all_uses_with(first)
    return [first, second]


def unshared_buffer(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A value of this rank in place of the one that was sent to all."""
    found = [
        (wait, node.args[0])
        for node in launches(gm)
        for wait in node.users
        if is_wait(wait) and wait.users and is_tensor(node.args[0])
    ]
    chosen = pick(draw, found)
    if chosen is None:
        return None
    wait, source = chosen
    user = draw.choice(list(wait.users))
    user.replace_input_with(wait, source)
    return [wait, user]


def partly_old(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """The last row of a piece of state keeps what it was."""
    updates = [n for n in calls(gm) if is_update(n) and is_tensor(n.args[1])]
    found = [n for n in updates if n.args[0].op == "placeholder" and n.args[1].meta["val"].dim()]
    update = pick(draw, [n for n in found if n.args[1].meta["val"].shape[0] > 1])
    if update is None:
        return None
    state, value = update.args
    rows = value.meta["val"].shape[0]
    new = added(value, aten.slice.Tensor, value, 0, 0, rows - 1)
    old = added(new, aten.slice.Tensor, state, 0, rows - 1, rows)
    return _reading(update, 1, added(old, aten.cat.default, [new, old]))


def waited_twice(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """What was received is sent again, and divided."""
    wait = pick(draw, waits(gm))
    if wait is None or len(wait.args[0].args) < 3:
        return None
    launch, users = wait.args[0], list(wait.users)
    half = added(wait, aten.mul.Tensor, wait, 0.5)
    again = added(half, launch.target, half, *launch.args[1:])
    new = added(again, wait.target, again)
    for user in users:
        user.replace_input_with(wait, new)
    return [wait, new]


FURTHER: dict[str, Edit] = {
    "arguments of one kind exchanged": arguments_exchanged,
    "lists exchanged": columns_exchanged,
    "a list rotated": column_rotated,
    "a tensor not given": tensor_dropped,
    "a list of integers changed": list_changed(int),
    "a list of flags changed": list_changed(bool),
    "a text changed": text_changed,
    "an extremum for a sum": called_instead(
        {"aten.sum.dim_IntList": aten.amax.default, "aten.mean.dim": aten.amin.default}
    ),
    "a mean for a sum": called_instead(
        {
            "aten.sum.dim_IntList": aten.mean.dim,
            "aten.mean.dim": aten.sum.dim_IntList,
            "aten.rsqrt.default": aten.sqrt.default,
            "aten.sqrt.default": aten.rsqrt.default,
            "aten.tanh.default": aten.sin.default,
            "aten.sigmoid.default": aten.tanh.default,
            "aten.exp.default": aten.exp2.default,
            "aten.log.default": aten.log2.default,
        }
    ),
    "parts in the other order": order_of_parts,
    "one draw for two": drawn_once,
    "a value that was not sent": unshared_buffer,
    "the last row of state kept": partly_old,
    "sent again": waited_twice,
    "state that lags": with_old(aten.lerp.Scalar, 0.999),
    "state at most as large": with_old(aten.minimum.default),
    "state added up": with_old(aten.add.Tensor),
    "state a little larger": written_through((aten.mul.Tensor, 1.0 + 2**-20)),
    "state clamped far away": written_through((aten.clamp.default, -0.05, 0.05)),
    "state with a diagonal shifted": written_through((aten.roll.default, [1])),
    "a triangle of a value": detour((aten.tril.default,), dims=2),
    "a value sorted": detour((aten.sort.default,)),
    "a cumulative sum": detour((aten.cumsum.default, 0)),
    "a value rolled by one": detour((aten.roll.default, [1])),
    "a value turned around": detour((aten.rot90.default, 2), dims=2),
    "a value through its logarithm": detour((aten.abs.default,), (aten.log1p.default,)),
    "a value up to its sign": detour((aten.neg.default,), (aten.sin.default,), (aten.neg.default,)),
    "a value with its maximum out": detour((aten.clamp_max.default, 0.3)),
    "a value made smaller twice": detour((aten.mul.Tensor, 0.5), (aten.mul.Tensor, 1.9999999)),
    "a value with noise": detour((aten.bernoulli.p, 0.999)),
    "a value truncated": detour((aten.trunc.default,)),
    "a value with its fraction only": detour((aten.frac.default,)),
}
