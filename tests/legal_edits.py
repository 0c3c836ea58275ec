"""Edits after which a step computes the same bits: what a right pass may do."""

from __future__ import annotations

import heapq
import operator
from random import Random

import torch
from torch import fx

import graphopt
from edit_tools import (
    Edit,
    added,
    aten,
    c10d,
    calls,
    computed,
    is_tensor,
    is_update,
    layout,
    pick,
    plain,
    put_after,
    waits,
    with_arg,
)
from graphopt.graph_utils import is_collective, is_dense, is_wait, readers_through_views
from graphopt.iter_graph import IterGraph, IterGraphModule
from graphopt.optim import (
    OptimizerSplitError,
    get_all_fused_optimizer_blocks,
    split_fused_optimizer,
)
from graphopt.verify import dependency_graph
from rewrites import fuse, in_order


def shuffled(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """All nodes in another order that dependencies allow."""
    graph = dependency_graph(gm)
    for update, destination in getattr(gm.graph, "late", {}).items():
        if is_update(update):  # the update of the last iteration stands there
            for reader in readers_through_views(update.args[0]):
                if reader not in gm.graph.late and reader is not destination:
                    graph.add_edge(destination, reader)
    missing = dict(graph.in_degree())
    ready = [(draw.random(), node.name, node) for node in graph if not missing[node]]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        _, _, node = heapq.heappop(ready)
        order.append(node)
        for later in graph.successors(node):
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (draw.random(), later.name, later))
    in_order(gm, order)
    return []


