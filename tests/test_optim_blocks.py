"""Optimizer blocks: finding them, and splitting one into several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from graphopt.graph_utils import find_all_descendants, get_outputs
from graphopt.iter_graph import IterGraphModule
from graphopt.optim import (
    AdamArgs,
    ForeachAddBlock,
    FusedAdamBlock,
    FusedOptimizerBlock,
    ListOptimizerBlock,
    OptimizerSplitError,
    get_all_fused_optimizer_blocks,
    get_fused_optimizer_block,
    split_fused_optimizer,
    split_updates,
)
from optim_cases import (
    Case,
    Sheet,
    assert_same_run,
    aten,
    called,
    captured,
    duplicate,
    gradients,
    updated,
)
from slices import examples
from steps import clip_norm
from zoo import OPTIMIZERS


def only_block(gm: fx.GraphModule) -> Any:
    (block,) = get_all_fused_optimizer_blocks(gm)
    return block


@pytest.mark.parametrize("name", ["adam-fused", "adamw-amsgrad-fused"])
def test_fused_adam(name: str) -> None:
    gm, _ = captured(name)
    block = only_block(gm)
    optim, step = block.optim, block.step
    assert isinstance(optim, FusedAdamBlock)
    assert isinstance(optim.optim_args, AdamArgs)
    assert optim.optim_args.grads == optim.grads == list(optim.optim_node.args[1])
    outputs = (
        optim.param_outputs,
        optim.exp_avgs_outputs,
        optim.exp_avg_sqs_outputs,
        optim.max_exp_avg_sqs_outputs,
    )
    args = optim.optim_args
    states = (args.params, args.exp_avgs, args.exp_avg_sqs, args.max_exp_avg_sqs)
    assert [[copy.args[0] for copy in copies] for copies in outputs] == list(states)
    assert len(outputs[3]) == (6 if "amsgrad" in name else 0)
    assert isinstance(step, ForeachAddBlock)
    assert [copy.args[0] for copy in step.outputs] == list(step.add_node.args[0])
    assert set(block.copies) == {n for n in gm.graph.nodes if n.target is aten.copy_.default}


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if not n.endswith("loop")])
def test_every_optimizer_of_lists(name: str) -> None:
    gm, _ = captured(name)
    block = only_block(gm)
    assert set(block.optim.grads) >= {n for n in gradients(gm) if n.users.keys() & block.nodes}
    assert len(block.optim.grads) == 6
    counted = name.startswith(("adam", "nadam", "adagrad"))
    assert (block.step is not None) == counted
    # Counts that nobody reads are not tied to the optimizer.
    counters = 6 if name.startswith(("rmsprop", "adadelta", "rprop")) else 0
    assert len(block.copies) == len(updated(gm)) - counters
    for node in block.nodes:
        assert get_fused_optimizer_block(node) == block


@pytest.mark.parametrize("name", ["adam-loop", "sgd-loop"])
def test_a_plain_loop_has_no_block(name: str) -> None:
    gm, _ = captured(name)
    assert get_all_fused_optimizer_blocks(gm) == []


@pytest.mark.parametrize("name", ["adam-foreach", "adam-fused"])
def test_clipping_is_not_part_of_the_optimizer(name: str) -> None:
    gm, _ = captured(name, step=clip_norm)
    (norms,) = called(gm, aten._foreach_norm.Scalar)
    (scaled,) = called(gm, aten._foreach_mul.Tensor)
    block = only_block(gm)
    assert not {norms, scaled} & set(block.nodes)
    assert set(block.optim.grads) <= find_all_descendants([scaled])
    with pytest.raises(OptimizerSplitError, match="not part of an optimizer"):
        get_fused_optimizer_block(norms)


def test_the_first_step_creates_state() -> None:
    """New state is not copied anywhere."""
    gm, _ = captured("adamw-fused", after=0)
    block = only_block(gm)
    assert len([copy for copy in block.optim.param_outputs if copy]) == 6
    assert block.optim.exp_avgs_outputs == block.step.outputs == [None] * 6


def test_groups_are_blocks() -> None:
    def grouped(model: Any) -> Any:
        groups = [{"params": model.layers.parameters()}, {"params": model.head.parameters()}]
        return OPTIMIZERS["adamw-foreach"](groups)

    gm, _ = captured(grouped)
    first, second = get_all_fused_optimizer_blocks(gm)
    assert [len(first.optim.grads), len(second.optim.grads)] == [4, 2]
    assert isinstance(first.optim, ListOptimizerBlock)
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    assert position[first.optim.optim_node] < position[second.optim.optim_node]


def drawn(*, copied_steps: bool) -> tuple[Sheet, fx.Node, list[fx.Node]]:
    s = Sheet()
    counts = s.items(aten._foreach_add.Scalar, s.steps, 1)
    steps = s.store(s.steps, counts) if copied_steps else counts
    return s, s.adam(s.gradients(), steps), counts


@pytest.mark.parametrize("copied_steps", [False, True])
def test_new_outputs(copied_steps: bool) -> None:
    s, optimizer, counts = drawn(copied_steps=copied_steps)
    block = FusedAdamBlock.with_new_outputs(optimizer)
    assert block == FusedAdamBlock.from_node(optimizer)
    assert [c.args[0] for c in block.copies] == [*s.weights, *s.moments, *s.squares]
    s.updates += block.copies
    if not copied_steps:
        step = ForeachAddBlock.with_new_outputs(counts[0].all_input_nodes[0])
        assert [c.args[0] for c in step.copies] == s.steps
        s.updates += step.copies
    case = s.finish()
    found = get_fused_optimizer_block(optimizer)
    assert found.optim == block
    assert found.step is not None
    assert [c.args[0] for c in found.step.copies] == s.steps
    assert_same_run(case[0], case[0], case)


def test_no_step_counter_nearby() -> None:
    s = Sheet()
    steps = s.items(aten._foreach_add.Scalar, s.steps, 1)
    for _ in range(5):
        steps = [s.call(aten.neg.default, step) for step in steps]
    optimizer = s.adam(s.gradients(), steps)
    gm, _ = s.finish()
    with pytest.raises(OptimizerSplitError, match="no _foreach_add within 5 nodes"):
        get_fused_optimizer_block(optimizer)
    with pytest.raises(ValueError, match=optimizer.name):
        get_all_fused_optimizer_blocks(gm)


def test_blocks_of_other_operators() -> None:
    s = Sheet()
    (grad, *_) = s.gradients()
    with pytest.raises(OptimizerSplitError, match="not part of an optimizer"):
        get_fused_optimizer_block(s.call(aten.neg.default, grad))
    with pytest.raises(OptimizerSplitError, match="not a fused Adam"):
        FusedAdamBlock.from_node(grad)
    with pytest.raises(OptimizerSplitError, match="not a _foreach_add"):
        ForeachAddBlock.from_node(grad)


OF_LISTS = [name for name in OPTIMIZERS if not name.endswith("loop")]


def adam(order: tuple[int, ...] = (0, 1, 2), copied_steps: bool = False) -> Case:
    """Some parameters under fused Adam; `order` is that of the step counters in their list."""
    s = Sheet(len(order))
    items = s.items(aten._foreach_add.Scalar, [s.steps[i] for i in order], 1)
    counts = [items[order.index(i)] for i in range(len(order))]
    stored = s.store(s.steps, counts)
    optimizer = s.adam(s.gradients(), stored if copied_steps else counts)
    s.updates += FusedAdamBlock.with_new_outputs(optimizer).copies
    return s.finish()


def only_optimizer_block(gm: fx.GraphModule) -> FusedOptimizerBlock:
    (block,) = get_all_fused_optimizer_blocks(gm)
    return block


def text(gm: fx.GraphModule) -> str:
    """The calls of a graph, one a line, without placeholders and settings."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
            lines.append(f"{node.name} = {name}{node.args}")
    copies = [copy.name.rpartition("_")[2] for copy in get_outputs(gm.graph).updates]
    return "\n".join([*lines, f"output {' '.join(copies)}\n"])


