"""Orphan copies of an optimizer: which go, and which somebody reads."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

import graphopt
from graphopt.graph_utils import find_nodes, get_outputs, is_operator
from graphopt.iter_graph import IterGraphModule
from graphopt.passes import remove_copy_from_optimizer
from graphopt.testing import check_pass
from graphs import inputs_of, training_step
from sketch import Sketch, one_rank, targets, values_for
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


class Update(Sketch):
    """One gradient, and a list operator that updates two parameters with it."""

    def __init__(self) -> None:
        super().__init__()
        self.params = [self.input(name, 4, kind="parameter") for name in "pq"]
        self.x = self.input("x", 4, kind="user_input")
        self.gradient = self.wait(self.all_reduce(self.call(aten.neg.default, self.x)))
        gradients = [self.gradient, self.gradient]
        self.new = self.items(self.call(aten._foreach_add.List, self.params, gradients))
        self.updates = [self.copy(*pair) for pair in zip(self.params, self.new, strict=True)]

    def items(self, values: fx.Node) -> list[fx.Node]:
        return [self.call(operator.getitem, values, i) for i in range(2)]

    def copy(self, destination: fx.Node, value: fx.Node) -> fx.Node:
        return self.call(aten.copy_.default, destination, value)

    def check(self, removed: int, *results: fx.Node, carried: Any = ()) -> fx.GraphModule:
        """Finish the graph and run the pass, which is to remove so many orphans."""
        gm = self.step(results or [self.x], self.updates, carried)
        check_pass(gm, values_for(gm), remove_copy_from_optimizer, changes=removed)
        before = targets(gm).count("copy_")
        remove_copy_from_optimizer(gm)
        assert targets(gm).count("copy_") == before - removed
        assert get_outputs(gm.graph).updates == self.updates
        return gm


def test_golden() -> None:
    """A fused optimizer gives back gradients, which were copied into where they came from."""
    s = Sketch()
    p, m, v, step, x = (
        s.input(name, *shape) for name, *shape in (("p", 4), ("m", 4), ("v", 4), ("t",), ("x", 4))
    )
    gradient = s.call(aten.neg.default, x)
    settings: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
    settings |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
    fused = s.call(aten._fused_adam.default, [p], [gradient], [m], [v], [], [step], **settings)
    copies = []
    for index, old in enumerate((p, gradient, m, v)):
        item = s.call(operator.getitem, s.call(operator.getitem, fused, index), 0)
        copies.append(s.call(aten.copy_.default, old, item))
    gm = s.step([x], [copies[0], *copies[2:]])
    values = values_for(gm)
    values[2].abs_(), values[3].abs_()
    check_pass(
        gm,
        values,
        remove_copy_from_optimizer,
        changes=1,
        expect="""
        ── inputs ──
        %p  f32[4]
        %m  f32[4]
        %v  f32[4]
        %t  f32[]
        %x  f32[4]
        ── forward ──
        %neg_default = aten.neg.default(%x)  f32[4]
        %_fused_adam_default = aten._fused_adam.default([%p], [%neg_default], [%m], [%v], [], [%t], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-08, amsgrad=False, maximize=False)  ((f32[4]), (f32[4]), (f32[4]), (f32[4]), … 1 more)
        %getitem = operator.getitem(%_fused_adam_default, 0)  (f32[4])
        %getitem_1 = operator.getitem(%getitem, 0)  f32[4]
        ● %copy__default = aten.copy_.default(%p, %getitem_1)  f32[4]
        %getitem_4 = operator.getitem(%_fused_adam_default, 2)  (f32[4])
        %getitem_5 = operator.getitem(%getitem_4, 0)  f32[4]
        ● %copy__default_2 = aten.copy_.default(%m, %getitem_5)  f32[4]
        %getitem_6 = operator.getitem(%_fused_adam_default, 3)  (f32[4])
        %getitem_7 = operator.getitem(%getitem_6, 0)  f32[4]
        ● %copy__default_3 = aten.copy_.default(%v, %getitem_7)  f32[4]
        ── output ──
        results: [%x]
        updates: [%copy__default, %copy__default_2, %copy__default_3]
        carried: []
        """,  # noqa: E501
    )


def test_copy_into_a_gradient_goes() -> None:
    u = Update()
    u.copy(u.gradient, u.new[0])
    u.check(1)


def test_copy_through_a_view_goes_with_the_view() -> None:
    u = Update()
    u.copy(u.call(aten.view.default, u.gradient, [4]), u.new[0])
    gm = u.check(1)
    assert "view" not in targets(gm)


def test_two_copies_into_one_gradient_go() -> None:
    u = Update()
    for new in u.new:
        u.copy(u.gradient, new)
    u.check(2)


def test_ancestors_go_with_the_copy() -> None:
    u = Update()
    decayed = u.items(u.call(aten._foreach_mul.Scalar, u.params, 0.5))
    u.copy(u.gradient, decayed[0])
    gm = u.check(1)
    assert "_foreach_mul" not in targets(gm)
    assert "_foreach_add" in targets(gm)


def test_copy_that_is_read_later_stays() -> None:
    u = Update()
    u.copy(u.gradient, u.new[0])
    u.check(0, u.call(aten.exp.default, u.gradient))


def test_copy_that_is_read_through_an_alias_stays() -> None:
    u = Update()
    view = u.call(aten.view.default, u.gradient, [2, 2])
    u.copy(u.gradient, u.new[0])
    u.check(0, u.call(aten.exp.default, view))


def test_copy_into_what_leaves_the_graph_stays() -> None:
    u = Update()
    view = u.call(aten.view.default, u.gradient, [2, 2])
    u.copy(u.gradient, u.new[0])
    u.check(0, carried=[view])


@pytest.mark.parametrize("kind", ["parameter", "optimizer_state", "user_input", None])
def test_copy_into_an_input_stays(kind: str | None) -> None:
    """The next iteration reads it, or the user does."""
    s = Sketch()
    states = [s.input(name, 4, kind=kind) for name in "st"]
    new = s.call(aten._foreach_mul.Scalar, states, 0.5)
    s.call(aten.copy_.default, states[0], s.call(operator.getitem, new, 0))
    gm = s.step([s.call(operator.getitem, new, 1)])
    check_pass(gm, values_for(gm), remove_copy_from_optimizer, changes=0)


def test_copy_into_a_constant_of_the_module_stays() -> None:
    s = Sketch()
    x = s.input("x", 4)
    new = s.call(aten._foreach_mul.Scalar, [x], 0.5)
    constant = s.graph.get_attr("constant")
    constant.meta["val"] = x.meta["val"].new_zeros(4)
    s.call(aten.copy_.default, constant, s.call(operator.getitem, new, 0))
    s.graph.output(([x], [], []))
    gm = fx.GraphModule({"constant": torch.zeros(4)}, s.graph)
    remove_copy_from_optimizer(gm)
    assert "copy_" in targets(gm)


def overwritten(*, read_between: bool = False, another_region: bool = False) -> fx.GraphModule:
    """An orphan that updates a state, and the update that is listed after it."""
    s = Sketch()
    state, x = s.input("state", 4), s.input("x", 4)
    new = s.call(operator.getitem, s.call(aten._foreach_mul.Scalar, [x], 0.5), 0)
    destination = s.call(aten.view.default, state, [2, 2]) if another_region else state
    value = s.call(aten.view.default, new, [2, 2]) if another_region else new
    s.call(aten.copy_.default, destination, value)
    results = [s.call(aten.exp.default, state)] if read_between else [x]
    return s.step(results, [s.call(aten.copy_.default, state, x)])


def test_copy_that_is_overwritten_before_any_read_goes() -> None:
    gm = overwritten()
    check_pass(gm, values_for(gm), remove_copy_from_optimizer, changes=1)


@pytest.mark.parametrize("options", [{"read_between": True}, {"another_region": True}], ids=str)
def test_copy_that_may_be_read_before_it_is_overwritten_stays(options: dict[str, bool]) -> None:
    gm = overwritten(**options)
    check_pass(gm, values_for(gm), remove_copy_from_optimizer, changes=0)


def test_copies_of_other_operators_stay() -> None:
    u = Update()
    u.copy(u.gradient, u.call(aten.exp.default, u.x))
    u.check(0)


@pytest.mark.parametrize(("distance", "removed"), [(4, 1), (5, 0)])
def test_copies_far_from_an_optimizer_stay(distance: int, removed: int) -> None:
    u = Update()
    value = u.new[0]
    for _ in range(distance - 1):
        value = u.call(aten.sin.default, value)
    u.copy(u.gradient, value)
    u.check(removed)


def test_late_copies_stay() -> None:
    u = Update()
    orphan = u.copy(u.gradient, u.new[0])
    gm = IterGraphModule(u.step([u.x], u.updates))
    late = [n for n in gm.graph.nodes if n.name == orphan.name]
    destination = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::neg"))[0]
    gm.graph.move_to_next_iter_before(late, destination)
    remove_copy_from_optimizer(gm)
    assert set(late) <= set(gm.graph.nodes)


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "loop"])
def test_listed_updates_stay(optimizer: str) -> None:
    gm = training_step(2, optimizer=optimizer)
    check_pass(gm, inputs_of(gm), remove_copy_from_optimizer, changes=0)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-momentum-foreach"])
def test_captured_steps_have_no_orphans(optimizer: str) -> None:
    model = MODELS["mlp"].make()
    optimizer_ = OPTIMIZERS[optimizer](model.parameters())
    arguments = [model, optimizer_, *MODELS["mlp"].batch(0)]
    record = check_pass(train_step, arguments, remove_copy_from_optimizer, may_change_nothing=True)
    assert (record.changes, record.copies_before) == (0, record.copies_after)


def test_twice_is_refused() -> None:
    gm = training_step(1)
    remove_copy_from_optimizer(gm)
    with pytest.raises(graphopt.PassOrderError, match="remove_copy_from_optimizer"):
        remove_copy_from_optimizer(gm)
