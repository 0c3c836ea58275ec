"""`split_updates`: updates of their own for sets of gradients, with the bits of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.errors import GraphOptError
from graphopt.graph_utils import (
    get_output,
    get_outputs,
    is_collective,
    is_list_operator,
    is_wait,
    move_before,
)
from graphopt.iter_graph import IterGraphModule
from graphopt.optim import OptimizerSplitError, split_updates
from graphopt.optim.descendants import Descendants
from graphopt.optim.elements import Elements
from graphopt.optim.split import separate
from optim_cases import Sheet, assert_same_run, aten, called, captured, duplicate, gradients
from sketch import one_rank
from slices import examples
from steps import clip_loop, clip_norm, clip_value, manual_update, step_keeping_gradients
from zoo import MODELS, OPTIMIZERS, train_step

captured_once = cache(captured)

# Their steps are counted and never read, so that nothing ties a count to a gradient.
COUNT_IN_VAIN = ("rmsprop", "adadelta", "rprop")


def assert_closed(updates: Sequence[Sequence[fx.Node]]) -> None:
    """What reads a node of an update is part of that update, or is the output."""
    for nodes in updates:
        inside = set(nodes)
        for node in nodes:
            assert all(user in inside or user.op == "output" for user in node.users), node


def by_parts(found: Sequence[fx.Node], parts: int) -> list[list[fx.Node]]:
    return [list(found[index::parts]) for index in range(parts)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    case = captured(name)
    whole = case[0]
    for parts in (2, 3):
        gm = duplicate(whole)
        updates = split_updates(gm, by_parts(gradients(gm), parts))
        assert_closed(updates)
        assert_same_run(gm, whole, case)
        owned = {node for nodes in updates for node in nodes}
        assert len(owned) == sum(len(nodes) for nodes in updates)
        left = [n for n in get_outputs(gm.graph).updates if n not in owned]
        assert all(node.args[0].meta["fqn"].endswith(".step") for node in left)
        assert bool(left) == name.startswith(COUNT_IN_VAIN)


@pytest.mark.parametrize("name", ["adamw-fused", "nadam-foreach", "sgd-momentum-loop"])
@pytest.mark.parametrize("model", ["gpt", "partial"])
def test_updates_may_move_apart(name: str, model: str) -> None:
    """Each set by itself to the end of the graph, the last first."""
    case = captured(name, model)
    gm = duplicate(case[0])
    for nodes in reversed(split_updates(gm, by_parts(gradients(gm), 3))):
        move_before(nodes, get_output(gm.graph))
    assert_same_run(gm, case[0], case)


@pytest.mark.parametrize("name", ["adamw-amsgrad-fused", "adam-decay-foreach"])
def test_the_others_stay_together(name: str) -> None:
    case = captured(name)
    gm = duplicate(case[0])
    found = gradients(gm)
    (update,) = split_updates(gm, [found[1:3]])
    lists = [n for n in gm.graph.nodes if isinstance(n.meta.get("val"), (list, tuple))]
    operators = [n for n in lists if n.meta["phase"] == "optimizer" and n.all_input_nodes]
    first = {n.name for n in update} & {n.name for n in operators}
    assert len(first) * 2 == len(operators)
    assert_same_run(gm, case[0], case)


@settings(max_examples=examples(8))
@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.data())
def test_any_partition(owners: list[int], data: st.DataObject) -> None:
    """Gradients with owner 0 are in no set."""
    name = data.draw(st.sampled_from(["adamw-fused", "adamw-amsgrad-foreach", "adagrad-foreach"]))
    case = captured_once(name)
    gm = duplicate(case[0])
    found = gradients(gm)
    sets = [[g for g, o in zip(found, owners, strict=True) if o == i] for i in (1, 2, 3)]
    updates = split_updates(gm, sets)
    assert [bool(nodes) for nodes in updates] == [bool(entries) for entries in sets]
    assert_closed(updates)
    assert_same_run(gm, case[0], case)
    size = len(gm.graph.nodes)
    again = split_updates(gm, sets)
    assert (again, len(gm.graph.nodes)) == (updates, size)


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach", "sgd-momentum-loop"])
def test_descendants_leave_the_graph_alone(name: str) -> None:
    """Nor does one owner of all divide anything."""
    gm, _ = captured(name)
    before = str(gm.graph)
    found = Descendants(gm.graph, by_parts(gradients(gm), 3))
    one = separate(gm.graph, found.elements, [0] * len(found.elements))
    assert str(gm.graph) == before
    assert one == {0: list(gm.graph.nodes)[:-1]}


@pytest.mark.parametrize("name", ["adamw-amsgrad-fused", "adamw-foreach"])
def test_any_owners(name: str) -> None:
    """Of entries that have nothing to do with one another too: parts with the bits of the whole."""
    case = captured(name)
    gm = duplicate(case[0])
    elements = Elements(gm.graph)
    draw = Random(0)
    owners = [draw.randrange(-1, 3) for _ in range(len(elements))]
    wanted = {n: {owners[e] for e in elements.of(n)} for n in elements.lists}
    parts = separate(gm.graph, elements, owners)
    lists = [node for node in gm.graph.nodes if is_list_operator(node)]
    assert len(lists) == sum(map(len, wanted.values())) > len(wanted)
    assert sorted(n for nodes in parts.values() for n in nodes) == list(gm.graph.nodes)[:-1]
    assert_same_run(gm, case[0], case)


def test_metadata_of_new_nodes() -> None:
    gm, _ = captured("adamw-fused")
    before = set(gm.graph.nodes)
    (whole,) = called(gm, aten._fused_adamw.tensor_lr)
    kept = {key: whole.meta[key] for key in ("phase", "source", "provenance")}
    split_updates(gm, [gradients(gm)[:2]])
    new = [node for node in gm.graph.nodes if node not in before]
    # Two optimizers, two step counters, and three lists of results of each optimizer.
    assert len(new) == 10
    for node in new:
        assert {key: node.meta[key] for key in kept} == kept


# ------------------------------------------------------------------------------ entangled sets


@pytest.mark.parametrize("name", ["adamw-foreach", "adam-fused", "sgd-momentum-loop"])
@pytest.mark.parametrize("step", [clip_norm, clip_loop])
def test_clipping_by_the_norm_entangles(name: str, step: Any) -> None:
    case = captured(name, step=step)
    gm = duplicate(case[0])
    first, second, third = split_updates(gm, by_parts(gradients(gm), 3))
    assert first is second is third
    assert_same_run(gm, case[0], case)


@pytest.mark.parametrize("name", ["adamw-foreach", "adam-fused", "sgd-momentum-loop"])
@pytest.mark.parametrize("step", [clip_value, step_keeping_gradients, manual_update])
def test_clipping_by_value_does_not(name: str, step: Any) -> None:
    case = captured(name, step=step)
    gm = duplicate(case[0])
    first, second = split_updates(gm, by_parts(gradients(gm), 2))
    assert first and set(first).isdisjoint(second)
    assert_closed([first, second])
    assert_same_run(gm, case[0], case)


def clip_body(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.layers.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_some_sets_are_entangled() -> None:
    case = captured("adamw-foreach", step=clip_body)
    gm = duplicate(case[0])
    of = {g.meta["val"].shape: g for g in gradients(gm)}
    matrix, bias, head = of[(16, 16)], of[(16,)], of[(4, 16)]
    first, second, third = split_updates(gm, [[matrix], [head], [bias]])
    assert first is third
    assert set(first).isdisjoint(second)
    assert_closed([first, second])
    assert_same_run(gm, case[0], case)


def test_parameters_of_one_storage_are_entangled() -> None:
    case = captured("adamw-foreach", "shared-storage")
    gm = duplicate(case[0])
    first, second = split_updates(gm, by_parts(gradients(gm), 2))
    assert first is second
    assert_same_run(gm, case[0], case)


# ------------------------------------------------------------------------------- several optimizers


def grouped(model: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": model.layers.parameters(), "weight_decay": 0.1},
        {"params": model.head.parameters(), "lr": 3e-2},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, foreach=True)


def test_parameter_groups() -> None:
    case = captured(grouped)
    gm = duplicate(case[0])
    before = len(gm.graph.nodes)
    found = gradients(gm)
    head = [g for g in found if g.meta["val"].shape[0] == 4]
    updates = split_updates(gm, [head, [g for g in found if g not in head]])
    assert len(gm.graph.nodes) == before, "the groups were apart before"
    assert_closed(updates)
    mixed = duplicate(case[0])
    assert_closed(split_updates(mixed, by_parts(gradients(mixed), 2)))
    assert_same_run(mixed, case[0], case)


class Pair:
    """Two optimizers that step one after the other."""

    def __init__(self, model: Any) -> None:
        self.first = torch.optim.AdamW(model.layers.parameters(), lr=1e-2, fused=True)
        self.second = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9, foreach=True)


def test_two_optimizers() -> None:
    torch.manual_seed(0)
    model = MODELS["mlp"].make()
    pair = Pair(model)

    def step(model: Any, first: Any, second: Any, x: Any, y: Any) -> Any:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    args = (model, pair.first, pair.second)
    for index in range(2):
        step(*args, *MODELS["mlp"].batch(index))
    gm = graphopt.capture(step, *args, *MODELS["mlp"].batch(2)).graph_module
    updates = split_updates(gm, by_parts(gradients(gm), 2))
    gm.graph.lint()
    assert_closed(updates)
    for nodes in updates:
        written = {n.args[0].meta["fqn"] for n in nodes if n.target is aten.copy_.default}
        assert {name.partition(".")[0] for name in written} >= {"layers", "head"}


def test_updates_begin_after_communication() -> None:
    torch.manual_seed(0)
    model = MODELS["mlp"].make()
    optimizer = OPTIMIZERS["adamw-foreach"](model.parameters())
    for index in range(2):
        train_step(model, optimizer, *MODELS["mlp"].batch(index))
    with one_rank():
        args = (model, optimizer, *MODELS["mlp"].batch(2))
        gm = graphopt.capture(train_step, *args, parallel=graphopt.DataParallel()).graph_module
    blocks = get_all_comm_blocks(gm)
    assert len(blocks) == 6
    updates = split_updates(gm, [block.outputs for block in blocks])
    assert_closed(updates)
    for block, nodes in zip(blocks, updates, strict=True):
        assert not any(is_collective(node) or is_wait(node) for node in nodes)
        assert set(nodes).isdisjoint(block.node_list)
        assert len([n for n in nodes if n.target is aten.copy_.default]) == 4


# ------------------------------------------------------------------------------ drawn by hand


def test_what_no_set_owns() -> None:
    """Hyperparameters, what two sets read, what the user gets, and what other data decide."""
    s = Sheet(2)
    lr = s.input("lr", kind="hyperparameter")
    first, second = s.gradients()
    rate = s.call(aten.neg.default, lr)
    shared = s.call(aten.add.Tensor, s.steps[0], 1)
    seen = s.call(aten.mul.Tensor, s.moments[1], 0.9)
    other = s.call(aten.mul.Tensor, s.squares[1], s.x)
    own = s.call(aten.mul.Tensor, s.moments[0], 0.9)
    a1 = s.call(aten.mul.Tensor, first, own)
    a2 = s.call(aten.mul.Tensor, a1, shared)
    b1 = s.call(aten.mul.Tensor, second, seen)
    b2 = s.call(aten.mul.Tensor, b1, shared)
    b3 = s.call(aten.mul.Tensor, b2, other)
    b4 = s.call(aten.mul.Tensor, b3, rate)
    states = [*s.weights, *s.moments, s.steps[0], s.squares[1]]
    copies = s.store(states, [a2, b4, own, seen, shared, other])
    gm, _ = s.finish(seen)
    updates = split_updates(gm, [[first], [second]])
    assert updates == [[own, a1, a2, copies[0], copies[2]], [b1, b2, b3, b4, copies[1]]]


def test_a_counter_read_before_it_counts() -> None:
    """Its new value is read by nothing but its copy, which must not overtake the reader."""
    s = Sheet(2)
    first, second = s.gradients()
    value = s.call(aten.mul.Tensor, first, s.steps[0])
    count = s.call(aten.add.Tensor, s.steps[0], 1)
    alone = s.call(aten.add.Tensor, s.steps[1], 1)
    copies = s.store([s.weights[0], s.steps[0], s.steps[1]], [value, count, alone])
    gm, _ = s.finish()
    updates = split_updates(gm, [[first], [second]])
    assert updates == [[value, count, *copies[:2]], []]


def test_a_counter_that_two_sets_read_before_it_counts() -> None:
    s = Sheet(2)
    grads = s.gradients()
    values = [s.call(aten.mul.Tensor, grad, s.steps[0]) for grad in grads]
    count = s.call(aten.add.Tensor, s.steps[0], 1)
    s.store([*s.weights, s.steps[0]], [*values, count])
    gm, _ = s.finish()
    first, second = split_updates(gm, [[grad] for grad in grads])
    assert first is second
    assert count in first


def test_lists_read_as_a_whole_are_not_divided() -> None:
    """What reads a list as one value needs all of it."""
    s = Sheet(3)
    grads = s.gradients()
    scaled = s.call(aten._foreach_mul.Scalar, grads, 2.0)
    new = s.items(aten._foreach_add.List, scaled, s.weights)
    s.store(s.weights, new)
    case = s.finish()
    gm = duplicate(case[0])
    matching = [n for n in gm.graph.nodes if n.target is aten.mul.Tensor]
    first, second = split_updates(gm, [matching[:1], matching[1:]])
    assert first is second
    assert len(called(gm, aten._foreach_mul.Scalar)) == 1
    assert_same_run(gm, case[0], case)


# ------------------------------------------------------------------------------------ refused


def test_sets_that_overlap() -> None:
    gm, _ = captured("sgd-foreach")
    found = gradients(gm)
    with pytest.raises(OptimizerSplitError, match="is in sets 0 and 1"):
        split_updates(gm, [found[:2], found[1:3]])


def test_a_node_of_another_graph() -> None:
    gm, _ = captured("sgd-foreach")
    foreign = gradients(duplicate(gm))
    with pytest.raises(OptimizerSplitError, match="is not a node of this graph"):
        split_updates(gm, [foreign[:1]])


@pytest.mark.parametrize("target", [aten._foreach_add_.List, aten.add_.Tensor])
def test_in_place_operators(target: Any) -> None:
    s = Sheet(2)
    grads = s.gradients()
    if target is aten.add_.Tensor:
        s.updates = [s.call(target, w, g) for w, g in zip(s.weights, grads, strict=True)]
    else:
        s.call(target, s.weights, grads)
    gm, _ = s.finish()
    size = len(gm.graph.nodes)
    with pytest.raises(OptimizerSplitError, match="in place"):
        split_updates(gm, [grads[:1]])
    assert len(gm.graph.nodes) == size


def test_in_place_lists_that_belong_to_no_set() -> None:
    """What they write has nothing to do with gradients."""
    s = Sheet(2)
    counted = s.call(aten._foreach_add_.Scalar, s.squares, 1.0)
    s.store(s.weights, s.items(aten._foreach_mul.List, s.gradients(), s.weights))
    case = s.finish()
    gm = duplicate(case[0])
    updates = split_updates(gm, [[grad] for grad in called(gm, aten.mul.Tensor)])
    assert len(called(gm, aten._foreach_mul.List)) == 2
    assert counted.name not in {node.name for nodes in updates for node in nodes}
    assert_closed(updates)
    assert_same_run(gm, case[0], case)


def test_late_nodes() -> None:
    gm = IterGraphModule(captured("sgd-foreach")[0])
    found = gradients(gm)
    (late,) = split_updates(gm, [found])
    start = next(node for node in gm.graph.nodes if node.op == "call_function")
    gm.graph.move_to_next_iter_before(late, start)
    size = len(gm.graph.nodes)
    with pytest.raises(GraphOptError, match="runs one iteration late"):
        split_updates(gm, [found[:2]])
    assert len(gm.graph.nodes) == size


def test_late_nodes_before_an_operator() -> None:
    """New operators would stand before the late nodes that must precede them."""
    s = Sheet(2)
    early = s.call(aten.mul.Tensor, s.squares[0], s.x)
    copies = s.store(s.moments[:1], [early])
    lists = s.items(aten._foreach_mul.List, s.gradients(), s.weights)
    s.store(s.weights, lists)
    gm = IterGraphModule(s.finish()[0])
    names = {node.name: node for node in gm.graph.nodes}
    destination = names[lists[0].all_input_nodes[0].name]
    gm.graph.move_to_next_iter_before([names[copies[0].name]], destination)
    grad = destination.all_input_nodes[0]
    with pytest.raises(OptimizerSplitError, match="late nodes run before"):
        split_updates(gm, [[grad]])
