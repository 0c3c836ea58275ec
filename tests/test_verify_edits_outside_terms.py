"""Edits of what terms do not speak of: names of arguments, metadata of inputs and of lists,
modules, functions with effects, constants and callbacks that no node shows. Each is wrong."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from edit_tools import with_arg
from graphopt.errors import VerificationError
from graphopt.graph_utils import (
    call_function_with_meta,
    find_nodes,
    get_outputs,
    is_operator,
    set_outputs,
)
from graphopt.host import host_call_of, is_host_call
from graphopt.manager import PassRegistry

aten = torch.ops.aten

Edit = Callable[[fx.GraphModule], Any]

LEVELS = ["equivalence", "dependencies"]


@pytest.fixture(autouse=True)
def _seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


class Buffered(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 4))


def captured(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    def step(model: nn.Module, *given: Tensor) -> Any:
        return function(model, *given)

    return graphopt.capture(step, Buffered(), *tensors).graph_module


def applied(gm: fx.GraphModule, edit: Edit, verify: str = "equivalence") -> None:
    def pass_(gm: fx.GraphModule) -> None:
        edit(gm)

    declared = graphopt.graph_optimization_pass(registry=PassRegistry())(pass_)
    graphopt.PassManager([declared], verify=verify).run(gm)


def first(gm: fx.GraphModule, *names: str) -> fx.Node:
    return find_nodes(
        gm.graph, lambda n: is_operator(n.target, *(f"aten::{name}" for name in names))
    )[0]


def given(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.target == name)


def put_before(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        return call_function_with_meta(node.graph, target, args, kwargs, like=node)


def by_name(node: fx.Node, source: fx.Node) -> fx.Node:
    """A view of `source` before a node, with its argument by name."""
    view = put_before(node, aten.alias.default, source)
    view.args, view.kwargs = (), {"self": source}
    return view


# Arguments by name


def read_then_added(model: Any, x: Tensor) -> Tensor:
    product = model.table * x
    model.table.add_(1)
    return product


def read_too_late(gm: fx.GraphModule) -> None:
    update, product = first(gm, "copy_"), first(gm, "mul")
    product.replace_input_with(update.args[0], by_name(update, update.args[0]))
    update.append(product)


def added_then_returned(model: Any, x: Tensor) -> Tensor:
    model.table.add_(x)
    return model.table.clone()


def returned_state(gm: fx.GraphModule) -> None:
    outputs, update = get_outputs(gm.graph), first(gm, "copy_")
    with gm.graph.inserting_after(update):
        view = call_function_with_meta(gm.graph, aten.alias.default, (), {"self": update})
    outputs.results[0] = view
    set_outputs(gm.graph, outputs)


@pytest.mark.parametrize("level", LEVELS)
def test_a_view_with_its_argument_by_name_is_a_view(level: str) -> None:
    gm = captured(read_then_added, torch.ones(4, 4))
    with pytest.raises(VerificationError, match="has overwritten it"):
        applied(gm, read_too_late, level)


def test_a_result_that_is_state_by_name() -> None:
    gm = captured(added_then_returned, torch.ones(4, 4))
    with pytest.raises(VerificationError, match="shares its storage with %table"):
        applied(gm, returned_state)


def test_a_view_with_its_arguments_by_name_is_accepted() -> None:
    gm = captured(lambda _, x: x.view(16) + 1, torch.ones(4, 4))

    def edit(gm: fx.GraphModule) -> None:
        view = first(gm, "view")
        view.args, view.kwargs = (), {"self": view.args[0], "size": [16]}

    applied(gm, edit)
    assert len(first(gm, "view").args) == 2


def reading_one_of_several(late: bool) -> fx.GraphModule:
    """The product reads what may be a view of the table, before or behind the table's update."""
    gm = captured(read_then_added, torch.ones(4, 4))
    product, update = first(gm, "mul"), first(gm, "copy_")
    several = put_before(product, aten.broadcast_tensors.default, list(product.args))
    with_arg(product, 0, put_before(product, operator.getitem, several, 0))
    if late:
        update.append(product)
    return gm


