"""Illegal edits that are nearly legal: of one bit, one flag, one of two things that are alike."""

from __future__ import annotations

import math
import operator
from random import Random
from typing import Any

import torch
from torch import fx

from edit_tools import (
    Edit,
    added,
    aten,
    c10d,
    calls,
    computed,
    is_tensor,
    launches,
    layout,
    pick,
    plain,
    put_after,
    renewed,
    replaced,
    waits,
    with_arg,
)
from graphopt.graph_utils import get_outputs, is_operator, same_kind, set_outputs
from graphopt.iter_graph import IterGraph

Nodes = list[fx.Node] | None


def _numbers(gm: fx.GraphModule, kind: type) -> list[tuple[fx.Node, Any]]:
    """Calls with a plain number, and where it stands: an index or a name."""
    found: list[tuple[fx.Node, Any]] = []
    for node in calls(gm):
        if node.target is operator.getitem:
            continue
        found += [(node, i) for i, value in enumerate(node.args) if type(value) is kind]
        found += [(node, k) for k, value in node.kwargs.items() if type(value) is kind]
    return found


def number_changed(kind: type, change: Any) -> Edit:
    """One number is made another."""

    def edit(gm: fx.GraphModule, draw: Random) -> Nodes:
        found = []
        for node, place in _numbers(gm, kind):
            value = (node.args if isinstance(place, int) else node.kwargs)[place]
            new = change(value)
            if repr(new) != repr(value):
                found.append((node, place, new))
        chosen = pick(draw, found)
        if chosen is None:
            return None
        node, place, new = chosen
        if isinstance(place, int):
            with_arg(node, place, new)
        else:
            node.update_kwarg(place, new)
        return [node]

    return edit


def scalar_made_float(gm: fx.GraphModule, draw: Random) -> Nodes:
    numbers = ("aten::add", "aten::mul", "aten::sub", "aten::pow", "aten::full", "aten::fill")
    found = [(n, i) for n, i in _numbers(gm, int) if is_operator(n.target, *numbers)]
    found = [(node, index) for node, index in found if type(index) is int]
    chosen = pick(draw, found)
    if chosen is None:
        return None
    node, index = chosen
    with_arg(node, index, float(node.args[index]))
    return [node]


def betas_swapped(gm: fx.GraphModule, draw: Random) -> Nodes:
    node = pick(draw, (n for n in calls(gm) if "beta1" in n.kwargs))
    if node is None:
        return None
    one, other = node.kwargs["beta1"], node.kwargs["beta2"]
    node.kwargs = {**node.kwargs, "beta1": other, "beta2": one}
    return [node]


