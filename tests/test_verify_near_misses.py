"""Edits that look like what a rule allows, and are not: each gives other bits on some input. And
right ones that look like these."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from edit_tools import added, put_after, renewed, with_arg
from graphopt import _compat
from graphopt.errors import VerificationError
from graphopt.graph_utils import (
    call_function_with_meta,
    evaluate,
    find_nodes,
    get_outputs,
    is_operator,
    set_outputs,
)
from graphopt.ir.rewritten_places import rewritten_places
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import PassRegistry
from graphopt.manager.callbacks import PassCallback, PassContext
from graphopt.verify import check_equivalence, check_finalized
from graphopt.verify.equivalence import Proof
from graphopt.verify.stage_checks import StageProof

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Edit = Callable[[fx.GraphModule], Any]


def captured(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    def step(model: nn.Module, *given: Tensor) -> Any:
        return function(*given)

    return graphopt.capture(step, nn.Identity(), *tensors).graph_module


def declared(edit: Edit, **options: Any) -> Any:
    def pass_(gm: fx.GraphModule) -> None:
        edit(gm)

    return graphopt.graph_optimization_pass(registry=PassRegistry(), **options)(pass_)


def only(gm: fx.GraphModule, *names: str) -> fx.Node:
    (node,) = find_nodes(gm.graph, lambda n: is_operator(n.target, *(f"aten::{x}" for x in names)))
    return node


def first(gm: fx.GraphModule, name: str) -> fx.Node:
    return find_nodes(gm.graph, lambda n: is_operator(n.target, f"aten::{name}"))[0]


def bits_for_a_cast(gm: fx.GraphModule) -> None:
    node = only(gm, "_to_copy")
    node.target, node.args = aten.view.dtype, (node.args[0], torch.int32)
    node.kwargs = {}
    node.meta["val"] = evaluate(node.target, node.args, {})  # type: ignore[arg-type]


def other_argument(name: str, value: Any) -> Edit:
    return lambda gm: with_arg(only(gm, name), 1, value)


def together(name: str) -> Edit:
    """An operator on both halves at once."""

    def edit(gm: fx.GraphModule) -> None:
        cat = only(gm, "cat")
        a, b = cat.args[0]
        joined = [added(b, aten.cat.default, [x, y]) for x, y in zip(a.args, b.args, strict=True)]
        new = added(cat, a.target, *joined, **a.kwargs)
        for node in joined:
            cat.prepend(node)
        cat.replace_all_uses_with(new)

    edit.__name__ = f"one_{name}"
    return edit


def cloned_before_as_strided(gm: fx.GraphModule) -> None:
    node = only(gm, "as_strided")
    with gm.graph.inserting_before(node):
        new = call_function_with_meta(gm.graph, aten.clone.default, (node.args[0],), like=node)
    with_arg(node, 0, new)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([torch.maximum(a[:9], b[:9]), torch.maximum(a[9:], b[9:])])


def quotient(a: Tensor, b: Tensor) -> Tensor:
    mode = {"rounding_mode": "trunc"}
    return torch.cat([torch.div(a[:9], b[:9], **mode), torch.div(a[9:], b[9:], **mode)])


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a[:9] * b[:9], a[9:] * b[9:]])


def f(count: int = 1, dtype: torch.dtype = torch.float32, size: int = 20) -> tuple[Tensor, ...]:
    return tuple(torch.ones(size, dtype=dtype) for _ in range(count))


WRONG: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], Edit]] = {
    "bits for a cast": (lambda x: (x * 1.5).to(torch.int32) + 1, f(), bits_for_a_cast),
    "another kind of number": (lambda x: x + 1, f(dtype=torch.int64), other_argument("add", 1.0)),
    "minus zero": (lambda x: x + 0.0, f(), other_argument("add", -0.0)),
    "the last bit": (lambda x: x * 0.1, f(), other_argument("mul", 0.1 + 1e-17 * 2)),
    "rounded to float32": (
        lambda x: x * 0.1,
        f(dtype=torch.float64),
        other_argument("mul", float(torch.tensor(0.1))),
    ),
    "true for one": (lambda x: x * 1, f(), other_argument("mul", True)),
    "the larger of two zeros": (maximum, f(2), together("maximum")),
    "a quotient made whole": (quotient, f(2, torch.bfloat16), together("div")),
    "complex numbers": (product, f(2, torch.complex64), together("mul")),
    "around a storage": (
        lambda x: x[4:8].as_strided((4,), (1,), 0) + 1,
        f(),
        cloned_before_as_strided,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    function, tensors, edit = WRONG[name]
    gm = captured(function, *tensors)
    with pytest.raises(graphopt.VerificationError):
        declared(edit)(gm)


@pytest.mark.parametrize("function", [product, lambda a, b: product(a, b) * 3])
def test_one_product_for_two(function: Any) -> None:
    declared(together("mul"))(captured(product, *f(2)))


def test_a_result_that_is_no_tensor() -> None:
    gm = IterGraphModule(graph_of(lambda call, x, y: [call(aten.neg.default, x), 1, 0.0]))
    for index, value in enumerate((True, -0.0), start=1):
        other = IterGraphModule(gm)
        outputs = get_outputs(other.graph)
        outputs.results[index] = value
        set_outputs(other.graph, outputs)
        assert not check_equivalence(gm, other).ok


# -------------------------------------------------------------------------- updates in place


def graph_of(build: Callable[[Callable[..., fx.Node]], Any], inputs: int = 2) -> fx.GraphModule:
    """A graph of floats in the executable dialect; `build(call, *inputs)` gives the result."""
    graph, mode = fx.Graph(), _compat.new_fake_mode()
    nodes = []
    for index in range(inputs):
        nodes.append(graph.placeholder(f"x{index}"))
        with mode:
            nodes[-1].meta["val"] = torch.empty(8)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call_function_with_meta(graph, target, args, kwargs)

    found = build(call, *nodes)
    graph.output((found if isinstance(found, list) else [found], [], []))
    return fx.GraphModule(nn.Module(), graph)


def gathered(written: str) -> Any:
    """Something is written into what a collective sends: before its launch, during, after."""

    def build(call: Any, x: fx.Node, y: fx.Node) -> fx.Node:
        sent = call(aten.clone.default, x)
        if written == "before":
            call(aten.add_.Tensor, sent, y)
        launch = call(c10d.all_gather_into_tensor.default, sent, 2, "g")
        if written == "during":
            call(aten.add_.Tensor, sent, y)
        wait = call(c10d.wait_tensor.default, launch)
        if written == "after":
            call(aten.add_.Tensor, sent, y)
        return wait

    return graph_of(build)


def functional_gather() -> fx.GraphModule:
    def build(call: Any, x: fx.Node, y: fx.Node) -> fx.Node:
        sent = call(aten.clone.default, x)
        launch = call(c10d.all_gather_into_tensor.default, sent, 2, "g")
        return call(c10d.wait_tensor.default, launch)

    return graph_of(build)


def test_what_is_being_sent_is_not_overwritten() -> None:
    assert check_finalized(functional_gather(), gathered("after")).ok
    assert "still sends" in str(check_finalized(functional_gather(), gathered("during")))
    assert not check_finalized(functional_gather(), gathered("before")).ok


def added_in_place(entries: Callable[..., Any] | None) -> fx.GraphModule:
    def build(call: Any, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        a, b = call(aten.clone.default, x), call(aten.clone.default, y)
        if entries is None:
            new = call(aten._foreach_add.List, [a, b], [y, x])
            return [call(operator.getitem, new, index) for index in range(2)]
        call(aten._foreach_add_.List, *entries(call, a, b, x, y))
        return [a, b]

    return graph_of(build)


def test_entries_that_read_one_another() -> None:
    functional = added_in_place(None)
    assert check_finalized(functional, added_in_place(lambda c, a, b, x, y: ([a, b], [y, x]))).ok
    for wrong in (
        lambda c, a, b, x, y: ([a, b], [b, a]),
        lambda c, a, b, x, y: ([a, a], [y, y]),
        lambda c, a, b, x, y: ([a, b], [y, c(aten.view.default, a, [8])]),
    ):
        assert "not decided" in str(check_finalized(functional, added_in_place(wrong)))


def halves(in_place: bool) -> fx.GraphModule:
    """Two parts of one storage are no trouble."""

    def build(call: Any, x: fx.Node, y: fx.Node) -> fx.Node:
        a = call(aten.clone.default, x)
        parts = [call(aten.slice.Tensor, a, 0, start, start + 4) for start in (0, 4)]
        if in_place:
            call(aten._foreach_mul_.Scalar, parts, 2.0)
            return a
        new = call(aten._foreach_mul.Scalar, parts, 2.0)
        return call(aten.cat.default, [call(operator.getitem, new, index) for index in range(2)])

    return graph_of(build)


def test_parts_of_one_storage_are_updated_together() -> None:
    assert check_finalized(halves(False), halves(True)).ok


# --------------------------------------------------------------------------------- later stages


def two_sent(swapped: bool, anew: bool) -> fx.GraphModule:
    """Zeros are sent for two unused parameters."""

    def build(call: Any, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        zeros = [call(aten.zeros.default, [8]) for _ in range(2 + anew)]
        launches = [call(c10d.all_reduce.default, zero, "sum", "g") for zero in zeros[anew:]]
        waits = [call(c10d.wait_tensor.default, launch) for launch in launches]
        return [
            call(aten.add.Tensor, z, w)
            for z, w in zip((x, y), waits[:: -1 if swapped else 1], strict=False)
        ]

    return graph_of(build)


def problems_of_stage(before: fx.GraphModule, after: fx.GraphModule) -> list[Any]:
    return StageProof(Proof()).problems("main", before.graph, after)


def test_what_other_ranks_send_is_not_exchanged() -> None:
    """Constants that are made anew are no trouble."""
    assert not problems_of_stage(two_sent(False, False), two_sent(False, True))
    assert problems_of_stage(two_sent(False, False), two_sent(True, True))
    assert problems_of_stage(two_sent(False, False), two_sent(True, False))


def sent_in_place(early: bool) -> fx.GraphModule:
    def build(call: Any, x: fx.Node, y: fx.Node) -> fx.Node:
        a = call(aten.clone.default, x)
        launch = call(c10d.all_reduce_.default, a, "sum", "g")
        read = call(aten.add.Tensor, a, y) if early else None
        wait = call(c10d.wait_tensor.default, launch)
        return read or call(aten.add.Tensor, wait, y)

    return graph_of(build)


def test_a_stage_that_reads_too_early_is_refused() -> None:
    """It cannot be decided any more what is read, while it could be before."""

    def build(call: Any, x: fx.Node, y: fx.Node) -> fx.Node:
        launch = call(c10d.all_reduce.default, call(aten.clone.default, x), "sum", "g")
        return call(aten.add.Tensor, call(c10d.wait_tensor.default, launch), y)

    assert not problems_of_stage(graph_of(build), sent_in_place(False))
    (problem,) = problems_of_stage(graph_of(build), sent_in_place(True))
    assert "under way" in problem.message


# ------------------------------------------------------------------------------ rewritten places


def relu_twice(x: Tensor) -> Tensor:
    return x.relu().relu()


def relu(x: Tensor) -> Tensor:
    return x.relu()


def rewritten(*rules: Any, then: Edit = lambda gm: None, **options: Any) -> Any:
    def pass_(gm: fx.GraphModule) -> None:
        for pattern, replacement in rules:
            assert graphopt.rewrite(gm, pattern, replacement, **options) == 1
        then(gm)

    return declared(pass_, changes_numerics=True)


def doubled(x: Tensor) -> Tensor:
    return x * 2.0


def added_to_itself(x: Tensor) -> Tensor:
    return x + x


def test_places_that_touch() -> None:
    """One begins where another one ends, in either order; or is rewritten once more."""
    rules = [(relu_twice, relu), (doubled, added_to_itself)]
    for chosen in (rules, rules[::-1]):
        rewritten(*chosen)(captured(lambda x: x.relu().relu() * 2.0 + 1, *f()))
        rewritten(*chosen)(captured(lambda x: (x * 2.0).relu().relu() + 1, *f()))
    again = [(doubled, added_to_itself), (added_to_itself, lambda x: x * 4.0 * 0.5)]
    rewritten(*again)(captured(lambda x: x.relu() * 2.0 + 1, *f()))


def test_a_wrong_place_behind_another_is_refused() -> None:
    rules = [(relu_twice, relu), (doubled, lambda x: x * 3.0)]
    with pytest.raises(graphopt.VerificationError, match="differs on random inputs"):
        rewritten(*rules)(captured(lambda x: x.relu().relu() * 2.0 + 1, *f()))


def through_a_view(x: Tensor) -> Tensor:
    return x.view(20)


def test_a_place_that_is_a_view_now() -> None:
    """Of state that is updated afterwards, or that the user would get."""
    made = nn.BatchNorm1d(20)

    def step(model: nn.Module) -> Tensor:
        with torch.no_grad():
            found = model.running_mean * 1.0
            model.running_mean.add_(1.0)
        return found

    gm = graphopt.capture(step, made).graph_module
    with pytest.raises(graphopt.VerificationError):
        rewritten((lambda x: x * 1.0, through_a_view), examples={"x": 1})(gm)


def test_random_inputs_fill_what_is_expanded() -> None:
    """A gradient that is one number everywhere is as random as others."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        return y.expand(3, 20).relu().relu() + x

    with pytest.raises(graphopt.VerificationError, match="differs on random inputs"):
        rewritten((relu_twice, lambda x: x * 0.5))(captured(step, *f(2)))


