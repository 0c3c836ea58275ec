"""Edits of kinds that no other file has: wrong ones that have to be refused, and right ones, of the
kinds that passes make, that have to be accepted."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import fake_impls

import graphopt
from edit_tools import with_arg
from graphopt.errors import CaptureError, VerificationError
from graphopt.graph_utils import find_nodes, get_outputs, set_outputs
from graphopt.ir.families import FUSED_OPTIMIZERS
from graphopt.ir.operators import fused_optimizer
from graphopt.iter_graph import copy_graph
from graphopt.verify import check_divided, check_equivalence
from sketch import Sketch
from test_verify_edits_outside_terms import (
    applied,
    captured,
    first,
    given,
    input_that_lies,
    list_that_lies,
    lists,
    put_before,
)

aten = torch.ops.aten

Edit = Callable[[fx.GraphModule], Any]

DENSE = torch.contiguous_format


@pytest.fixture(autouse=True)
def _seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


# Wrong: what is computed


def one_of_a_product(_: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x * y)[0:1]


def one_of_a_quotient(_: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x / y)[0:1]


def computed_of_one(gm: fx.GraphModule) -> None:
    """Of two tensors the one element that is wanted is taken before they are combined."""
    taken, whole = first(gm, "slice"), first(gm, "mul", "div")
    parts = [put_before(taken, aten.slice.Tensor, operand, 0, 0, 1) for operand in whole.args]
    taken.replace_all_uses_with(put_before(taken, whole.target, *parts))


@pytest.mark.parametrize("function", [one_of_a_product, one_of_a_quotient])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_element_of_half_precision_and_a_whole_number(function: Any, dtype: Any) -> None:
    """Kernels round a whole number to half precision, but not where it is the only one."""
    tensors = torch.full((4,), 1.5, dtype=dtype), torch.full((4,), 2049)
    with pytest.raises(VerificationError):
        applied(captured(function, *tensors), computed_of_one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_element_of_one_dtype(dtype: Any) -> None:
    tensors = torch.full((4,), 1.5, dtype=dtype), torch.full((4,), 2049, dtype=dtype)
    applied(captured(one_of_a_product, *tensors), computed_of_one)


def test_a_tensor_that_is_an_argument_itself() -> None:
    """The text of a large tensor has a gap."""
    numbers = torch.zeros(5000)
    others = numbers.clone()
    others[2500] = 1
    graphs = []
    for held in (numbers, numbers, others):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.zeros(5000)
        node = graph.call_function(aten.add.Tensor, (x, held))
        node.meta["val"] = torch.zeros(5000)
        graph.output(([node], [], []))
        graphs.append(graph)
    assert check_equivalence(*graphs[:2]).ok
    assert not check_equivalence(*graphs[1:]).ok


ELSEWHERE = torch.device("meta")


def on_another_device(target: Any, *args: Any, moved: bool, **kwargs: Any) -> fx.Graph:
    """A call before or after its argument is copied to another device. It is not to be run."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(4)
    copy = (aten._to_copy.default, (), {"device": ELSEWHERE})
    for function, plain, named in [copy, (target, args, kwargs)][:: 1 if moved else -1]:
        value = function(node.meta["val"], *plain, **named)
        node = graph.call_function(function, (node, *plain), named)
        node.meta["val"] = value
    graph.output(([node], [], []))
    return graph


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "same"),
    [
        (aten.div.Tensor, (3.0,), {}, False),
        (aten._to_copy.default, (), {"dtype": torch.int64}, False),
        (aten._to_copy.default, (), {"dtype": torch.bfloat16}, True),
        (aten.view.default, ([2, 2],), {}, True),
    ],
    ids=["quotient", "whole", "half", "view"],
)
def test_what_another_device_computes(target: Any, args: Any, kwargs: Any, same: bool) -> None:
    """A number is divided by with its inverse there; what is too large is another integer."""
    graphs = [on_another_device(target, *args, moved=moved, **kwargs) for moved in (False, True)]
    assert check_equivalence(*graphs).ok == same
    assert check_equivalence(graphs[0], graphs[0]).ok