def test_what_may_be_a_view_of_one_of_several_is_not_read_behind_an_update() -> None:
    before, same, late = map(reading_one_of_several, (False, False, True))
    assert graphopt.verify.check_equivalence(before, same).ok
    report = graphopt.verify.check_equivalence(before, late)
    assert not report.ok and "may share the storage of a tensor that was updated" in str(report)


def turned(_: Any, x: Tensor) -> Tensor:
    return x.t().clone()


@pytest.mark.parametrize("copied", [True, False])
def test_what_may_be_a_view_of_one_of_several_is_no_result(copied: bool) -> None:
    def with_einsum(copied: bool) -> fx.GraphModule:
        gm = captured(turned, torch.ones(4, 4))
        copy = first(gm, "clone")
        source = given(gm, "given_0")
        view = put_before(copy, aten.einsum.default, "ij->ji", [source])
        with_arg(copy, 0, view)
        if not copied:
            copy.replace_all_uses_with(view)
        return gm

    report = graphopt.verify.check_equivalence(with_einsum(True), with_einsum(copied))
    assert report.ok == copied
    assert copied or "shares its storage with %given_0" in str(report)


# Metadata


def lists(_: Any, x: Tensor, y: Tensor) -> Any:
    first_, second = torch._foreach_mul([x, y], 2.0)
    return first_.view(16).sum(0), second


def list_that_lies(gm: fx.GraphModule) -> None:
    view, node = first(gm, "view"), first(gm, "_foreach_mul")
    new = put_before(node, node.target, *node.args)
    new.meta["val"] = [view.meta["val"], *new.meta["val"][1:]]
    view.replace_all_uses_with(put_before(node, operator.getitem, new, 0))


def input_that_lies(gm: fx.GraphModule) -> None:
    view = first(gm, "view", "clone")
    source = view.args[0]
    source.meta["val"] = view.meta["val"]
    view.replace_all_uses_with(source)


def constant_that_lies(gm: fx.GraphModule) -> None:
    view, old = first(gm, "view"), first(gm, "lift_fresh_copy").args[0]
    with gm.graph.inserting_before(old):
        new = gm.graph.get_attr(old.target)
    new.meta["val"] = view.meta["val"]
    view.replace_all_uses_with(put_before(view, aten.lift_fresh_copy.default, new))


def summed_constant(_: Any, x: Tensor) -> Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(4).sum(0) + x


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("function", "tensors", "edit"),
    [
        (lists, (torch.ones(4, 4), torch.ones(4)), list_that_lies),
        (lambda _, x: x.view(16).sum(0), (torch.ones(4, 4),), input_that_lies),
        (lambda _, x, y: x.contiguous() @ y, (torch.ones(3, 4).t(), torch.ones(3, 4)),
         input_that_lies),
        (summed_constant, (torch.ones(4, 4),), constant_that_lies),
    ],
    ids=["list", "shape", "strides", "constant"],
)  # fmt: skip
def test_metadata_that_lies(function: Any, tensors: Any, edit: Edit, level: str) -> None:
    with pytest.raises(VerificationError, match=r"meta\['val'\] says"):
        applied(captured(function, *tensors), edit, level)


# Functions and modules