def test_what_is_negative_nearly_everywhere_is_compared() -> None:
    def root(x: Tensor) -> Tensor:
        return x.sqrt().sum()

    def wrong_root(x: Tensor) -> Tensor:
        return x.sqrt().sum() * 1.5

    with pytest.raises(graphopt.VerificationError, match="differs on random inputs"):
        rewritten((root, wrong_root))(captured(lambda x: x.sqrt().sum() + 1, *f(size=64)))


def outputs_exchanged(gm: fx.GraphModule) -> None:
    one, other = (place.after[0] for place in rewritten_places(gm.graph))
    total = max(one.users)
    assert one.users == other.users
    total.args = tuple(reversed(total.args))


def place_scaled(gm: fx.GraphModule) -> None:
    (place,) = rewritten_places(gm.graph)
    put_after(place.inputs[0], aten.mul.Tensor, 1.5)


def inner_scaled(gm: fx.GraphModule) -> None:
    (place,) = rewritten_places(gm.graph)
    with_arg(place.after[0], 1, 1.5)


def other_input(gm: fx.GraphModule) -> None:
    (place,) = rewritten_places(gm.graph)
    other = next(n for n in gm.graph.nodes if n.op == "placeholder" and n is not place.inputs[0])
    with_arg(place.after[0], 0, other)


