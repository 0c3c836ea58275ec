"""Blocks: finding the optimizers of a graph and what belongs to them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from graphopt.graph_utils import find_all_descendants
from graphopt.optim import (
    AdamArgs,
    ForeachAddBlock,
    FusedAdamBlock,
    ListOptimizerBlock,
    OptimizerSplitError,
    get_all_fused_optimizer_blocks,
    get_fused_optimizer_block,
)
from optim_cases import Sheet, assert_same_run, aten, called, captured, gradients, updated
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
