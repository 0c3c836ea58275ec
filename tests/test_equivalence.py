"""Equivalence of graphs: what is proven, what is refused, and that the rules are true."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import graphopt
from graphopt import _compat
from graphopt.graph_utils import (
    call_function_with_meta,
    find_nodes,
    get_outputs,
    is_collective,
    is_operator,
    is_wait,
    set_outputs,
)
from graphopt.iter_graph import IterGraphModule
from graphopt.verify import check_equivalence
from graphopt.verify.symbolic.evaluation import evaluate_graph
from graphopt.verify.values.terms import Segment, TensorValue, Terms
from sketch import one_rank
from slices import examples
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

PASSES = [
    ("remove_copy_from_optimizer", {}),
    ("comm_fusion_with_concat", {"bucket_size_mb": 0.002}),
    ("schedule_comm_wait", {}),
    ("iter_move_grads_and_optimizers", {"held_back": 0.33}),
]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def captured(model: str = "mlp", optimizer: str = "adamw-fused") -> IterGraphModule:
    made = MODELS[model].make()
    args = (made, OPTIMIZERS[optimizer](made.parameters()), *MODELS[model].batch(0))
    train_step(*args)
    found = graphopt.capture(train_step, *args, parallel=graphopt.DataParallel())
    return IterGraphModule(found.graph_module)


@pytest.fixture(scope="module")
def plain() -> IterGraphModule:
    return captured()


@pytest.fixture(scope="module")
def bucketed(plain: IterGraphModule) -> IterGraphModule:
    gm = IterGraphModule(plain)
    graphopt.PassManager(PASSES[:3], verify="off").run(gm)
    return gm


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("mlp", "adamw-fused"),
        ("mlp", "adamw-foreach"),
        ("mlp", "nadam-loop"),
        ("mlp", "sgd-momentum-foreach"),
        ("gpt", "adamw-fused"),
        ("convnet", "sgd-momentum-loop"),
        ("shared-storage", "adamw-fused"),
        ("recurrent", "adamw-fused"),
    ],
)
def test_shipped_passes(model: str, optimizer: str) -> None:
    """Each pass by itself, and all together: late work is shown by the graphs that run."""
    gm = captured(model, optimizer)
    first = IterGraphModule(gm)
    for entry in PASSES:
        before = IterGraphModule(gm)
        graphopt.PassManager([entry], verify="off").run(gm)
        assert str(check_equivalence(before, gm)).startswith("both graphs compute the same")
    assert gm.graph.late
    assert check_equivalence(first, gm).ok


def test_a_graph_equals_itself(plain: IterGraphModule) -> None:
    report = check_equivalence(plain, plain)
    assert report.ok and not report.reorders_sums


# Edits that change what is computed


def first(gm: fx.GraphModule, *names: str) -> fx.Node:
    return find_nodes(gm.graph, lambda node: is_operator(node.target, *names))[0]


def last(gm: fx.GraphModule, *names: str) -> fx.Node:
    return find_nodes(gm.graph, lambda node: is_operator(node.target, *names))[-1]


def after(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Let all readers of `node` read ``target(node, *args)``."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        new = call_function_with_meta(node.graph, target, (node, *args), like=node)
    for user in users:
        user.replace_input_with(node, new)
    return new


def launch(gm: fx.GraphModule) -> fx.Node:
    return next(filter(is_collective, gm.graph.nodes))


def wait(gm: fx.GraphModule) -> fx.Node:
    return next(filter(is_wait, gm.graph.nodes))


def reduced_again(gm: fx.GraphModule) -> None:
    node = wait(gm)
    again = after(node, c10d.all_reduce.default, "sum", node.args[0].args[2])
    after(again, c10d.wait_tensor.default)


def reduced_for_nobody(gm: fx.GraphModule) -> None:
    node = launch(gm)
    with gm.graph.inserting_after(node):
        extra = call_function_with_meta(gm.graph, node.target, node.args, like=node)
    with gm.graph.inserting_after(extra):
        call_function_with_meta(gm.graph, c10d.wait_tensor.default, (extra,), like=node)


def unreduced(gm: fx.GraphModule) -> None:
    wait(gm).replace_all_uses_with(launch(gm).args[0])


def rounded_to_half(node: fx.Node) -> None:
    users = list(node.users)
    with node.graph.inserting_after(node):
        half = call_function_with_meta(
            node.graph, aten._to_copy.default, (node,), {"dtype": torch.bfloat16}
        )
    with node.graph.inserting_after(half):
        back = call_function_with_meta(
            node.graph, aten._to_copy.default, (half,), {"dtype": torch.float32}
        )
    for user in users:
        user.replace_input_with(node, back)


def with_argument(node: fx.Node, index: int, value: Any) -> None:
    node.update_arg(index, value)


def swapped_moments(gm: fx.GraphModule) -> None:
    node = first(gm, "aten::_fused_adamw")
    means, squares = list(node.args[2]), list(node.args[3])
    means[0], squares[0] = squares[0], means[0]
    with_argument(node, 2, means)
    with_argument(node, 3, squares)


def swapped_updates(gm: fx.GraphModule) -> None:
    copies = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::copy_"))
    one = copies[0]
    other = next(c for c in copies[1:] if c.meta["val"].shape == one.meta["val"].shape)
    values = one.args[1], other.args[1]
    other.append(one)
    with_argument(one, 1, values[1])
    with_argument(other, 1, values[0])


def lost_update(gm: fx.GraphModule) -> None:
    outputs = get_outputs(gm.graph)
    copy = outputs.updates.pop()
    set_outputs(gm.graph, outputs)
    gm.graph.erase_node(copy)


def other_result(gm: fx.GraphModule) -> None:
    outputs = get_outputs(gm.graph)
    outputs.results[0] = outputs.updates[0]
    set_outputs(gm.graph, outputs)


def further_result(gm: fx.GraphModule) -> None:
    outputs = get_outputs(gm.graph)
    outputs.results.append(outputs.results[0])
    set_outputs(gm.graph, outputs)


def scaled_rate(gm: fx.GraphModule) -> None:
    node = first(gm, "aten::_fused_adamw")
    rate = next(n for n in gm.graph.nodes if n.op == "placeholder" and "lr" in str(n.target))
    with gm.graph.inserting_before(node):
        twice = call_function_with_meta(gm.graph, aten.mul.Tensor, (rate, 2.0), like=node)
    node.replace_input_with(rate, twice)


def another_item(gm: fx.GraphModule) -> None:
    items = find_nodes(gm.graph, lambda n: n.target is operator.getitem and n.args[1] == 0)
    item = next(n for n in items if isinstance(n.args[0].meta["val"], (list, tuple)))
    with_argument(item, 1, 1)


def other_members(gm: fx.GraphModule) -> None:
    """Members of one size change places in a bucket, but not behind it."""
    cat = next(
        n
        for n in find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::cat"))
        if len({m.meta["val"].shape for m in n.args[0]}) < len(n.args[0])
    )
    members = list(cat.args[0])
    shapes = [member.meta["val"].shape for member in members]
    i = next(i for i, shape in enumerate(shapes) if shapes.count(shape) > 1)
    j = next(j for j in range(i + 1, len(shapes)) if shapes[j] == shapes[i])
    members[i], members[j] = members[j], members[i]
    with_argument(cat, 0, members)


def shifted_parts(gm: fx.GraphModule) -> None:
    """Parts of a bucket that are of one size change places."""
    split = first(gm, "aten::split_with_sizes")
    items = sorted(split.users, key=lambda item: item.args[1])
    one = next(i for i in items for j in items if i is not j and shape(i) == shape(j))
    other = next(i for i in items if i is not one and shape(i) == shape(one))
    places = one.args[1], other.args[1]
    with_argument(one, 1, places[1])
    with_argument(other, 1, places[0])


def shape(node: fx.Node) -> torch.Size:
    return node.meta["val"].shape


EDITS: dict[str, Callable[[fx.GraphModule], object]] = {
    "a gradient scaled": lambda gm: after(wait(gm), aten.mul.Tensor, 2.0),
    "a gradient zeroed": lambda gm: after(wait(gm), aten.mul.Tensor, 0.0),
    "a gradient negated": lambda gm: after(wait(gm), aten.neg.default),
    "a gradient rounded": lambda gm: rounded_to_half(wait(gm)),
    "averaged twice": lambda gm: after(launch(gm).args[0], aten.mul.Tensor, 0.5),
    "not averaged": lambda gm: with_argument(launch(gm), 1, "max"),
    "reduced again": reduced_again,
    "reduced for nobody": reduced_for_nobody,
    "not reduced": unreduced,
    "moments swapped": swapped_moments,
    "updates swapped": swapped_updates,
    "an update lost": lost_update,
    "another result": other_result,
    "a further result": further_result,
    "rate scaled": scaled_rate,
    "another item": another_item,
    "an operator exchanged": lambda gm: setattr(
        first(gm, "aten::gelu", "aten::relu"), "target", aten.sigmoid.default
    ),
    "a transpose forgotten": lambda gm: first(gm, "aten::t").replace_all_uses_with(
        first(gm, "aten::t").args[0]
    ),
    "a sum over another dimension": lambda gm: with_argument(first(gm, "aten::sum"), 1, [1]),
    "weight decay changed": lambda gm: first(gm, "aten::_fused_adamw").update_kwarg(
        "weight_decay", 0.5
    ),
    "maximized": lambda gm: first(gm, "aten::_fused_adamw").update_kwarg("maximize", True),
    "an update rounded": lambda gm: after(last(gm, "aten::copy_").args[1], aten.round.default),
    "an alpha": lambda gm: after(wait(gm), aten.add.Tensor, wait(gm)),
}
BUCKET_EDITS = {"members swapped": other_members, "parts swapped": shifted_parts}


def refused(before: IterGraphModule, edit: Callable[[fx.GraphModule], object]) -> None:
    gm = IterGraphModule(before)
    edit(gm)
    gm.graph.lint()
    report = check_equivalence(before, gm)
    assert not report.ok
    assert "bit for bit" not in str(report)
    with pytest.raises(graphopt.VerificationError):
        report.raise_for_failure()


@pytest.mark.parametrize("name", EDITS)
def test_refused(plain: IterGraphModule, name: str) -> None:
    refused(plain, EDITS[name])


@pytest.mark.parametrize("name", {**EDITS, **BUCKET_EDITS})
def test_refused_in_a_bucketed_graph(bucketed: IterGraphModule, name: str) -> None:
    refused(bucketed, {**EDITS, **BUCKET_EDITS}[name])


def test_the_first_difference_is_named(plain: IterGraphModule) -> None:
    gm = IterGraphModule(plain)
    new = after(wait(gm), aten.mul.Tensor, 2.0)
    report = check_equivalence(plain, gm)
    assert f"%{new.name}" in str(report)
    assert "aten.mul.Tensor" in str(report)


def test_late_work_is_shown_by_the_graphs_that_run(plain: IterGraphModule) -> None:
    """What is carried from one iteration to the next belongs to the late work that takes it."""
    gm = IterGraphModule(plain)
    graphopt.PassManager(PASSES, verify="off").run(gm)
    late = [node for node in gm.graph.late if node.target is aten._fused_adamw.tensor_lr]
    edited = IterGraphModule(gm)
    node = next(n for n in edited.graph.late if n.name == late[0].name)
    node.update_kwarg("weight_decay", 0.5)
    assert check_equivalence(gm, gm).ok
    assert not check_equivalence(gm, edited).ok


# The rules


def drawn_graph(data: st.DataObject) -> tuple[fx.Graph, Tensor]:
    """Views, cats, splits, permutations and elementwise operators in a row."""
    graph = fx.Graph()
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    value = torch.randn(sizes)
    node = graph.placeholder("x")
    with _compat.new_fake_mode():
        node.meta["val"] = torch.empty(sizes)
    for _ in range(data.draw(st.integers(1, 6))):
        node = data.draw(st.sampled_from(STEPS))(data, graph, node)
    graph.output(([node], [], []))
    return graph, value


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return call_function_with_meta(graph, target, args, kwargs)


def flattened(data: st.DataObject, graph: fx.Graph, node: fx.Node) -> fx.Node:
    return call(graph, aten.reshape.default, node, [-1])


def permuted(data: st.DataObject, graph: fx.Graph, node: fx.Node) -> fx.Node:
    order = data.draw(st.permutations(range(node.meta["val"].dim())))
    return call(graph, aten.permute.default, node, list(order))


def cut(data: st.DataObject, graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    dim = data.draw(st.integers(-value.dim(), value.dim() - 1))
    start = data.draw(st.integers(-value.shape[dim], value.shape[dim] - 1))
    begin = start + value.shape[dim] if start < 0 else start
    end = data.draw(st.integers(begin + 1, value.shape[dim]))
    return call(graph, aten.slice.Tensor, node, dim, start, end)


def joined(data: st.DataObject, graph: fx.Graph, node: fx.Node) -> fx.Node:
    dim = data.draw(st.integers(0, node.meta["val"].dim() - 1))
    ones = call(graph, aten.ones_like.default, node)
    return call(graph, aten.cat.default, [node, ones, node], dim)


def split(data: st.DataObject, graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    dim = data.draw(st.integers(0, value.dim() - 1))
    first_size = data.draw(st.integers(0, value.shape[dim] - 1))
    sizes = [first_size, value.shape[dim] - first_size]
    parts = call(graph, aten.split_with_sizes.default, node, sizes, dim)
    return call(graph, operator.getitem, parts, 1)


def scaled(data: st.DataObject, graph: fx.Graph, node: fx.Node) -> fx.Node:
    return call(graph, aten.mul.Tensor, node, data.draw(st.sampled_from([0.5, 3.0])))


def negated(data: st.DataObject, graph: fx.Graph, node: fx.Node) -> fx.Node:
    return call(graph, aten.neg.default, node)


def summed(data: st.DataObject, graph: fx.Graph, node: fx.Node) -> fx.Node:
    other = call(graph, aten.clone.default, call(graph, aten.mul.Tensor, node, 2.0))
    return call(graph, aten.add.Tensor, node, other)


def rounded(data: st.DataObject, graph: fx.Graph, node: fx.Node) -> fx.Node:
    half = call(graph, aten._to_copy.default, node, dtype=torch.bfloat16)
    return call(graph, aten._to_copy.default, half, dtype=torch.float32)


STEPS = [flattened, permuted, cut, joined, split, scaled, negated, summed, rounded]
OVERLOADS = {"aten.mul": torch.mul, "aten.neg": torch.neg, "aten.add": torch.add}


class Values:
    """What terms stand for, given the input."""

    def __init__(self, terms: Terms, x: Tensor) -> None:
        self._terms, self._x = terms, x.flatten()

    def row(self, segments: tuple[Segment, ...]) -> Tensor:
        parts = [self.term(s.term, s.start + s.length)[s.start :][: s.length] for s in segments]
        return torch.cat(parts) if parts else torch.empty(0)

    def term(self, number: int, length: int) -> Tensor:
        key = self._terms[number].key
        if key[0] == "input":
            return self._x
        if key[0] == "fill":
            return torch.full((length,), float.fromhex(key[1][1]))
        if key[0] == "cast":
            return self.term(key[3][1], length).to(getattr(torch, key[2].removeprefix("torch.")))
        if key[0] == "permute":
            return self.row(key[1]).view(key[2]).permute(key[3]).flatten()
        if key[0] == "beside":
            taken = [self.row(c.base).view(key[1], c.width)[:, c.start : c.end] for c in key[2]]
            return torch.cat(taken, 1).flatten()
        assert key[0] == "each", key
        return OVERLOADS[key[1]](*(self.operand(value, length) for _, value in key[3:5]))

    def operand(self, value: Any, length: int) -> Any:
        if value[0] == "float":
            return float.fromhex(value[1])
        _, term, _, *beside = value
        first = sum(beside)  # of the operand, beside the first element of the term
        whole = self.term(term, max(length + first, 0))
        unread = torch.full((max(-first, 0),), torch.nan)
        return torch.cat([unread, whole[max(first, 0) :]])[:length]


@settings(max_examples=examples(300))
@given(st.data())
def test_terms_mean_what_operators_compute(data: st.DataObject) -> None:
    graph, x = drawn_graph(data)
    terms = Terms()
    (found,) = evaluate_graph(graph, terms).results
    assert isinstance(found, TensorValue)
    (expected,), _, _ = fx.GraphModule(torch.nn.Module(), graph)(x)
    assert found.shape == tuple(expected.shape)
    if any(terms[number].key[0] == "call" for number in range(len(terms))):
        return  # an operator outside the conditions of its rule: an unknown function
    row = Values(terms, x).row(found.segments)
    assert torch.equal(row, expected.flatten())