DIVIDED = """\
_foreach_add_scalar_1 = _foreach_add([t1], 1)
_foreach_add_scalar_2 = _foreach_add([t0], 1)
getitem = getitem(_foreach_add_scalar_1, 0)
getitem_1 = getitem(_foreach_add_scalar_2, 0)
copy__default_9 = copy_(t0, getitem_1)
copy__default_8 = copy_(t1, getitem)
mul_tensor = mul(w0, x)
mul_tensor_1 = mul(w1, x)
_fused_adam_default_1 = _fused_adam([w1], [mul_tensor_1], [m1], [v1], [], [getitem])
_fused_adam_default_2 = _fused_adam([w0], [mul_tensor], [m0], [v0], [], [getitem_1])
getitem_11 = getitem(_fused_adam_default_1, 0)
getitem_12 = getitem(_fused_adam_default_2, 0)
getitem_3 = getitem(getitem_12, 0)
copy__default_10 = copy_(w0, getitem_3)
getitem_4 = getitem(getitem_11, 0)
copy__default_11 = copy_(w1, getitem_4)
getitem_13 = getitem(_fused_adam_default_1, 2)
getitem_14 = getitem(_fused_adam_default_2, 2)
getitem_6 = getitem(getitem_14, 0)
copy__default_12 = copy_(m0, getitem_6)
getitem_7 = getitem(getitem_13, 0)
copy__default_13 = copy_(m1, getitem_7)
getitem_15 = getitem(_fused_adam_default_1, 3)
getitem_16 = getitem(_fused_adam_default_2, 3)
getitem_9 = getitem(getitem_16, 0)
copy__default_14 = copy_(v0, getitem_9)
getitem_10 = getitem(getitem_15, 0)
copy__default_15 = copy_(v1, getitem_10)
output 9 8 10 11 12 13 14 15
"""