@pytest.mark.parametrize("edit", [place_scaled, inner_scaled, other_input])
def test_edits_of_a_place(edit: Edit) -> None:
    gm = captured(lambda x, y: (x.relu() * 2.0) - y, *f(2))
    with pytest.raises(graphopt.VerificationError):
        rewritten((doubled, lambda x: x / 0.5), then=edit)(gm)


def test_two_places_are_not_exchanged() -> None:
    def pass_(gm: fx.GraphModule) -> None:
        assert graphopt.rewrite(gm, doubled, added_to_itself) == 2
        outputs_exchanged(gm)

    gm = captured(lambda x, y: (x * 2.0) - (y * 2.0), *f(2))
    with pytest.raises(graphopt.VerificationError, match="not what it was"):
        declared(pass_, changes_numerics=True)(gm)


# ------------------------------------------------------------------------------- what is known


class Meddling(PassCallback):
    """Edits a graph that was checked."""

    def after_pass(self, context: PassContext) -> None:
        node = next(n for n in context.gm.graph.nodes if is_operator(n.target, "aten::relu"))
        node.target = aten.sigmoid.default


def double_relu(gm: fx.GraphModule) -> None:
    put_after(first(gm, "relu"), aten.clone.default)


@pytest.mark.parametrize("changing", [True, False])
def test_a_callback_that_edits(changing: bool) -> None:
    gm = captured(lambda x: x.relu() + 1, *f())
    pass_ = declared(double_relu if changing else lambda gm: None)
    with pytest.raises(graphopt.GraphOptError, match="Meddling"):
        graphopt.PassManager([pass_], callbacks=[Meddling()]).run(gm)