def filled(_: Any, x: Tensor) -> Tensor:
    return torch.full((4,), 2**60 + 2**36 + 1, dtype=torch.float32) + x


def test_a_whole_number_that_a_float_rounds_once_more() -> None:
    def edit(gm: fx.GraphModule) -> None:
        node = first(gm, "full")
        with_arg(node, 1, float(node.args[1]))

    gm = captured(filled, torch.ones(4))
    before = first(gm, "full")
    number = before.args[1]
    exact, rounded = (torch.full((1,), n, dtype=torch.float32) for n in (number, float(number)))
    assert exact != rounded
    with pytest.raises(VerificationError):
        applied(gm, edit)


def scaled(_: Any, x: Tensor) -> Any:
    return torch._foreach_mul([x], 2.0)[0], x[:, 0:2] * 2


def factor(gm: fx.GraphModule) -> None:
    with_arg(first(gm, "_foreach_mul"), 1, 3.0)


def columns(gm: fx.GraphModule) -> None:
    node = find_nodes(gm.graph, lambda n: n.target is aten.slice.Tensor)[-1]
    node.args = (node.args[0], 1, 1, 3)


@pytest.mark.parametrize("level", ["equivalence", "dependencies"])
@pytest.mark.parametrize("edit", [factor, columns])
def test_numbers_of_what_is_kept(edit: Edit, level: str) -> None:
    with pytest.raises(VerificationError):
        applied(captured(scaled, torch.ones(4, 4)), edit, level)


def read_by_strides(_: Any, x: Tensor, y: Tensor) -> Any:
    """The first two elements of a storage are those behind them as well."""
    whole = torch.cat([x, x, y])
    return whole[0:2].as_strided((3,), (1,)) * 1.0, whole[2:4] * 2.0


def from_another_place(gm: fx.GraphModule) -> None:
    """A slice whose metadata says that it begins where the other one does."""
    node = first(gm, "as_strided")
    old = node.args[0]
    new = put_before(node, aten.slice.Tensor, old.args[0], 0, 2, 4)
    new.meta["val"] = old.meta["val"]
    with_arg(node, 0, new)


def test_where_a_slice_begins() -> None:
    gm = captured(read_by_strides, torch.randn(2), torch.randn(2))
    with pytest.raises(VerificationError):
        applied(gm, from_another_place)


# Wrong: metadata


def scaled_lists(_: Any, x: Tensor, y: Tensor) -> Any:
    one, other = torch._foreach_mul([x.t(), y], 2.0)
    return one.contiguous(), other


def strides_that_lie(gm: fx.GraphModule) -> None:
    node, dense = first(gm, "_foreach_mul"), first(gm, "clone")
    new = put_before(node, node.target, *node.args)
    new.meta["val"] = [dense.meta["val"], *new.meta["val"][1:]]
    dense.replace_all_uses_with(put_before(node, operator.getitem, new, 0))


def test_strides_of_an_entry_of_a_list() -> None:
    gm = captured(scaled_lists, torch.randn(4, 4), torch.randn(4))
    with pytest.raises(VerificationError, match=r"says float32.* for entry 0"):
        applied(gm, strides_that_lie)


def test_a_list_of_metadata_that_is_changed_itself() -> None:
    gm = captured(scaled_lists, torch.randn(4, 4), torch.randn(4))
    node = first(gm, "_foreach_mul")
    before = list(node.meta["val"])

    def edit(gm: fx.GraphModule) -> None:
        node.meta["val"][0] = node.meta["val"][1]

    with pytest.raises(VerificationError, match="changed a list of metadata itself"):
        applied(gm, edit)
    assert all(map(operator.is_, first(gm, "_foreach_mul").meta["val"], before))