def test_golden() -> None:
    """Also the step counters, although they stand the other way round in their list."""
    gm, _ = adam((1, 0))
    block = only_optimizer_block(gm)
    split_fused_optimizer(gm, block, block.optim.grads[1:])
    assert text(gm) == DIVIDED


@pytest.mark.parametrize("name", OF_LISTS)
def test_every_optimizer_of_lists_is_split(name: str) -> None:
    case = captured(name)
    for parts in (2, 3):
        gm = duplicate(case[0])
        block = only_optimizer_block(gm)
        grads, states = block.optim.grads, updated(gm)
        given = grads[::2] if parts == 2 else [grads[:2], grads[4:]]
        blocks = split_fused_optimizer(gm, block, given)
        assert len(blocks) == parts
        assert blocks == tuple(get_fused_optimizer_block(b.optim.optim_node) for b in blocks)
        sets = [grads[::2], grads[1::2]] if parts == 2 else [grads[:2], grads[4:], grads[2:4]]
        assert [b.optim.grads for b in blocks] == sets
        assert not {*block.nodes, *block.copies} & set(gm.graph.nodes)
        assert updated(gm) == states
        assert {c for b in blocks for c in b.copies} <= set(get_outputs(gm.graph).updates)
        assert_same_run(gm, case[0], case)


@settings(max_examples=examples(10))
@given(st.lists(st.integers(0, 2), min_size=3, max_size=3), st.permutations(range(3)))
def test_any_partition(owners: list[int], order: list[int]) -> None:
    """Every parameter keeps its own step counter, wherever that stands in its list."""
    case = adam(tuple(order), copied_steps=owners[0] == 0)
    gm = duplicate(case[0])
    block = only_optimizer_block(gm)
    grads = block.optim.grads
    sets = [[g for g, o in zip(grads, owners, strict=True) if o == i] for i in range(3)]
    given = [entries for entries in sets if entries]
    if len(given) < 2:
        return
    for part in split_fused_optimizer(gm, block, given[:-1]):
        assert isinstance(part.optim, FusedAdamBlock) and part.step is not None
        owned = {int(p.name[1:]) for p in part.optim.optim_args.params}
        assert {f"t{i}" for i in owned} == {t.name for t in part.step.add_node.args[0]}
        assert [p.name[1:] for p in part.optim.optim_args.params] == [
            m.name[1:] for m in part.optim.optim_args.exp_avgs
        ]
    assert_same_run(gm, case[0], case)


