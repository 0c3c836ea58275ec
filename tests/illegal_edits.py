"""Edits after which a step computes something else: what a wrong pass may do."""

from __future__ import annotations

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
    is_update,
    launches,
    layout,
    others,
    pick,
    plain,
    put_after,
    renewed,
    replaced,
    waits,
    with_arg,
)
from further_edits import FURTHER
from graphopt.graph_utils import (
    get_output,
    get_outputs,
    is_list_operator,
    is_operator,
    is_random,
    same_kind,
    set_outputs,
    written,
)
from hidden_edits import HIDDEN
from narrow_edits import NARROW


def after_gradient(target: Any, *args: Any) -> Edit:
    """Something more is done to a reduced gradient."""

    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        node = pick(draw, waits(gm))
        return None if node is None else [put_after(node, target, *args)]

    return edit


def after_any(target: Any, *args: Any) -> Edit:
    """Something more is done to a value."""

    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        node = pick(draw, computed(gm))
        return None if node is None else [put_after(node, target, *args)]

    return edit


def before_launch(target: Any, *args: Any) -> Edit:
    """Something more is done to what is sent."""

    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        node = pick(draw, launches(gm))
        if node is None:
            return None
        new = added(node.args[0], target, node.args[0], *args)
        with_arg(node, 0, new)
        return [new, node]

    return edit


def rounded(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, computed(gm))
    if node is None:
        return None
    new = put_after(node, aten._to_copy.default, dtype=torch.bfloat16)
    return [put_after(new, aten._to_copy.default, dtype=node.meta["val"].dtype), new]


def not_averaged(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    scaled = [n for n in launches(gm) if is_operator(n.args[0].target, "aten::mul", "aten::div")]
    node = pick(draw, scaled)
    if node is None:
        return None
    with_arg(node, 0, node.args[0].args[0])
    return [node]


def other_reduction(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, calls(gm, "_c10d_functional::all_reduce"))
    if node is None:
        return None
    with_arg(node, 1, draw.choice(["max", "min", "avg", "product"]))
    return [node]


def reduced_again(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, waits(gm))
    if node is None:
        return None
    again = put_after(node, c10d.all_reduce.default, "sum", node.args[0].args[-1])
    return [put_after(again, c10d.wait_tensor.default), again]


def reduced_for_nobody(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, launches(gm))
    if node is None:
        return None
    extra = added(node, node.target, *node.args)
    return [extra, added(extra, c10d.wait_tensor.default, extra), node]


def not_reduced(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, waits(gm))
    if node is None:
        return None
    launch = node.args[0]
    sent = launch.args[0]
    node.replace_all_uses_with(sent)
    if draw.random() < 0.5:
        gm.graph.erase_node(node)
        gm.graph.erase_node(launch)
    return [sent, *sent.users]


def read_before_wait(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, waits(gm))
    if node is None:
        return None
    users = list(node.users)
    for user in users:
        user.replace_input_with(node, node.args[0])
    return [node.args[0], node, *users]


NOT_COMMUTING = ("aten::sub", "aten::div", "aten::mm", "aten::pow", "aten::where", "aten::bmm",
                 "aten::addcmul", "aten::addcdiv", "aten::gelu_backward",
                 "aten::threshold_backward", "aten::tanh_backward")  # fmt: skip


def swapped_operands(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in calls(gm, *NOT_COMMUTING) if n.args[0] is not n.args[1]))
    if node is None or not isinstance(node.args[1], fx.Node):
        return None
    first, second = node.args[:2]
    if not same_kind(first, second):
        return None
    node.args = (second, first, *node.args[2:])
    return [node]


EXCHANGES = {
    "add": "sub", "sub": "add", "mul": "div", "div": "mul", "gelu": "sigmoid", "relu": "tanh",
    "tanh": "sigmoid", "sqrt": "abs", "rsqrt": "sqrt", "exp": "abs", "neg": "abs", "mean": "sum",
    "sum": "mean", "amax": "amin", "maximum": "minimum", "lt": "le", "ge": "gt", "le": "lt",
    "gt": "ge", "eq": "ne", "tanh_backward": "sigmoid_backward", "addcmul": "addcdiv",
    "addcdiv": "addcmul", "zeros_like": "ones_like", "ones_like": "zeros_like", "lerp": "add",
    "_foreach_add": "_foreach_sub", "_foreach_mul": "_foreach_div", "_foreach_sub": "_foreach_add",
    "_foreach_div": "_foreach_mul", "_foreach_sqrt": "_foreach_abs", "_foreach_neg": "_foreach_abs",
    "_foreach_addcmul": "_foreach_addcdiv", "_foreach_addcdiv": "_foreach_addcmul",
    "_fused_adam": "_fused_adamw", "_fused_adamw": "_fused_adam", "sin": "cos", "cos": "sin",
}  # fmt: skip