def copied(_: Any, x: Tensor) -> Tensor:
    return (x.t() * 2).clone()


def dense_by_name(gm: fx.GraphModule) -> None:
    first(gm, "clone").target = aten.contiguous.default


def test_strides_of_what_was_called_before() -> None:
    """Strides that the capture has seen are those of another operator's result."""

    gm = captured(copied, torch.randn(4, 4))
    assert first(gm, "clone").meta["val"].stride() == (1, 4)
    with pytest.raises(VerificationError, match=r"meta\['val'\] says"):
        applied(gm, dense_by_name)


@pytest.mark.parametrize("name", ["held", "returned", "kind", "placement", "held_somewhere"])
def test_who_holds_an_input(name: str) -> None:
    gm = captured(lambda m, x: m.table + x, torch.ones(4, 4))
    had = dict(given(gm, "table").meta)

    def edit(gm: fx.GraphModule) -> None:
        given(gm, "table").meta[name] = "another"

    with pytest.raises(VerificationError, match=f"it changed meta.*{name}"):
        applied(gm, edit)
    assert given(gm, "table").meta == had


def put_in_place(edit: Edit) -> Edit:
    """The same in a copy of the graph that takes its place."""

    def edited(gm: fx.GraphModule) -> None:
        gm.graph = copy_graph(gm.graph)[0]
        edit(gm)

    return edited


@pytest.mark.parametrize("level", ["equivalence", "dependencies"])
@pytest.mark.parametrize(
    ("function", "tensors", "edit"),
    [
        (lists, (torch.ones(4, 4), torch.ones(4)), list_that_lies),
        (lambda _, x: x.view(16).sum(0), (torch.ones(4, 4),), input_that_lies),
        (scaled_lists, (torch.ones(4, 4), torch.ones(4)), strides_that_lie),
        (copied, (torch.randn(4, 4),), dense_by_name),
    ],
    ids=["list", "input", "strides", "operator"],
)
def test_a_graph_in_place_of_another(function: Any, tensors: Any, edit: Edit, level: str) -> None:
    with pytest.raises(VerificationError, match=r"meta\['val'\] says"):
        applied(captured(function, *tensors), put_in_place(edit), level)


@pytest.mark.parametrize("level", ["equivalence", "dependencies"])
def test_a_function_with_effects_in_another_graph(level: str) -> None:
    def edit(gm: fx.GraphModule) -> None:
        zeros = first(gm, "zeros_like")
        changed = put_before(zeros, aten.mul.Tensor, zeros.args[0], zeros.args[0])
        changed.target = operator.iadd
        with_arg(zeros, 0, changed)

    gm = captured(zeros_and_more, torch.ones(4, 4))
    with pytest.raises(VerificationError, match="a Python function, of which nothing is known"):
        applied(gm, put_in_place(edit), level)


@pytest.mark.parametrize("level", ["equivalence", "dependencies"])
def test_the_same_graph_in_place_of_another(level: str) -> None:
    gm = captured(scaled_lists, torch.randn(4, 4), torch.randn(4))
    applied(gm, put_in_place(lambda gm: None), level)


# Wrong: what results share


def two_names(_: Any, x: Tensor) -> Any:
    y = x * 2
    return y, y.view(-1)


def test_results_that_share_their_storage() -> None:
    def edit(gm: fx.GraphModule) -> None:
        outputs, output = get_outputs(gm.graph), list(gm.graph.nodes)[-1]
        outputs.results[1] = put_before(output, aten.clone.default, outputs.results[1])
        set_outputs(gm.graph, outputs)

    gm = captured(two_names, torch.ones(4, 4))
    with pytest.raises(VerificationError, match="result 1 does not share the storage of result 0"):
        applied(gm, edit)


# Wrong: what is no node of the graph


def product(_: Any, x: Tensor) -> Any:
    return x * 2.0, x + 1