def moved(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """One node as late as its readers allow."""
    node = pick(draw, (n for n in plain(gm) if n not in getattr(gm.graph, "late", {})))
    if node is None:
        return None
    first = min((user for user in node.users), default=None)
    if first is None or first.op == "output":
        return None
    first.prepend(node)
    return [node]


def computed_twice(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Each reader may get a value that is computed anew."""
    node = pick(draw, plain(gm))
    if node is None:
        return None
    again = added(node, node.target, *node.args, **node.kwargs)
    again.meta["val"] = node.meta["val"]
    for user in list(node.users):
        if draw.random() < 0.5:
            user.replace_input_with(node, again)
    return [node, again]


def computed_once(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Equal calls become one."""
    late = getattr(gm.graph, "late", {})
    seen: dict[str, fx.Node] = {}
    for node in plain(gm):
        if node in late:
            continue
        key = f"{node.target} {node.args} {node.kwargs}"
        if key in seen:
            node.replace_all_uses_with(seen[key])
            return [seen[key]]
        seen[key] = node
    return None


def identity(target: object, *args: object, **kwargs: object) -> Edit:
    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        node = pick(draw, (n for n in computed(gm) if n.meta["val"].is_contiguous()))
        return None if node is None else [put_after(node, target, *args, **kwargs)]

    return edit


def cast_to_itself(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Of a dense tensor, which keeps its strides."""
    node = pick(draw, (n for n in computed(gm) if is_dense(n.meta["val"])))
    if node is None:
        return None
    return [put_after(node, aten._to_copy.default, dtype=node.meta["val"].dtype)]


def viewed(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """Flattened and back."""
    node = pick(draw, (n for n in computed(gm) if n.meta["val"].is_contiguous()))
    if node is None:
        return None
    sizes = list(node.meta["val"].shape)
    flat = put_after(node, aten.view.default, [-1])
    return [put_after(flat, aten.view.default, sizes), flat]


def transposed_twice(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in computed(gm) if n.meta["val"].dim() > 1))
    if node is None:
        return None
    first, second = draw.sample(range(node.meta["val"].dim()), 2)
    new = put_after(node, aten.transpose.int, first, second)
    return [put_after(new, aten.transpose.int, first, second), new]


def negated_twice(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in computed(gm) if is_dense(n.meta["val"])))
    if node is None:
        return None
    new = put_after(node, aten.neg.default)
    return [put_after(new, aten.neg.default), new]


def cut_and_joined(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in computed(gm) if n.meta["val"].is_contiguous()))
    if node is None or not node.meta["val"].dim() or node.meta["val"].shape[0] < 2:
        return None
    size = node.meta["val"].shape[0]
    first = draw.randrange(1, size)
    users = list(node.users)
    parts = added(node, aten.split_with_sizes.default, node, [first, size - first])
    one = added(parts, operator.getitem, parts, 0)
    other = added(one, operator.getitem, parts, 1)
    whole = added(other, aten.cat.default, [one, other])
    for user in users:
        user.replace_input_with(node, whole)
    return [whole]


POINTWISE = ("aten::mul", "aten::add", "aten::sub", "aten::div", "aten::neg", "aten::sqrt")


def computed_in_parts(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A pointwise operator on two parts of its operands."""
    nodes = [
        n
        for n in calls(gm, *POINTWISE)
        if n.users
        and not n.kwargs
        and n.meta["val"].dim()
        and n.meta["val"].is_contiguous()
        and n.meta["val"].shape[0] > 1
        and all(
            s.meta["val"].shape == n.meta["val"].shape and s.meta["val"].is_contiguous()
            for s in n.all_input_nodes
            if isinstance(s.meta["val"], torch.Tensor)
        )
        and all(isinstance(s.meta["val"], torch.Tensor) for s in n.all_input_nodes)
    ]
    node = pick(draw, nodes)
    if node is None:
        return None
    size = node.meta["val"].shape[0]
    cut = draw.randrange(1, size)
    users, last, results = list(node.users), node, []
    for low, high in ((0, cut), (cut, size)):
        args = []
        for value in node.args:
            if isinstance(value, fx.Node):
                value = last = added(last, aten.slice.Tensor, value, 0, low, high)
            args.append(value)
        last = added(last, node.target, *args)
        results.append(last)
    whole = added(last, aten.cat.default, results)
    for user in users:
        user.replace_input_with(node, whole)
    return [whole]


def in_buckets(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    if getattr(gm.graph, "late", {}) or not waits(gm):
        return None
    fuse(gm, draw.randrange(1, 6))
    return []


def sent_in_parts(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """An all-reduce as two."""
    nodes = [w for w in waits(gm) if w not in getattr(gm.graph, "late", {})]
    node = pick(draw, (w for w in nodes if _sent(w).shape and _sent(w).shape[0] > 1))
    if node is None or not _sent(node).is_contiguous():
        return None
    launch = node.args[0]
    if launch.target is not c10d.all_reduce.default:
        return None
    size, last, results = _sent(node).shape[0], launch, []
    cut = draw.randrange(1, size)
    for low, high in ((0, cut), (cut, size)):
        part = added(last, aten.slice.Tensor, launch.args[0], 0, low, high)
        again = added(part, launch.target, part, *launch.args[1:])
        last = added(again, c10d.wait_tensor.default, again)
        results.append(last)
    whole = added(last, aten.cat.default, results)
    node.replace_all_uses_with(whole)
    gm.graph.erase_node(node)
    gm.graph.erase_node(launch)
    return [whole]


def _sent(wait: fx.Node) -> torch.Tensor:
    value = wait.args[0].args[0].meta["val"]  # type: ignore[union-attr, index]
    assert isinstance(value, torch.Tensor)
    return value


def padded(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """More is sent: constants that nobody reads."""
    nodes = [w for w in waits(gm) if _sent(w).dim() == 1 and is_collective(w.args[0])]
    node = pick(draw, (w for w in nodes if w not in getattr(gm.graph, "late", {})))
    if node is None:
        return None
    launch = node.args[0]
    if launch.target is not c10d.all_reduce.default:
        return None
    sent = launch.args[0]
    zeros = added(sent, aten.new_zeros.default, sent, [draw.randrange(1, 8)])
    bucket = added(zeros, aten.cat.default, [sent, zeros])
    again = added(max(launch, bucket), launch.target, bucket, *launch.args[1:])
    total = added(max(again, node), c10d.wait_tensor.default, again)
    part = added(total, aten.slice.Tensor, total, 0, 0, sent.meta["val"].shape[0])
    node.replace_all_uses_with(part)
    gm.graph.erase_node(node)
    gm.graph.erase_node(launch)
    return [part]


def optimizer_divided(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    if getattr(gm.graph, "late", {}):
        return None
    try:
        block = pick(draw, get_all_fused_optimizer_blocks(gm))
    except OptimizerSplitError:
        return None
    gradients = [] if block is None else list(dict.fromkeys(block.optim.grads))
    if len(gradients) < 2:
        return None
    chosen = draw.sample(gradients, draw.randrange(1, len(gradients)))
    try:
        split_fused_optimizer(gm, block, chosen)
    except OptimizerSplitError:
        return None  # updates depend on one another
    return []


def waits_delayed(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    late = getattr(gm.graph, "late", {})
    node = pick(draw, (n for n in calls(gm) if is_wait(n) and n.users and n not in late))
    if node is None:
        return None
    first = min(node.users)
    if first.op == "output":
        return None
    first.prepend(node)
    return [node]


def for_nobody(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, computed(gm))
    return None if node is None else [added(node, aten.exp.default, node)]


def view_as_reshape(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, calls(gm, "aten::view", "aten::_unsafe_view"))
    if node is None:
        return None
    node.target = aten.reshape.default
    return [node]


def passes(*entries: object) -> Edit:
    def edit(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
        if graphopt.applied_passes(gm) or not isinstance(gm, IterGraphModule):
            return None
        for entry in entries:
            name, options = entry  # type: ignore[misc]
            drawn = {key: draw.choice(values) for key, values in options.items()}
            graphopt.registry.get(name).function(gm, **drawn)
        return []

    return edit


def less_late(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """No work is late any more."""
    if not isinstance(gm.graph, IterGraph) or not gm.graph.late:
        return None
    for node in list(gm.graph.late):
        gm.graph._unmark(node)
    return []


def update_through_clone(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    node = pick(draw, (n for n in calls(gm) if is_update(n)))
    if node is None or not isinstance(node.args[1], fx.Node):
        return None
    clone = added(node.args[1], aten.clone.default, node.args[1])
    if clone > node:
        return None
    with_arg(node, 1, clone)
    return [clone]


def operands_exchanged(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A sum or product of two tensors of one kind, the other way round."""
    found = [
        n
        for n in calls(gm, "aten::add", "aten::mul", "aten::eq")
        if len(n.args) == 2
        and not n.kwargs
        and all(isinstance(a, fx.Node) and is_tensor(a) for a in n.args)
        and layout(n.args[0].meta["val"]) == layout(n.args[1].meta["val"])
    ]
    node = pick(draw, found)
    if node is None:
        return None
    node.args = tuple(reversed(node.args))
    return [node]


def number_as_scalar(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """The overload for a number, which the capture writes as the one for tensors."""
    found = [n for n in calls(gm, "aten::mul", "aten::div", "aten::add") if len(n.args) == 2]
    node = pick(draw, (n for n in found if n.target._overloadname == "Tensor"))  # type: ignore[union-attr]
    if node is None or isinstance(node.args[1], fx.Node):
        return None
    node.target = node.target.overloadpacket.Scalar  # type: ignore[union-attr]
    return [node]


ALONE = ("add", "sub", "mul", "div", "neg", "abs", "sqrt", "reciprocal", "sign")


def list_one_by_one(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A list operator as one call for each entry."""
    late = getattr(gm.graph, "late", {})
    found = calls(gm, *(f"aten::_foreach_{name}" for name in ALONE))
    found = [n for n in found if n.users and n not in late and len(n.args) < 3 and not n.kwargs]
    node = pick(draw, (n for n in found if n.target._overloadname != "Tensor"))  # type: ignore[union-attr]
    if node is None or any(user.target is not operator.getitem for user in node.users):
        return None
    packet = getattr(aten, node.target._schema.name.removeprefix("aten::_foreach_"))  # type: ignore[union-attr]
    alone = packet.Tensor if "Tensor" in packet.overloads() else packet.default
    touched = []
    for item in list(node.users):
        index = item.args[1]
        given = [a[index] if isinstance(a, (list, tuple)) else a for a in node.args]
        new = added(node, alone, *given)
        item.replace_all_uses_with(new)
        touched.append(new)
    return touched


def widened_and_back(gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """A cast goes through a dtype that has all of its numbers."""
    halves = [n for n in calls(gm) if is_tensor(n, False) and n.users and not is_update(n)]
    kinds = (torch.bool, torch.bfloat16, torch.float16)
    node = pick(draw, (n for n in halves if n.meta["val"].dtype in kinds))
    if node is None or not is_dense(node.meta["val"]):
        return None
    wide = added(node, aten._to_copy.default, node, dtype=torch.float32)
    back = added(wide, aten._to_copy.default, wide, dtype=node.meta["val"].dtype)
    node.replace_all_uses_with(back, lambda user: user is not wide)
    return [wide, back]


FUSION = ("comm_fusion_with_concat", {"bucket_size_mb": [0.0001, 0.001, 0.002, 0.01, 1.0]})

LEGAL: dict[str, Edit] = {
    "another order": shuffled,
    "a node moved": moved,
    "a wait delayed": waits_delayed,
    "computed twice": computed_twice,
    "computed once": computed_once,
    "a clone": identity(aten.clone.default),
    "an alias": identity(aten.alias.default),
    "detached": identity(aten.detach.default),
    "a cast to itself": cast_to_itself,
    "flattened and back": viewed,
    "transposed twice": transposed_twice,
    "negated twice": negated_twice,
    "cut and joined": cut_and_joined,
    "computed in parts": computed_in_parts,
    "in buckets": in_buckets,
    "sent in parts": sent_in_parts,
    "padded": padded,
    "an optimizer divided": optimizer_divided,
    "computed for nobody": for_nobody,
    "a view as reshape": view_as_reshape,
    "an update through a clone": update_through_clone,
    "operands exchanged": operands_exchanged,
    "a number as a scalar": number_as_scalar,
    "a list one by one": list_one_by_one,
    "widened and back": widened_and_back,
    "nothing late": less_late,
    "copies removed": passes(("remove_copy_from_optimizer", {})),
    "fused by the pass": passes(FUSION),
    "waits scheduled": passes(FUSION, ("schedule_comm_wait", {})),
    "late work": passes(
        FUSION,
        ("schedule_comm_wait", {}),
        ("iter_move_grads_and_optimizers", {"held_back": [0.0, 0.33, 0.66]}),
    ),
}

LEGAL_IN_PLACE = {name: LEGAL[name] for name in ("another order", "computed for nobody")}
"""What is right for a graph that works in place, too."""