def test_nothing_is_known_after_a_refusal() -> None:
    gm = captured(lambda x: x.relu() + 1, *f())
    right = declared(double_relu, repeatable=True)
    wrong = declared(
        lambda gm: setattr(first(gm, "relu"), "target", aten.sigmoid.default), repeatable=True
    )
    manager = graphopt.PassManager([right, wrong])
    proof = Proof()
    for _ in range(2):
        with pytest.raises(graphopt.VerificationError):
            manager.run(gm, proof)
    with pytest.raises(graphopt.VerificationError):
        graphopt.PassManager([wrong]).run(gm, proof)
    graphopt.PassManager([right]).run(gm, proof)


@pytest.fixture(autouse=True)
def _seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def test_what_reads_a_value_of_another_shape_has_to_fit() -> None:
    """Its elements are the same, in the same order, and nothing is said of its new shape."""
    gm = captured(lambda x: x.unsqueeze(2).unsqueeze(3).expand(4, 5, 2, 2) + 1, torch.ones(4, 5))

    def edit(gm: fx.GraphModule) -> None:
        node = first(gm, "unsqueeze")
        with_arg(node, 1, 1)
        renewed(node)

    with pytest.raises(VerificationError, match=r"meta\['val'\] says"):
        declared(edit)(gm)


@pytest.mark.parametrize("laid_out_alike", [True, False])
def test_strides_seen_by_the_capture_are_believed_for_arguments_of_one_kind(
    laid_out_alike: bool,
) -> None:
    gm = captured(lambda x, w: torch.mm(x, w), torch.ones(4, 4), torch.ones(4, 4))
    product = only(gm, "mm")
    with product.meta["val"].fake_mode:  # as if a kernel gave strides that no rule gives
        product.meta["val"] = torch.empty_strided((4, 4), (1, 4))

    def edit(gm: fx.GraphModule) -> None:
        source = product.args[0]
        assert isinstance(source, fx.Node)
        new = added(source, aten.clone.default, source)
        if not laid_out_alike:
            turned = added(new, aten.t.default, new)
            dense = torch.contiguous_format
            turned = added(turned, aten.clone.default, turned, memory_format=dense)
            new = added(turned, aten.t.default, turned)
        with_arg(product, 0, new)

    if laid_out_alike:
        declared(edit)(gm)
        return
    with pytest.raises(VerificationError, match=r"meta\['val'\] says"):
        declared(edit)(gm)