def exchanged(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Another operator with the same arguments."""
    node = pick(draw, calls(gm, *(f"aten::{name}" for name in EXCHANGES)))
    if node is None:
        return None
    name = node.target._schema.name.split("::")[1]
    packet, overload = getattr(aten, EXCHANGES[name]), node.target._overloadname
    if overload not in packet.overloads():
        return None
    old = node.target
    node.target = getattr(packet, overload)
    if len(node.args) > len(node.target._schema.arguments) or not renewed(node):
        node.target = old
        return None
    return [node]


def _constants(gm: fx.GraphModule, kind: type) -> list[tuple[fx.Node, int]]:
    return [
        (node, index)
        for node in calls(gm)
        for index, value in enumerate(node.args)
        if type(value) is kind and node.target is not operator.getitem
    ]


def changed_float(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    found = pick(draw, _constants(gm, float))
    if found is None:
        return None
    node, index = found
    with_arg(node, index, node.args[index] * draw.choice([2.0, 0.5, -1.0]) + 1e-3)
    return [node]


def changed_int(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Another dimension, index or scalar."""
    found = pick(draw, _constants(gm, int))
    if found is None:
        return None
    node, index = found
    with_arg(node, index, node.args[index] + draw.choice([1, -1]))
    renewed(node)
    return [node]


def changed_flag(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    found = pick(draw, _constants(gm, bool))
    if found is None:
        return None
    node, index = found
    with_arg(node, index, not node.args[index])
    renewed(node)
    return [node]


def changed_option(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A keyword argument, such as `weight_decay` or `maximize`."""
    names = [(n, k) for n in calls(gm) for k, v in n.kwargs.items() if type(v) in (bool, float)]
    found = pick(draw, names)
    if found is None:
        return None
    node, name = found
    value = node.kwargs[name]
    node.update_kwarg(name, not value if type(value) is bool else value * 1.5 + 0.01)
    return [node]


def changed_sizes(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """The sizes of a view in another order, its readers none the wiser."""
    names = ("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::expand")
    nodes = [n for n in calls(gm, *names) if len(set(n.args[1])) > 1]
    node = pick(draw, nodes)
    if node is None:
        return None
    with_arg(node, 1, list(reversed(node.args[1])))
    if draw.random() < 0.5:
        renewed(node)
    return [node]


def changed_dims(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A permutation or reduction over other dimensions."""
    names = ("aten::permute", "aten::transpose", "aten::sum", "aten::mean", "aten::amax")
    node = pick(draw, (n for n in calls(gm, *names) if len(n.args) > 1))
    if node is None:
        return None
    dims = node.args[1]
    if isinstance(dims, int):
        node.args = (node.args[0], dims - 1, *node.args[2:])
    elif len(dims) > 1:
        with_arg(node, 1, [dims[1], dims[0], *dims[2:]])
    elif dims:
        with_arg(node, 1, [dims[0] + 1 if dims[0] >= 0 else dims[0] - 1])
    renewed(node)
    return [node]


def skipped(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """An operator is left out: its readers get its first argument."""
    node = pick(draw, (n for n in plain(gm) if n.args and is_tensor(n.args[0], False)))
    if node is None or layout(node.meta["val"]) != layout(node.args[0].meta["val"]):
        return None
    users = list(node.users)
    for user in users:
        user.replace_input_with(node, node.args[0])
    return [node.args[0], node, *users]


def transpose_forgotten(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, calls(gm, "aten::t", "aten::transpose", "aten::permute"))
    if node is None or not node.users:
        return None
    users = list(node.users)
    for user in users:
        user.replace_input_with(node, node.args[0])
    return [node.args[0], node, *users]


def another_item(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in calls(gm) if n.target is operator.getitem))
    if node is None:
        return None
    length = len(node.args[0].meta["val"])
    index = draw.randrange(length)
    if index == node.args[1]:
        return None
    with_arg(node, 1, index)
    renewed(node)
    return [node]


def item_forgotten(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in calls(gm) if n.target is operator.getitem and n.users))
    if node is None:
        return None
    users = list(node.users)
    for user in users:
        user.replace_input_with(node, node.args[0])
    return [node.args[0], node, *users]


def wrong_metadata(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in plain(gm) if is_tensor(n)))
    if node is None:
        return None
    value = node.meta["val"]
    lie = [value.to(torch.float16), value.unsqueeze(0), value.clone().new_empty((*value.shape, 2))]
    node.meta = {**node.meta, "val": draw.choice(lie)}
    return [node]


def another_input(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A node reads another tensor of the same kind."""
    reader = pick(draw, (n for n in calls(gm) if n.all_input_nodes))
    sources = [s for s in reader.all_input_nodes if is_tensor(s, False)]
    if is_update(reader):
        sources = [s for s in sources if s is not reader.args[0]]
    source = pick(draw, sources)
    if source is None:
        return None
    other = pick(draw, others(gm, source, reader))
    if other is None:
        return None
    reader.args = tuple(replaced(list(reader.args), source, other))
    return [reader, other, source]


def lost_update(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    outputs = get_outputs(gm.graph)
    copy = pick(draw, (u for u in outputs.updates if len(u.users) == 1))
    if copy is None:
        return None
    outputs.updates.remove(copy)
    set_outputs(gm.graph, outputs)
    touched = [copy.args[0], copy.args[1], copy]
    gm.graph.erase_node(copy)
    return touched


def swapped_updates(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    updates = get_outputs(gm.graph).updates
    one = pick(draw, updates)
    alike = [u for u in updates if u is not one and same_kind(u, one)]
    other = pick(draw, alike)
    if other is None:
        return None
    first, second = one.args[1], other.args[1]
    last = max(one, other)
    for node in (one, other):
        if node is not last:
            last.append(node)
    with_arg(one, 1, second)
    with_arg(other, 1, first)
    return [one, other]


def stale_read(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """The state before its update is read in place of that after it, or the other way round."""
    updates = [u for u in get_outputs(gm.graph).updates if len(u.users) > 1]
    update = pick(draw, updates)
    if update is None:
        return None
    reader = pick(draw, (u for u in update.users if u.op != "output"))
    if reader is None:
        return None
    reader.replace_input_with(update, update.args[0])
    return [reader, update]


def early_update(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """State is updated before somebody reads what it was."""
    update = pick(draw, get_outputs(gm.graph).updates)
    if update is None:
        return None
    readers = [u for u in update.args[0].users if u > update.args[1] and u < update]
    reader = pick(draw, readers)
    if reader is None:
        return None
    update.args[1].append(update)
    return [update, reader, *readers]


def scaled_rate(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    rate = pick(draw, (n for n in gm.graph.nodes if n.meta.get("kind") == "hyperparameter"))
    if rate is None or not rate.users:
        return None
    return [put_after(rate, aten.mul.Tensor, draw.choice([2.0, 0.0, 1.0000001]))]


def constant_rate(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """``1e-3 + 0 * lr``, which depends on what it should."""
    rate = pick(draw, (n for n in gm.graph.nodes if n.meta.get("kind") == "hyperparameter"))
    if rate is None or not rate.users:
        return None
    new = put_after(rate, aten.mul.Tensor, 0.0)
    return [put_after(new, aten.add.Tensor, 1e-3), new]


def python_function(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in plain(gm) if is_tensor(n)))
    if node is None:
        return None
    called = node.target
    node.target = lambda *args, **kwargs: called(*args, **kwargs)
    return [node]


def in_place(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    names = ("add", "sub", "mul", "div", "relu", "neg")
    node = pick(draw, calls(gm, *(f"aten::{name}" for name in names)))
    if node is None or layout(node.args[0].meta["val"]) != layout(node.meta["val"]):
        return None
    packet = getattr(aten, node.target._schema.name.split("::")[1] + "_")
    node.target = getattr(packet, node.target._overloadname)
    return [node]


def lost_result(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    outputs = get_outputs(gm.graph)
    if not outputs.results:
        return None
    outputs.results.pop(draw.randrange(len(outputs.results)))
    set_outputs(gm.graph, outputs)
    return [get_output(gm.graph)]


def further_result(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    outputs = get_outputs(gm.graph)
    outputs.results.append(outputs.updates[0] if outputs.updates else None)
    set_outputs(gm.graph, outputs)
    return [get_output(gm.graph)]


def other_result(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    outputs = get_outputs(gm.graph)
    node = pick(draw, (n for n in outputs.results if is_tensor(n)))
    other = None if node is None else pick(draw, others(gm, node, next(reversed(gm.graph.nodes))))
    if other is None:
        return None
    outputs.results[outputs.results.index(node)] = other
    set_outputs(gm.graph, outputs)
    return [other, node]


def reshaped_result(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    outputs = get_outputs(gm.graph)
    node = pick(draw, (n for n in outputs.results if is_tensor(n)))
    if node is None:
        return None
    new = added(node, aten.unsqueeze.default, node, 0)
    outputs.results[outputs.results.index(node)] = new
    set_outputs(gm.graph, outputs)
    return [new, node]


def random_swapped(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """What two random operators gave is read the other way round."""
    nodes = [n for n in calls(gm) if is_random(n)]
    one = pick(draw, nodes)
    alike = [] if one is None else [n for n in nodes if n is not one and n.target is one.target]
    other = pick(draw, (n for n in alike if layout(n.meta["val"]) == layout(one.meta["val"])))
    if other is None:
        return None
    first, second = sorted((one, other))
    for mine, theirs in _paired_items(first, second):
        for user in [u for u in mine.users if u > theirs]:
            user.replace_input_with(mine, theirs)
    return [first, second, *first.users, *second.users]


def _paired_items(one: fx.Node, other: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    if is_tensor(one):
        return [(one, other)]
    items = {user.args[1]: user for user in other.users}
    return [(user, items[user.args[1]]) for user in one.users if user.args[1] in items]


def extra_draw(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A random operator before another one, for nobody."""
    first = pick(draw, (n for n in calls(gm) if is_random(n)))
    source = None if first is None else pick(draw, filter(is_tensor, first.all_input_nodes))
    if source is None:
        return None
    return [added(source, aten.bernoulli.p, source, 0.5), first]


def lost_draw(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in calls(gm) if is_random(n) and n.all_input_nodes))
    if node is None:
        return None
    source = node.all_input_nodes[0]
    users = [u for u in node.users if u.target is operator.getitem and u.args[1] == 0] or [node]
    if layout(users[0].meta["val"]) != layout(source.meta["val"]):
        return None
    users[0].replace_all_uses_with(source)
    return [node, source, *source.users]


def entries_swapped(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Two entries of one list of a list operator change places."""
    node = pick(draw, (n for n in calls(gm) if is_list_operator(n)))
    lists = [] if node is None else [i for i, v in enumerate(node.args) if _several(v)]
    place = pick(draw, lists)
    if place is None:
        return None
    entries = list(node.args[place])
    i, j = draw.sample(range(len(entries)), 2)
    if entries[i] is entries[j] or not same_kind(entries[i], entries[j]):
        return None
    entries[i], entries[j] = entries[j], entries[i]
    with_arg(node, place, entries)
    return [node]


def _several(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 1 and isinstance(value[0], fx.Node)


def members_swapped(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in calls(gm, "aten::cat", "aten::stack") if len(n.args[0]) > 1))
    if node is None:
        return None
    members = list(node.args[0])
    i, j = draw.sample(range(len(members)), 2)
    if members[i] is members[j]:
        return None
    members[i], members[j] = members[j], members[i]
    with_arg(node, 0, members)
    return [node]


SPLITS = ("aten::split_with_sizes", "aten::split", "aten::chunk")


def other_split(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in calls(gm, SPLITS[0]) if len(set(n.args[1])) > 1))
    if node is None:
        return None
    sizes = list(node.args[1])
    i = draw.randrange(len(sizes) - 1)
    with_arg(node, 1, [*sizes[:i], sizes[i + 1], sizes[i], *sizes[i + 2 :]])
    renewed(node)
    return [node]


def shifted_slice(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A value is rolled by one element."""
    node = pick(draw, (n for n in computed(gm) if n.meta["val"].numel() > 1))
    if node is None:
        return None
    return [put_after(node, aten.roll.default, [1])]


def with_alpha(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    nodes = [n for n in calls(gm, "aten::add", "aten::sub") if n.target._overloadname == "Tensor"]
    node = pick(draw, nodes)
    if node is None:
        return None
    node.kwargs = {**node.kwargs, "alpha": draw.choice([2, 0.5, -1])}
    return [node]


def reassociated(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """(a + b) + c as a + (b + c), which rounds elsewhere."""
    nodes = [
        n
        for n in calls(gm, "aten::add", "aten::mul")
        if isinstance(n.args[0], fx.Node)
        and n.args[0].target is n.target
        and len(n.args[0].args) == 2
        and not n.kwargs
    ]
    node = pick(draw, nodes)
    if node is None:
        return None
    inner = node.args[0]
    last = max(v for v in (inner, node.args[1]) if isinstance(v, fx.Node))
    if not isinstance(inner.args[1], fx.Node):
        return None
    new = added(last, node.target, inner.args[1], node.args[1])
    node.args = (inner.args[0], new)
    renewed(node)
    return [node, new]


def attribute_exchanged(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A constant of the module becomes another one, under its name."""
    node = pick(draw, (n for n in gm.graph.nodes if n.op == "get_attr"))
    value = None if node is None else getattr(gm, str(node.target), None)
    if not isinstance(value, torch.Tensor):
        return None
    setattr(gm, str(node.target), torch.ones_like(value) + value)
    return [node]


def filled(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A value becomes a constant."""
    node = pick(draw, computed(gm))
    if node is None:
        return None
    target = draw.choice([aten.zeros_like.default, aten.ones_like.default])
    return [put_after(node, target)]


def unmarked(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A late node is not late any more, but what belongs to it is."""
    late = list(getattr(gm.graph, "late", ()))
    node = pick(draw, late)
    if node is None:
        return None
    gm.graph._unmark(node)  # type: ignore[union-attr]
    return [node, *node.users, *node.all_input_nodes]


def marked(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A node is late whose readers are not."""
    late = getattr(gm.graph, "late", {})
    if not late:
        return None
    node = pick(draw, (n for n in plain(gm) if n not in late))
    gm.graph.mark_late(node, draw.choice(list(late.values())))  # type: ignore[union-attr]
    return [node, *node.users]


def overwritten_early(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """An update in place happens before somebody reads what was there."""
    updates = [n for n in calls(gm) if written(n) and not is_update(n)]
    node = pick(draw, updates)
    if node is None:
        return None
    reader = pick(draw, (u for n in written(node) for u in n.users if u < node))
    last = max(node.all_input_nodes)
    if reader is None or reader is last or reader < last:
        return None
    last.append(node)
    return [node, reader, last]


def clone_dropped(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A copy that protects a value from an update in place is left out."""
    node = pick(draw, calls(gm, "aten::clone"))
    if node is None:
        return None
    users = list(node.users)
    node.replace_all_uses_with(node.args[0])
    return [node.args[0], *users]


def written_elsewhere(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """An update in place of another value of the same kind."""
    node = pick(draw, (n for n in calls(gm) if written(n) and is_tensor(n.args[0])))
    other = None if node is None else pick(draw, others(gm, node.args[0], node))
    if other is None:
        return None
    with_arg(node, 0, other)
    return [node, other]


ILLEGAL: dict[str, Edit] = {
    "a gradient scaled": after_gradient(aten.mul.Tensor, 2.0),
    "a gradient zeroed": after_gradient(aten.mul.Tensor, 0.0),
    "a gradient negated": after_gradient(aten.neg.default),
    "a gradient clamped": after_gradient(aten.clamp.default, -1e-3, 1e-3),
    "a value rounded": rounded,
    "a value negated": after_any(aten.neg.default),
    "a value scaled": after_any(aten.mul.Tensor, 1.0000001),
    "a value made positive": after_any(aten.relu.default),
    "a value flipped": after_any(aten.flip.default, [0]),
    "a value filled": filled,
    "a value shifted": shifted_slice,
    "averaged twice": before_launch(aten.mul.Tensor, 0.5),
    "sent without its sign": before_launch(aten.abs.default),
    "not averaged": not_averaged,
    "another reduction": other_reduction,
    "reduced again": reduced_again,
    "reduced for nobody": reduced_for_nobody,
    "not reduced": not_reduced,
    "read before the wait": read_before_wait,
    "operands swapped": swapped_operands,
    "an operator exchanged": exchanged,
    "a number changed": changed_float,
    "an integer changed": changed_int,
    "a flag changed": changed_flag,
    "an option changed": changed_option,
    "sizes of a view changed": changed_sizes,
    "dimensions changed": changed_dims,
    "an operator left out": skipped,
    "a transpose forgotten": transpose_forgotten,
    "another item": another_item,
    "an item forgotten": item_forgotten,
    "metadata that lies": wrong_metadata,
    "another input": another_input,
    "an update lost": lost_update,
    "updates swapped": swapped_updates,
    "a stale read": stale_read,
    "an update too early": early_update,
    "the rate scaled": scaled_rate,
    "the rate made constant": constant_rate,
    "a lambda": python_function,
    "an update in place": in_place,
    "a result lost": lost_result,
    "a further result": further_result,
    "another result": other_result,
    "a result reshaped": reshaped_result,
    "random numbers exchanged": random_swapped,
    "random numbers drawn for nobody": extra_draw,
    "random numbers not drawn": lost_draw,
    "entries of a list swapped": entries_swapped,
    "members of a bucket swapped": members_swapped,
    "another split": other_split,
    "an alpha": with_alpha,
    "another association": reassociated,
    "a constant exchanged": attribute_exchanged,
    "overwritten too early": overwritten_early,
    "a clone dropped": clone_dropped,
    "another value written": written_elsewhere,
    "late work not late": unmarked,
    "late work of others": marked,
    **NARROW,
    **FURTHER,
    **HIDDEN,
}