def zeros_and_more(_: Any, x: Tensor, y: Tensor) -> Any:
    return torch.zeros_like(x) + y, x * 1.5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "function", [operator.iadd, nn.init.zeros_, torch.nn.functional.dropout, exec]
)
def test_functions_with_effects(function: Any, level: str) -> None:
    """Their results are read for their shapes alone."""

    def edit(gm: fx.GraphModule) -> None:
        zeros = first(gm, "zeros_like")
        changed = put_before(zeros, aten.mul.Tensor, zeros.args[0], zeros.args[0])
        changed.target = function
        with_arg(zeros, 0, changed)

    gm = captured(zeros_and_more, torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises(VerificationError, match="a Python function, of which nothing is known"):
        applied(gm, edit, level)


def doubled_in_a_part(call: Callable[[fx.GraphModule, Any], fx.Node]) -> Edit:
    """The product stands in a submodule, whose input has the name of an input of the graph."""

    def edit(gm: fx.GraphModule) -> None:
        product = first(gm, "mul")
        body = fx.Graph()
        inner = body.placeholder("given_0")
        inner.meta["val"] = product.meta["val"]
        body.output(body.node_copy(product, lambda _: inner))
        gm.add_submodule("part", fx.GraphModule(nn.Module(), body))
        with gm.graph.inserting_before(product):
            new = call(gm, given(gm, "given_1"))
        new.meta = dict(product.meta)
        product.replace_all_uses_with(new)

    return edit


def products(_: Any, x: Tensor, y: Tensor) -> Any:
    return x * 2, y + 1, y * 3


def test_a_part_gets_other_inputs_than_those_of_their_names() -> None:
    gm = captured(products, torch.ones(4, 4), torch.ones(4, 4))
    call = doubled_in_a_part(lambda gm, y: gm.graph.call_module("part", (), {"given_0": y}))
    with pytest.raises(VerificationError):
        applied(gm, call)


def added_constant(_: Any, x: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("same", [True, False])
def test_constants_of_a_part_are_its_own(same: bool) -> None:
    def edit(gm: fx.GraphModule) -> None:
        copy, node = first(gm, "lift_fresh_copy"), first(gm, "add")
        body, root = fx.Graph(), nn.Module()
        name = str(copy.args[0].target)
        constant = body.get_attr(name)
        constant.meta["val"] = copy.args[0].meta["val"]
        body.output(body.node_copy(copy, lambda _: constant))
        root.register_buffer(name, getattr(gm, name) * (1 if same else 2))
        gm.add_submodule("part", fx.GraphModule(root, body))
        with gm.graph.inserting_before(copy):
            new = gm.graph.call_module("part")
        new.meta = dict(copy.meta)
        node.replace_input_with(copy, new)
        with gm.graph.inserting_before(copy):  # the module keeps what its graph reads
            gm.graph.get_attr(name).meta = dict(copy.args[0].meta)

    gm = captured(added_constant, torch.ones(4, 4))
    if same:
        applied(gm, edit)
    else:
        with pytest.raises(VerificationError, match="result 0 is not what it was"):
            applied(gm, edit)


def with_two_parts() -> fx.GraphModule:
    """Two submodules that give a constant of their own, of one name."""
    gm = captured(products, torch.ones(4, 4), torch.ones(4, 4))
    for number, node in enumerate((first(gm, "mul"), first(gm, "add"))):
        body, root = fx.Graph(), nn.Module()
        root.register_buffer("held", torch.full((4, 4), number + 2.0))
        constant = body.get_attr("held")
        constant.meta["val"] = node.args[0].meta["val"]
        body.output(constant)
        gm.add_submodule(f"part_{number}", fx.GraphModule(root, body))
        with gm.graph.inserting_before(node):
            call = gm.graph.call_module(f"part_{number}")
        call.meta = dict(node.args[0].meta)
        with_arg(node, 0, call)
    gm.recompile()
    return gm


def test_constants_of_two_parts_are_two() -> None:
    def exchange(gm: fx.GraphModule) -> None:
        first_, second = find_nodes(gm.graph, lambda n: n.op == "call_module")
        first_.target, second.target = second.target, first_.target

    gm = with_two_parts()
    assert graphopt.verify.check_equivalence(gm, gm).ok
    with pytest.raises(VerificationError, match="is not what it was"):
        applied(gm, exchange)


# What no node shows


def constant_exchanged(gm: fx.GraphModule) -> None:
    name = str(find_nodes(gm.graph, lambda n: n.op == "get_attr")[0].target)
    setattr(gm, name, getattr(gm, name) * 2)


def constant_updated(gm: fx.GraphModule) -> None:
    name = str(find_nodes(gm.graph, lambda n: n.op == "get_attr")[0].target)
    getattr(gm, name).mul_(2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("edit", [constant_exchanged, constant_updated])
def test_a_constant_alone_is_another_one(edit: Edit, level: str) -> None:
    gm = captured(added_constant, torch.ones(4, 4))
    with pytest.raises(VerificationError, match="is another one, or was changed"):
        applied(gm, edit, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "value"), [("every", 2), ("fn", print), ("last", None)])
def test_a_callback_calls_what_it_called(name: str, value: Any, level: str) -> None:
    seen: list[float] = []

    def step(_: Any, x: Tensor) -> Tensor:
        graphopt.callback(seen.append, x.sum())
        return x * 2

    gm = captured(step, torch.ones(4, 4))
    (node,) = find_nodes(gm.graph, is_host_call)
    call = host_call_of(node)
    assert call is not None
    held = getattr(call, name)

    def edit(gm: fx.GraphModule) -> None:
        setattr(call, name, value)

    with pytest.raises(VerificationError, match="what a callback calls, or when"):
        applied(gm, edit, level)
    assert getattr(call, name) is held


def test_a_callback_that_another_node_calls() -> None:
    def step(_: Any, x: Tensor) -> Tensor:
        graphopt.callback(print, x.sum())
        return x * 2

    gm = captured(step, torch.ones(4, 4))
    (node,) = find_nodes(gm.graph, is_host_call)
    call = host_call_of(node)
    assert call is not None

    def edit(gm: fx.GraphModule) -> None:
        assert call is not None
        call.every = 3
        with gm.graph.inserting_before(node):
            gm.graph.node_copy(node, lambda source: source)
        gm.graph.erase_node(node)

    with pytest.raises(VerificationError, match="what a callback calls, or when"):
        applied(gm, edit)
    assert call.every == 1


def test_hooks_of_a_part() -> None:
    gm = captured(products, torch.ones(4, 4), torch.ones(4, 4))
    doubled_in_a_part(lambda gm, _: gm.graph.call_module("part", (given(gm, "given_0"),)))(gm)
    with pytest.raises(VerificationError, match="a hook of the module"):
        applied(gm, lambda gm: gm.part.register_forward_hook(lambda *_: None))
    assert not gm.part._forward_hooks


def test_hooks_of_the_module() -> None:
    gm = captured(added_constant, torch.ones(4, 4))
    with pytest.raises(VerificationError, match="a hook of the module"):
        applied(gm, lambda gm: gm.register_forward_hook(lambda *_: None))
    assert not gm._forward_hooks


# Effects and random numbers


def test_an_assertion_that_may_fail() -> None:
    def edit(gm: fx.GraphModule) -> None:
        product = first(gm, "mul")
        small = put_before(product, aten.lt.Scalar, product.args[0], 1e-3)
        put_before(
            product, aten._assert_async.msg, put_before(product, aten.all.default, small), ""
        )

    gm = captured(products, torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises(VerificationError, match="may end the step, which it could not before"):
        applied(gm, edit)


def dropped_in_place(_: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x.t().clone(), 0.5, True, inplace=True)


def drawn_plainly(gm: fx.GraphModule) -> None:
    """Draw for a dense tensor, and copy that to the strides of the one before."""
    plain = torch.ops.graphopt_inplace.bernoulli_float.default
    (node,) = find_nodes(gm.graph, lambda n: n.target is plain)
    drawn = put_before(node, aten.bernoulli.p, node.args[0], 0.5)
    turned = put_before(node, aten.t.default, drawn)
    dense = put_before(node, aten.clone.default, turned, memory_format=torch.contiguous_format)
    node.replace_all_uses_with(put_before(node, aten.t.default, dense))
    gm.graph.erase_node(node)


def test_random_numbers_follow_the_strides_that_are_written() -> None:
    x = torch.randn(3, 4)
    gm = captured(dropped_in_place, x)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [x if n.target == "given_0" else torch.zeros(4, 4) for n in inputs]
    torch.manual_seed(0)
    before = gm(*values)[0][0]
    other = captured(dropped_in_place, x)
    drawn_plainly(other)
    other.recompile()
    torch.manual_seed(0)
    assert not torch.equal(before, other(*values)[0][0])
    with pytest.raises(VerificationError):
        applied(gm, drawn_plainly)
    assert not graphopt.verify.check_equivalence(gm, other).ok
