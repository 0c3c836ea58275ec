"""Illegal edits beside what terms speak of: arguments by name, metadata of inputs and of lists,
functions with effects below operators that read metadata alone, assertions, forms of draws."""

from __future__ import annotations

import operator
from random import Random
from typing import Any

import torch
from torch import Tensor, fx

from edit_tools import Edit, added, aten, calls, computed, is_tensor, is_update, layout, pick
from graphopt.graph_utils import get_outputs, is_operator, set_outputs
from graphopt.ir.operators import is_list_operator

Nodes = list[fx.Node] | None


def _copies(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in get_outputs(gm.graph).updates if is_update(n)]


def _alias_by_name(node: fx.Node) -> fx.Node:
    view = added(node, aten.alias.default, node)
    view.args, view.kwargs = (), {"self": node}
    return view


def late_through_a_name(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Who reads state stands behind its update, and reads a view with an argument by name."""
    late = getattr(gm.graph, "late", {})
    found = [
        (update, reader)
        for update in _copies(gm)
        for reader in update.args[0].users
        if update not in late and reader < update and is_tensor(reader)
        if reader.users and all(user > update for user in reader.users)
    ]
    chosen = pick(draw, found)
    if chosen is None:
        return None
    update, reader = chosen
    view = _alias_by_name(update.args[0])
    reader.replace_input_with(update.args[0], view)
    update.append(reader)
    return [reader, view, update]


def result_in_state(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A result becomes the state that it is a copy of, by an argument that is given by name."""
    outputs = get_outputs(gm.graph)
    found = [n for n in outputs.results if is_operator(getattr(n, "target", None), "aten::clone")]
    node = pick(draw, [n for n in found if n.args[0] in [u.args[1] for u in _copies(gm)]])
    if node is None:
        return None
    update = next(u for u in _copies(gm) if u.args[1] is node.args[0])
    view = _alias_by_name(update)
    outputs.results[outputs.results.index(node)] = view
    set_outputs(gm.graph, outputs)
    return [view, update]


def input_flattened(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Metadata says that an input has the shape of a view of it, which is left out."""
    views = calls(gm, "aten::view", "aten::reshape", "aten::unsqueeze", "aten::_to_copy")
    found = [n for n in views if n.args[0].op == "placeholder" and n.users]
    node = pick(draw, [n for n in found if layout(n.meta["val"]) != layout(n.args[0].meta["val"])])
    if node is None:
        return None
    source = node.args[0]
    source.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(source)
    return [source, node]


def list_flattened(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Metadata says that an entry of a list has another shape, which its readers take."""
    found = []
    for node in calls(gm):
        held = node.meta.get("val")
        if not is_list_operator(node) or not held or not isinstance(held[0], Tensor):
            continue
        found += [(node, i) for i, entry in enumerate(held) if entry.dim() > 1]
    chosen = pick(draw, found)
    if chosen is None:
        return None
    node, index = chosen
    entries = list(node.meta["val"])
    entries[index] = entries[index].reshape(-1)
    node.meta["val"] = entries
    return [node]


def updated_below_metadata(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A function of Python's updates an input, and its result is read for its shape alone."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and is_tensor(n) and n.users]
    node = pick(draw, [n for n in inputs if n.meta.get("kind") in ("parameter", "user_input")])
    user = None if node is None else pick(draw, computed(gm))
    if user is None:
        return None
    target: Any = draw.choice([operator.iadd, operator.imul])
    changed = added(node, aten.mul.Tensor, node, node)
    changed.target = target
    zeros = added(changed, aten.zeros_like.default, changed)
    return [changed, zeros, *_read_for_its_length(zeros, user)]


def _read_for_its_length(zeros: fx.Node, user: fx.Node) -> list[fx.Node]:
    """`user` goes through a list in which it stands beside `zeros`."""
    last = max(zeros, user)
    readers = list(user.users)
    new = added(last, operator.getitem, [zeros, user], 1)
    new.meta["val"] = user.meta["val"]
    for reader in readers:
        if reader > new:
            reader.replace_input_with(user, new)
    return [new]


def assertion(gm: fx.GraphModule, draw: Random) -> Nodes:
    """The step ends where a value is large."""
    node = pick(draw, computed(gm))
    if node is None:
        return None
    small = added(node, aten.lt.Scalar, node, draw.choice([-1e9, 0.0, 1e-3]))
    every = added(small, aten.all.default, small)
    return [added(every, aten._assert_async.msg, every, "too large"), every]


def drawn_in_another_order(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Random numbers for a tensor that is not contiguous are drawn as if it were."""
    forms = {
        torch.ops.graphopt_inplace.bernoulli_float.default: aten.bernoulli.p,
        torch.ops.graphopt_inplace.uniform.default: aten.uniform.default,
    }
    found = [n for n in calls(gm) if n.target in forms and n.meta["val"].dim() == 2]
    node = pick(draw, [n for n in found if not n.meta["val"].is_contiguous()])
    if node is None:
        return None
    node.target = forms[node.target]
    if is_operator(node.target, "aten::bernoulli") and len(node.args) < 2:
        node.args = (*node.args, 0.5)
    before = layout(node.meta["val"])
    users = list(node.users)
    node.meta["val"] = node.target(*(getattr(a, "meta", {}).get("val", a) for a in node.args))
    new = node
    if layout(node.meta["val"]) != before:
        turned = added(node, aten.t.default, node)
        dense = added(turned, aten.clone.default, turned, memory_format=torch.contiguous_format)
        new = added(dense, aten.t.default, dense)
    for user in users:
        if new is not node:
            user.replace_input_with(node, new)
    return [node, new]


def by_an_input_name(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A submodule gets an argument by name, the name of another input of the graph."""
    found = [n for n in computed(gm) if n.op == "call_function" and len(n.all_input_nodes) == 1]
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and is_tensor(n)]
    pairs = [
        (node, n)
        for node in found
        for n in inputs
        if n is node.all_input_nodes[0] and node.args[0] is n
    ]
    pairs = [(node, n) for node, n in pairs if layout(n.meta["val"])]
    chosen = pick(draw, pairs)
    if chosen is None:
        return None
    node, source = chosen
    others = [n for n in inputs if n is not source]
    other = pick(draw, [n for n in others if layout(n.meta["val"]) == layout(source.meta["val"])])
    if other is None:
        return None
    body = fx.Graph()
    given = body.placeholder(str(source.target))
    given.meta["val"] = source.meta["val"]
    inner = body.node_copy(node, lambda _: given)
    body.output(inner)
    gm.add_submodule("part_of_a_trial", fx.GraphModule(torch.nn.Module(), body))
    with gm.graph.inserting_before(node):
        call = gm.graph.call_module("part_of_a_trial", (), {str(source.target): other})
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    return [call, node]


def constant_given_by_name(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A constant of the module alone is another one: no node changes."""
    node = pick(draw, (n for n in gm.graph.nodes if n.op == "get_attr"))
    value = None if node is None else getattr(gm, str(node.target), None)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    setattr(gm, str(node.target), value + 1)
    return [node]


HIDDEN: dict[str, Edit] = {
    "a late reader through a name": late_through_a_name,
    "a result in state through a name": result_in_state,
    "an input of another shape": input_flattened,
    "a list of another shape": list_flattened,
    "an update below metadata": updated_below_metadata,
    "an assertion": assertion,
    "random numbers in another order": drawn_in_another_order,
    "an argument of another name": by_an_input_name,
    "only a constant exchanged": constant_given_by_name,
}
