"""`split_fused_optimizer`: one optimizer becomes several, with the bits of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from graphopt.graph_utils import get_outputs
from graphopt.iter_graph import IterGraphModule
from graphopt.optim import (
    FusedAdamBlock,
    FusedOptimizerBlock,
    OptimizerSplitError,
    get_all_fused_optimizer_blocks,
    get_fused_optimizer_block,
    split_fused_optimizer,
    split_updates,
)
from optim_cases import Case, Sheet, assert_same_run, aten, captured, duplicate, updated
from slices import examples
from zoo import OPTIMIZERS

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


def only_block(gm: fx.GraphModule) -> FusedOptimizerBlock:
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
    block = only_block(gm)
    split_fused_optimizer(gm, block, block.optim.grads[1:])
    assert text(gm) == DIVIDED


@pytest.mark.parametrize("name", OF_LISTS)
def test_every_optimizer_of_lists(name: str) -> None:
    case = captured(name)
    for parts in (2, 3):
        gm = duplicate(case[0])
        block = only_block(gm)
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
    block = only_block(gm)
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
    block = only_block(gm)
    split_fused_optimizer(gm, block, block.optim.grads[:2])
    assert_same_run(gm, case[0], case)


def test_a_part_can_be_divided_again() -> None:
    case = captured("adamw-foreach")
    gm = duplicate(case[0])
    block = only_block(gm)
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
    block = only_block(gm)
    with pytest.raises(OptimizerSplitError, match=message):
        split_fused_optimizer(gm, block, choose(block.optim.grads, block.copies[0]))
    assert text(gm) == before


def test_a_block_that_is_gone() -> None:
    gm, _ = adam()
    block = only_block(gm)
    grads = block.optim.grads
    split_fused_optimizer(gm, block, grads[:1])
    with pytest.raises(OptimizerSplitError, match="not in this graph any more"):
        split_fused_optimizer(gm, block, grads[:1])


def test_updates_that_depend_on_one_another() -> None:
    gm, _ = captured("adam-foreach", "shared-storage")
    block = only_block(gm)
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
    block = only_block(gm)
    with pytest.raises(OptimizerSplitError, match="does not belong to the gradients of one set"):
        split_fused_optimizer(gm, block, block.optim.grads[:1])


def test_late_nodes() -> None:
    gm = IterGraphModule(captured("adamw-fused")[0])
    block = only_block(gm)
    (late,) = split_updates(gm, [block.optim.grads])
    start = next(node for node in gm.graph.nodes if node.op == "call_function")
    gm.graph.move_to_next_iter_before(late, start)
    with pytest.raises(OptimizerSplitError, match="runs one iteration late"):
        split_fused_optimizer(gm, block, block.optim.grads[:1])