def test_the_first_step() -> None:
    case = captured("adamw-fused", after=0)
    gm = duplicate(case[0])
    block = only_optimizer_block(gm)
    split_fused_optimizer(gm, block, block.optim.grads[:2])
    assert_same_run(gm, case[0], case)


def test_a_part_can_be_divided_again() -> None:
    case = captured("adamw-foreach")
    gm = duplicate(case[0])
    block = only_optimizer_block(gm)
    first, _ = split_fused_optimizer(gm, block, block.optim.grads[:4])
    split_fused_optimizer(gm, first, first.optim.grads[1:3])
    assert sorted(len(b.optim.grads) for b in get_all_fused_optimizer_blocks(gm)) == [2, 2, 2]
    assert_same_run(gm, case[0], case)


# ------------------------------------------------------------------------------------ refused

REFUSED: dict[str, tuple[Callable[[list[Any], Any], Any], str]] = {
    "nothing": (lambda grads, other: [], "no gradients to split off"),
    "an empty set": (lambda grads, other: [grads[:1], []], "sets of gradients is empty"),
    "all": (lambda grads, other: grads, "none is left for the rest"),
    "all in sets": (lambda grads, other: [grads[:1], grads[1:]], "none is left for the rest"),
    "a foreign node": (lambda grads, other: [grads[0], other], "is not a gradient of"),
    "a node among sets": (lambda grads, other: [grads[0], grads[1:2]], "is not a gradient of"),
    "a name": (lambda grads, other: [[grads[0].name]], "is not a gradient of"),
    "twice": (lambda grads, other: [grads[0], grads[0]], "is given twice"),
    "in two sets": (lambda grads, other: [grads[:2], grads[1:2]], "is given twice"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    choose, message = REFUSED[what]
    gm, _ = adam()
    before = text(gm)
    block = only_optimizer_block(gm)
    with pytest.raises(OptimizerSplitError, match=message):
        split_fused_optimizer(gm, block, choose(block.optim.grads, block.copies[0]))
    assert text(gm) == before


def test_a_block_that_is_gone() -> None:
    gm, _ = adam()
    block = only_optimizer_block(gm)
    grads = block.optim.grads
    split_fused_optimizer(gm, block, grads[:1])
    with pytest.raises(OptimizerSplitError, match="not in this graph any more"):
        split_fused_optimizer(gm, block, grads[:1])


def test_updates_that_depend_on_one_another() -> None:
    gm, _ = captured("adam-foreach", "shared-storage")
    block = only_optimizer_block(gm)
    size = len(gm.graph.nodes)
    with pytest.raises(ValueError, match="depend on gradients of several sets"):
        split_fused_optimizer(gm, block, block.optim.grads[:1])
    assert len(gm.graph.nodes) == size


def test_a_counter_that_the_user_gets() -> None:
    s = Sheet()
    counts = s.items(aten._foreach_add.Scalar, s.steps, 1)
    s.store(s.steps, counts)
    optimizer = s.adam(s.gradients(), counts)
    s.updates += FusedAdamBlock.with_new_outputs(optimizer).copies
    gm, _ = s.finish(counts[1])
    block = only_optimizer_block(gm)
    with pytest.raises(OptimizerSplitError, match="does not belong to the gradients of one set"):
        split_fused_optimizer(gm, block, block.optim.grads[:1])


def test_late_nodes() -> None:
    gm = IterGraphModule(captured("adamw-fused")[0])
    block = only_optimizer_block(gm)
    (late,) = split_updates(gm, [block.optim.grads])
    start = next(node for node in gm.graph.nodes if node.op == "call_function")
    gm.graph.move_to_next_iter_before(late, start)
    with pytest.raises(OptimizerSplitError, match="runs one iteration late"):
        split_fused_optimizer(gm, block, block.optim.grads[:1])