def with_a_part(nested: bool) -> fx.GraphModule:
    """The product stands in a submodule, or in a submodule of one."""
    gm = captured(product, torch.ones(4))
    node = first(gm, "mul")
    part = _part_of(node)
    if nested:
        body = fx.Graph()
        inside = body.placeholder("given")
        call = body.call_module("inner", (inside,))
        for new in (inside, call):
            new.meta["val"] = node.meta["val"]
        body.output(call)
        part = fx.GraphModule({"inner": part}, body)
    gm.add_submodule("part", part)
    with gm.graph.inserting_before(node):
        new = gm.graph.call_module("part", (node.args[0],))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _part_of(node: fx.Node) -> fx.GraphModule:
    body = fx.Graph()
    inside = body.placeholder("given")
    inside.meta["val"] = node.args[0].meta["val"]  # type: ignore[union-attr]
    body.output(body.node_copy(node, lambda _: inside))
    return fx.GraphModule(nn.Module(), body)


@pytest.mark.parametrize("level", ["equivalence", "dependencies"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_graph_of_a_part(nested: bool, level: str) -> None:
    def edit(gm: fx.GraphModule) -> None:
        part = gm.part.inner if nested else gm.part
        (node,) = find_nodes(part.graph, lambda n: n.target is aten.mul.Tensor)
        with_arg(node, 1, 3.0)
        part.recompile()

    gm = with_a_part(nested)
    x = torch.ones(4)
    inputs = [x if n.op == "placeholder" else None for n in gm.graph.nodes if n.op == "placeholder"]
    before = gm(*inputs)[0][0]
    with pytest.raises(VerificationError, match="the part part of the module is another one"):
        applied(gm, edit, level)
    assert torch.equal(gm(*inputs)[0][0], before)


class Exchanging(fx.graph.CodeGen):
    """Writes one name for another."""

    def generate_output(self, *args: Any, **kwargs: Any) -> str:
        return super().generate_output(*args, **kwargs).replace("mul", "add")


def test_how_code_is_written() -> None:
    def edit(gm: fx.GraphModule) -> None:
        gm.graph.set_codegen(Exchanging())
        gm.recompile()

    with pytest.raises(VerificationError, match="how the code of the graph is written"):
        applied(captured(product, torch.ones(4)), edit)


# Wrong: what ends the step


def zeros_and_more(_: Any, x: Tensor) -> Any:
    return torch.zeros_like(x) + x, x * 1.5


def asserted(zeros: fx.Node) -> fx.Node:
    small = put_before(zeros, aten.lt.Scalar, zeros.args[0], 1e-3)
    every = put_before(zeros, aten.all.default, small)
    token = put_before(zeros, aten.empty.memory_format, [0])
    token = put_before(zeros, aten._functional_assert_async.msg, every, "large", token)
    return put_before(zeros, aten.new_empty.default, token, [4, 4])


def row_that_is_not_there(zeros: fx.Node) -> fx.Node:
    rows = put_before(zeros, aten.full.default, [4], 9, dtype=torch.int64)
    return put_before(zeros, aten.index_select.default, zeros.args[0], 0, rows)


@pytest.mark.parametrize("raising", [asserted, row_that_is_not_there])
def test_what_raises_where_only_a_shape_is_read(raising: Any) -> None:
    def edit(gm: fx.GraphModule) -> None:
        zeros = first(gm, "zeros_like")
        with_arg(zeros, 0, raising(zeros))

    with pytest.raises(VerificationError, match="raises an error for some values"):
        applied(captured(zeros_and_more, torch.ones(4, 4)), edit)


def test_the_same_rows_are_taken_twice() -> None:
    def edit(gm: fx.GraphModule) -> None:
        node = first(gm, "index")
        again = put_before(node, node.target, *node.args)
        for user in list(node.users)[1:]:
            user.replace_input_with(node, again)

    def rows(_: Any, x: Tensor, at: Tensor) -> Any:
        taken = x[at]
        return taken * 2, taken + 1

    applied(captured(rows, torch.ones(4, 4), torch.tensor([1, 2])), edit)


def drawn(zeros: fx.Node) -> fx.Node:
    dtype, device = torch.float32, torch.device("cpu")
    return put_before(
        zeros, torch.ops.prims.normal.default, [4, 4],
        mean=0.0, std=1.0, dtype=dtype, device=device, requires_grad=False,
    )  # fmt: skip


def drawn_evenly(zeros: fx.Node) -> fx.Node:
    dtype, device = torch.float32, torch.device("cpu")
    return put_before(
        zeros, torch.ops.prims.uniform.default, [4, 4],
        low=0.0, high=1.0, dtype=dtype, device=device, stride=[4, 1],
    )  # fmt: skip


@pytest.mark.parametrize("level", ["equivalence", "dependencies"])
@pytest.mark.parametrize("drawing", [drawn, drawn_evenly])
def test_what_draws_where_only_a_shape_is_read(drawing: Any, level: str) -> None:
    """Operators that torch does not say to be random; the generator goes on with each call."""

    def edit(gm: fx.GraphModule) -> None:
        zeros = first(gm, "zeros_like")
        with_arg(zeros, 0, drawing(zeros))

    gm = captured(zeros_and_more, torch.ones(4, 4))
    with pytest.raises(VerificationError, match="draw"):
        applied(gm, edit, level)


# Right


def rows_by_value(_: Any, x: Tensor, y: Tensor) -> Any:
    found = torch.unique(y)
    return torch.zeros(found.shape[0], 4) + x, torch.ones(found.shape[0])


def test_a_size_that_is_asked_for_twice() -> None:
    """What is made of no tensor but of a size by value has metadata of that size."""

    def edit(gm: fx.GraphModule) -> None:
        size = first(gm, "sym_size")
        again = put_before(size, size.target, *size.args)
        again.meta["val"] = size.meta["val"]
        size.append(again)
        for maker in (first(gm, "zeros"), first(gm, "ones")):
            maker.replace_input_with(size, again)

    gm = captured(rows_by_value, torch.ones(4), torch.tensor([3, 1, 3]))
    applied(gm, edit)
    assert first(gm, "sym_size").users


Function = Callable[..., Any]

PAIRS: dict[str, tuple[Function, Function]] = {
    "a sum the other way round": (lambda x, y: x + y, lambda x, y: y + x),
    "a product the other way round": (lambda x, y: x * y, lambda x, y: y * x),
    "a comparison the other way round": (lambda x, y: x == y, lambda x, y: y == x),
    "halves beside each other": (
        lambda x, y: x[:4] * x[4:],
        lambda x, y: torch.cat([x[:2] * x[4:6], x[2:4] * x[6:]]),
    ),
    "a list one by one": (
        lambda x, y: torch._foreach_mul([x, y], 0.3),
        lambda x, y: [x * 0.3, y * 0.3],
    ),
    "a number added to a list": (
        lambda x, y: torch._foreach_add([x, y], 0.3),
        lambda x, y: [x + 0.3, y + 0.3],
    ),
    "two lists one by one": (
        lambda x, y: torch._foreach_sub([x, y], [y, x]),
        lambda x, y: [x - y, y - x],
    ),
    "a number for each entry": (
        lambda x, y: torch._foreach_div([x, y], [3.0, 7.0]),
        lambda x, y: [x / 3.0, y / 7.0],
    ),
    "a list of parts": (
        lambda x, y: torch._foreach_sqrt([x, y]),
        lambda x, y: [p.clone() for p in torch._foreach_sqrt([torch.cat([x, y])])[0].split(8)],
    ),
    "rounded and back": (
        lambda x, y: x.bfloat16() * 2,
        lambda x, y: x.bfloat16().float().bfloat16() * 2,
    ),
    "through a wider dtype": (
        lambda x, y: x.half().double(),
        lambda x, y: x.half().float().double(),
    ),
    "a copied view": (
        lambda x, y: torch.view_copy(x, (2, 4)) * 2,
        lambda x, y: x.view(2, 4) * 2,
    ),
    "copies of transposes and slices": (
        lambda x, y: torch.slice_copy(torch.t_copy(x.view(2, 4)), 0, 1, 3) * 2,
        lambda x, y: x.view(2, 4).t()[1:3].contiguous() * 2,
    ),
}  # fmt: skip


def graph_of(function: Function, tensors: tuple[Tensor, ...]) -> fx.GraphModule:
    def step(_: nn.Module, x: Tensor, y: Tensor) -> Any:
        return function(x, y)

    return graphopt.capture(step, nn.Identity(), *tensors).graph_module


@pytest.mark.parametrize("name", PAIRS)
def test_one_way_for_another(name: str) -> None:
    tensors = torch.rand(8), torch.rand(8)
    before, after = (graph_of(function, tensors) for function in PAIRS[name])
    for one, other in zip(before(*tensors)[0], after(*tensors)[0], strict=True):
        assert torch.equal(one, other)
    report = check_equivalence(before, after)
    assert report.ok, str(report)


OTHERS: dict[str, tuple[Function, Function]] = {
    "a difference the other way round": (lambda x, y: x - y, lambda x, y: y - x),
    "a comparison the other way round": (lambda x, y: x < y, lambda x, y: y < x),
    "rounded on the way": (lambda x, y: x.double(), lambda x, y: x.half().double()),
    "halves exchanged": (lambda x, y: x[:4] / x[4:], lambda x, y: x[4:] / x[:4]),
    "parts beside others": (
        lambda x, y: x[:4] * x[4:],
        lambda x, y: torch.cat([x[:2] * x[4:6], x[2:4] * x[5:7]]),
    ),
    "an entry of another list": (
        lambda x, y: torch._foreach_mul([x, y], [0.3, 0.4]),
        lambda x, y: [x * 0.3, y * 0.3],
    ),
    "an entry added": (
        lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2),
        lambda x, y: [x + y, y + x],
    ),
    "rounded to whole numbers": (lambda x, y: x.int().float(), lambda x, y: x * 1.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_way_for_another_one(name: str) -> None:
    tensors = torch.rand(8) * 9, torch.rand(8) * 9
    before, after = (graph_of(function, tensors) for function in OTHERS[name])
    report = check_equivalence(before, after)
    assert not report.ok


def averaged(send: Callable[[Sketch, fx.Node, fx.Node], list[fx.Node]]) -> fx.GraphModule:
    """Two gradients that all ranks add up, and what is computed of the sums."""
    s = Sketch()
    sums = send(s, s.input("a", 4, 3), s.input("b", 4, 3))
    return s.step([s.call(aten.mul.Tensor, value, 0.5) for value in sums])


def sent(s: Sketch, value: fx.Node) -> fx.Node:
    return s.wait(s.all_reduce(value))


def one_by_one(s: Sketch, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    return [sent(s, a), sent(s, b)]


def side_by_side(s: Sketch, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    bucket = sent(s, s.call(aten.cat.default, [a, b], 1))
    return [s.call(aten.slice.Tensor, bucket, 1, start, start + 3) for start in (0, 3)]


def transposed(s: Sketch, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    found = []
    for value in (a, b):
        turned = s.call(aten.clone.default, s.call(aten.t.default, value), memory_format=DENSE)
        back = s.call(aten.t.default, sent(s, turned))
        found.append(s.call(aten.clone.default, back, memory_format=DENSE))
    return found


def exchanged(s: Sketch, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    return list(reversed(side_by_side(s, a, b)))


def sent_again(s: Sketch, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    found = side_by_side(s, a, b)
    sent(s, a)
    return found


def one_is_not_sent(s: Sketch, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    return [side_by_side(s, a, a)[0], b]


@pytest.mark.parametrize("send", [one_by_one, side_by_side, transposed])
def test_collectives_of_what_is_arranged(send: Any) -> None:
    report = check_equivalence(averaged(one_by_one), averaged(send))
    assert report.ok, str(report)
    assert check_equivalence(averaged(send), averaged(one_by_one)).ok


@pytest.mark.parametrize("send", [exchanged, sent_again, one_is_not_sent])
def test_collectives_of_something_else(send: Any) -> None:
    assert not check_equivalence(averaged(one_by_one), averaged(send)).ok


def beside_zeros(s: Sketch, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    """What comes back where this rank sends zeros, and other ranks may send something else."""
    found = []
    for value in (a, b):
        zeros = s.call(aten.zeros.default, [4, 1])
        bucket = sent(s, s.call(aten.cat.default, [value, zeros], 1))
        found.append(s.call(aten.slice.Tensor, bucket, 1, 3, 4))
    return found


def test_what_other_ranks_send_beside_what_is_sent() -> None:
    both = averaged(beside_zeros), averaged(lambda *args: list(reversed(beside_zeros(*args))))
    assert check_divided(both[0], averaged(beside_zeros)).ok
    assert not check_divided(*both).ok and not check_equivalence(*both).ok


def test_a_number_in_place_of_a_tensor() -> None:
    """Passes write `mul.Scalar` where the capture has written `mul.Tensor` with a number."""

    def edit(gm: fx.GraphModule) -> None:
        first(gm, "mul").target = aten.mul.Scalar

    applied(captured(product, torch.ones(4)), edit)


# Kernels that do not look at what they are given


FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


@pytest.mark.parametrize("position", [1, 2])
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_optimizer_gets_the_state_of_another_parameter(kind: str, position: int) -> None:
    """Of a small one: its kernel would read and write what lies behind."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def edit(gm: fx.GraphModule) -> None:
        update = find_nodes(gm.graph, lambda n: fused_optimizer(n.target) is not None)[0]
        large, small, *rest = update.args[position]  # type: ignore[misc]
        with_arg(update, position, [small, large, *rest])

    model = nn.Linear(600, 500)
    optimizer = FUSED[kind](model.parameters())
    gm = graphopt.capture(step, model, optimizer, torch.rand(2, 600)).graph_module
    with pytest.raises(VerificationError):
        applied(gm, edit)


def test_a_fused_optimizer_is_not_captured_with_tensors_of_other_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is its kernel run: by torch for want of a shape rule, or to see what strides it gives."""
    run = []
    kernel = fake_impls.run_fallback_kernel
    monkeypatch.setattr(
        fake_impls, "run_fallback_kernel", lambda *a: run.append(a[1]) or kernel(*a)
    )

    def step(model: nn.Module, x: Tensor) -> Tensor:
        gradient, state = x.sum(0), torch.zeros(2)
        torch._fused_adagrad_(
            [model.scale], [gradient], [state], [torch.ones(())],
            lr=0.1, lr_decay=0.0, weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip
        return x.mean()

    model = nn.Module()
    model.register_buffer("scale", torch.ones(100_000))
    with pytest.raises(CaptureError, match=r"shapes of state_sums are not those of what is upd"):
        graphopt.capture(step, model, torch.rand(2, 100_000))
    assert not run


@pytest.mark.parametrize("name", FUSED_OPTIMIZERS)
def test_fused_optimizers_have_shape_rules(name: str) -> None:
    """Torch runs the kernel of an operator without one."""
    captured(product, torch.ones(4))  # captures bring those that are missing
    packet = getattr(aten, f"{name}_")
    for form in packet.overloads():
        full = f"aten::{name}_" if form == "default" else f"aten::{name}_.{form}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(full, "Meta"), full