def rates_exchanged(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Two hyperparameters of one kind."""
    rates = [n for n in gm.graph.nodes if n.meta.get("kind") == "hyperparameter" and n.users]
    one = pick(draw, rates)
    other = pick(draw, (n for n in rates if n is not one and same_kind(n, one)))
    if other is None:
        return None
    first, second = list(one.users), list(other.users)
    for users, old, new in ((first, one, other), (second, other, one)):
        for user in users:
            user.args = tuple(replaced(list(user.args), old, new))
    return [one, other, *first, *second]


def waits_exchanged(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Two waits end one another's collectives."""
    one = pick(draw, waits(gm))
    alike = [] if one is None else [w for w in waits(gm) if w is not one and same_kind(w, one)]
    other = pick(draw, alike)
    if other is None:
        return None
    first, second = one.args[0], other.args[0]
    early, late = min(one, other), max(first, second)
    if early < late:
        for node in (one, other):
            if node < late:
                return None
    with_arg(one, 0, second)
    with_arg(other, 0, first)
    return [one, other, first, second]


def sent_exchanged(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Two collectives send what the other one should."""
    found = launches(gm)
    one = pick(draw, found)
    alike = [n for n in found if n is not one and same_kind(n, one) and n.args[1:] == one.args[1:]]
    other = pick(draw, alike)
    if other is None:
        return None
    first, second = sorted((one, other))
    if second.args[0] > first:
        if min(first.users) < second.args[0]:
            return None
        second.args[0].append(first)
    a, b = first.args[0], second.args[0]
    with_arg(first, 0, b)
    with_arg(second, 0, a)
    return [first, second, a, b]


def parts_exchanged(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Two items of one list that are of the same kind, so that all metadata stays true."""
    node = pick(draw, (n for n in calls(gm) if n.target is operator.getitem and is_tensor(n)))
    if node is None:
        return None
    alike = [u for u in node.args[0].users if u is not node and u.args[1] != node.args[1]]
    other = pick(draw, (u for u in alike if layout(u.meta["val"]) == layout(node.meta["val"])))
    if other is None:
        return None
    one, two = node.args[1], other.args[1]
    with_arg(node, 1, two)
    with_arg(other, 1, one)
    return [node, other]


def softmax_elsewhere(gm: fx.GraphModule, draw: Random) -> Nodes:
    names = ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
    node = pick(draw, calls(gm, *(f"aten::{name}" for name in names)))
    place = None if node is None else next(i for i, v in enumerate(node.args) if type(v) is int)
    if node is None or place is None or node.meta["val"].dim() < 2:
        return None
    with_arg(node, place, node.args[place] % node.meta["val"].dim() - 1)
    renewed(node)
    return [node]


def momentum_changed(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Of a statistic: results are the same, the buffers are not."""
    names = ("_native_batch_norm_legit_functional", "native_batch_norm", "cudnn_batch_norm")
    node = pick(draw, calls(gm, *(f"aten::{name}" for name in names)))
    if node is None:
        return None
    places = [i for i, value in enumerate(node.args) if type(value) is float]
    with_arg(node, places[0], node.args[places[0]] * 0.5)
    return [node]


def uninitialised(gm: fx.GraphModule, draw: Random) -> Nodes:
    node = pick(draw, calls(gm, "aten::zeros_like", "aten::ones_like"))
    if node is None:
        return None
    node.target = aten.empty_like.default
    return [node]


def updated_by_itself(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A state is copied into itself."""
    update = pick(draw, get_outputs(gm.graph).updates)
    if update is None or not is_operator(update.target, "aten::copy_"):
        return None
    old = update.args[1]
    with_arg(update, 1, update.args[0])
    return [update, old]


def updated_twice(gm: fx.GraphModule, draw: Random) -> Nodes:
    """What makes a new state of an old one is done once more with the new one."""
    updates = [u for u in get_outputs(gm.graph).updates if is_operator(u.target, "aten::copy_")]
    found = [u for u in updates if u.args[0] in u.args[1].all_input_nodes and is_tensor(u.args[1])]
    update = pick(draw, (u for u in found if u.args[1].op == "call_function"))
    if update is None:
        return None
    state, value = update.args
    again = added(
        value, value.target, *replaced(list(value.args), state, value), **dict(value.kwargs)
    )
    with_arg(update, 1, again)
    return [update, again]


def in_double(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A product or sum is computed in float64 and rounded."""
    names = ("mm", "addmm", "bmm", "sum", "mean")
    node = pick(draw, (n for n in calls(gm, *(f"aten::{x}" for x in names)) if is_tensor(n)))
    if node is None or not all(map(is_tensor, node.all_input_nodes)):
        return None
    dtype, args = node.meta["val"].dtype, list(node.args)
    for source in dict.fromkeys(node.all_input_nodes):
        wide = added(source, aten._to_copy.default, source, dtype=torch.float64)
        args = replaced(args, source, wide)
    node.args = tuple(args)
    renewed(node)
    return [node, put_after(node, aten._to_copy.default, dtype=dtype)]


def summed_backwards(gm: fx.GraphModule, draw: Random) -> Nodes:
    node = pick(draw, calls(gm, "aten::sum", "aten::mean"))
    if node is None or node.args[0].meta["val"].numel() < 2:
        return None
    source = node.args[0]
    dims = list(range(source.meta["val"].dim()))
    new = added(source, aten.flip.default, source, dims)
    if isinstance(gm.graph, IterGraph) and gm.graph.is_late(node) and not gm.graph.is_late(new):
        gm.graph.mark_late(new, gm.graph.late[node])
    with_arg(node, 0, new)
    return [node, new]


def half_reduced(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Only the first element of what was reduced is taken from there."""
    node = pick(
        draw, (n for n in waits(gm) if n.meta["val"].dim() == 1 and n.meta["val"].numel() > 1)
    )
    if node is None or not is_operator(node.args[0].target, "_c10d_functional::all_reduce"):
        return None
    users, sent = list(node.users), node.args[0].args[0]
    head = added(node, aten.slice.Tensor, node, 0, 0, 1)
    tail = added(head, aten.slice.Tensor, sent, 0, 1, node.meta["val"].numel())
    new = added(tail, aten.cat.default, [head, tail])
    for user in users:
        user.replace_input_with(node, new)
    return [new, node, head, tail]


def another_group(gm: fx.GraphModule, draw: Random) -> Nodes:
    node = pick(draw, launches(gm))
    if node is None:
        return None
    with_arg(node, len(node.args) - 1, "some_other_group")
    return [node]


def one_element(gm: fx.GraphModule, draw: Random) -> Nodes:
    """The first element, or row, of a value is another one's."""
    node = pick(
        draw, (n for n in computed(gm) if n.meta["val"].dim() and n.meta["val"].shape[0] > 1)
    )
    if node is None:
        return None
    users = list(node.users)
    row = added(node, aten.select.int, node, 0, 1)
    new = added(row, aten.select_scatter.default, node, row, 0, 0)
    for user in users:
        user.replace_input_with(node, new)
    return [new, node, row]


def strides_swapped(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A square is read as its transpose, by its storage."""
    squares = [n for n in computed(gm) if _is_square(n.meta["val"])]
    node = pick(draw, squares)
    if node is None:
        return None
    size = list(node.meta["val"].shape)
    return [put_after(node, aten.as_strided.default, size, [1, size[0]], 0)]


def _is_square(value: torch.Tensor) -> bool:
    return value.dim() == 2 and value.shape[0] == value.shape[1] > 1 and value.is_contiguous()


def laid_out_otherwise(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A result lies in memory otherwise; its elements are the same."""
    outputs = get_outputs(gm.graph)
    node = pick(draw, (n for n in outputs.results if is_tensor(n) and n.meta["val"].dim() > 1))
    if node is None:
        return None
    order = list(reversed(range(node.meta["val"].dim())))
    turned = added(node, aten.permute.default, node, order)
    copied = added(turned, aten.clone.default, turned, memory_format=torch.contiguous_format)
    new = added(copied, aten.permute.default, copied, order)
    outputs.results[outputs.results.index(node)] = new
    set_outputs(gm.graph, outputs)
    return [new, node]


def turned_over(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A mask is inverted."""
    masks = [n for n in plain(gm) if is_tensor(n, False) and n.meta["val"].dtype is torch.bool]
    node = pick(draw, masks)
    return None if node is None else [put_after(node, aten.logical_not.default)]


def after_any(target: Any, *args: Any) -> Edit:
    def edit(gm: fx.GraphModule, draw: Random) -> Nodes:
        node = pick(draw, computed(gm))
        return None if node is None else [put_after(node, target, *args)]

    return edit


def reduced_by_one_rank(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A sum over ranks becomes what one rank has."""
    node = pick(draw, calls(gm, "_c10d_functional::all_reduce"))
    if node is None:
        return None
    node.target, node.args = c10d.broadcast.default, (node.args[0], 0, node.args[-1])
    return [node]


NARROW: dict[str, Edit] = {
    "the last bit of a number": number_changed(float, lambda x: math.nextafter(x, math.inf)),
    "the sign of a zero": number_changed(float, lambda x: -x if x == 0 else x),
    "a number rounded to float32": number_changed(float, lambda x: float(torch.tensor(x))),
    "a flag as a number": number_changed(bool, float),
    "an integer made float": scalar_made_float,
    "betas swapped": betas_swapped,
    "rates exchanged": rates_exchanged,
    "waits exchanged": waits_exchanged,
    "what is sent exchanged": sent_exchanged,
    "parts of one kind exchanged": parts_exchanged,
    "softmax over another dimension": softmax_elsewhere,
    "momentum of a statistic": momentum_changed,
    "zeros left uninitialised": uninitialised,
    "a state copied into itself": updated_by_itself,
    "an update done twice": updated_twice,
    "computed in float64": in_double,
    "summed backwards": summed_backwards,
    "reduced in part": half_reduced,
    "another group": another_group,
    "one rank's gradient": reduced_by_one_rank,
    "one element exchanged": one_element,
    "strides swapped": strides_swapped,
    "a result laid out otherwise": laid_out_otherwise,
    "a mask inverted": turned_over,
    "zero added": after_any(aten.add.Tensor, 0.0),
    "what is no number made one": after_any(aten.nan_to_num.default),
}
