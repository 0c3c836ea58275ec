"""A norm may be taken of a bucket as it is received: it depends on elements in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphopt import VerificationError
from graphopt.comm import CommBlock, bucket_members, get_all_comm_blocks
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_operator
from graphopt.manager import Pass, PassRegistry, graph_optimization_pass
from graphopt.passes import comm_fusion_with_concat
from graphopt.testing import StepUnderTest, fake_ranks

aten = torch.ops.aten
NormOfBuckets = Callable[[fx.GraphModule, list[CommBlock], fx.Node], fx.Node]


@pytest.fixture(autouse=True)
def _ranks(without_settings: None) -> Iterator[None]:
    with fake_ranks(2):
        yield


def arguments() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.randn(4, 6)


def clip_by(norm: Callable[[list[torch.Tensor]], torch.Tensor]) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        scale = (0.1 / (norm(gradients) + 1e-6)).clamp(max=1)
        for gradient in gradients:
            gradient.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


USERS_NORMS = {
    "norms of norms": lambda gs: torch.stack([g.norm() for g in gs]).norm(),
    "sum of squares": lambda gs: sum((g * g).sum() for g in gs).sqrt(),
    "transposed": lambda gs: torch.stack([g.t().contiguous().norm() for g in gs]).norm(),
    "concatenated": lambda gs: torch.cat([g.t().reshape(-1) for g in gs]).norm(),
    "torch's": lambda gs: nn.utils.get_total_norm(gs),
}


def new(gm: fx.GraphModule, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    return call_function_with_meta(gm.graph, target, args, {}, like=like)


def calls(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    return find_nodes(gm.graph, lambda node: is_operator(node.target, f"aten::{name}"))


def norm_pass(norm: NormOfBuckets) -> Pass:
    """A pass that computes otherwise the norm by which all gradients are scaled."""

    def run(gm: fx.GraphModule) -> int:
        (add,) = find_nodes(
            gm.graph, lambda n: is_operator(n.target, "aten::add") and 1e-6 in n.args
        )
        total = add.args[0]
        with gm.graph.inserting_before(add):
            add.args = (norm(gm, get_all_comm_blocks(gm, "all_reduce"), total), 1e-6)
        return 1

    declare = graph_optimization_pass(changes_numerics=True, registry=PassRegistry())
    return declare(run)


def of_received(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    norms = [new(gm, like, aten.linalg_vector_norm.default, b.wait_nodes[0]) for b in blocks]
    return new(gm, like, aten.linalg_vector_norm.default, new(gm, like, aten.stack.default, norms))


def squares_of_received(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    total = None
    for block in blocks:
        bucket = block.wait_nodes[0]
        squares = new(gm, like, aten.mul.Tensor, bucket, bucket)
        part = new(gm, like, aten.sum.default, squares)
        total = part if total is None else new(gm, like, aten.add.Tensor, total, part)
    return new(gm, like, aten.sqrt.default, total)


def of_sent(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    """Each rank its own norm."""
    norms = [new(gm, like, aten.linalg_vector_norm.default, b.inputs[0]) for b in blocks]
    return new(gm, like, aten.linalg_vector_norm.default, new(gm, like, aten.stack.default, norms))


def of_all_but_one(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    return of_received(gm, blocks[1:], like)


def of_half(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    """A norm of the first gradients of each bucket."""
    norms = []
    for block in blocks:
        end = bucket_members(block)[-1].start
        part = new(gm, like, aten.slice.Tensor, block.wait_nodes[0], 0, 0, end)
        norms.append(new(gm, like, aten.linalg_vector_norm.default, part))
    return new(gm, like, aten.linalg_vector_norm.default, new(gm, like, aten.stack.default, norms))


def of_one_gradient(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    return new(gm, like, aten.linalg_vector_norm.default, bucket_members(blocks[0])[0].received[0])


def another_power(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    norms = [new(gm, like, aten.linalg_vector_norm.default, b.wait_nodes[0], 1) for b in blocks]
    return new(gm, like, aten.linalg_vector_norm.default, new(gm, like, aten.stack.default, norms))


def added_up(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    norms = [new(gm, like, aten.linalg_vector_norm.default, b.wait_nodes[0]) for b in blocks]
    return new(gm, like, aten.sum.default, new(gm, like, aten.stack.default, norms))


def first_twice(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    return of_received(gm, [blocks[0], *blocks], like)


def mean_square(gm: fx.GraphModule, blocks: list[CommBlock], like: fx.Node) -> fx.Node:
    norms = []
    for block in blocks:
        bucket = block.wait_nodes[0]
        squares = new(gm, like, aten.mul.Tensor, bucket, bucket)
        norms.append(new(gm, like, aten.mean.default, squares))
    stacked = new(gm, like, aten.stack.default, norms)
    return new(gm, like, aten.sqrt.default, new(gm, like, aten.sum.default, stacked))


RIGHT = [of_received, squares_of_received]
LOSES_A_SOURCE = [of_sent, of_all_but_one, of_half, of_one_gradient]
OTHER_VALUES = [another_power, added_up, first_twice, mean_square]
BUCKETS = [(comm_fusion_with_concat, {"bucket_size_mb": 0.3})]


@cache
def step_with(norm: str) -> StepUnderTest:
    return StepUnderTest(clip_by(USERS_NORMS[norm]), arguments())


@pytest.mark.parametrize(("users", "norm"), list(product(USERS_NORMS, RIGHT)))
def test_a_norm_of_received_buckets_is_accepted(users: str, norm: NormOfBuckets) -> None:
    record = step_with(users).check(norm_pass(norm), after=BUCKETS, idempotent=False)
    assert record.changed
    assert record.collectives_before == 2


@pytest.mark.parametrize(("users", "norm"), list(product(USERS_NORMS, LOSES_A_SOURCE)))
def test_a_norm_that_lost_gradients_is_refused(users: str, norm: NormOfBuckets) -> None:
    with pytest.raises(VerificationError, match=r"does not (depend on|get) %"):
        step_with(users).check(norm_pass(norm), after=BUCKETS, idempotent=False)


@pytest.mark.parametrize(("users", "norm"), list(product(USERS_NORMS, OTHER_VALUES)))
def test_another_function_of_all_gradients_is_refused_by_value(
    users: str, norm: NormOfBuckets
) -> None:
    with pytest.raises(AssertionError, match="changes"):
        step_with(users).check(norm_pass(norm), after=BUCKETS, idempotent=False)


def test_the_same_bucket_in_the_same_order_is_proven() -> None:
    """A vector that the step itself puts together is one that was received, bit for bit."""

    def in_order(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        total = torch.cat([p.grad.reshape(-1) for p in reversed(list(model.parameters()))]).norm()
        for p in model.parameters():
            p.grad.div_(total + 1e-6)
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))  # no zeros between the members
    args = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 16)
    exact = graph_optimization_pass(registry=PassRegistry())

    def of_bucket(gm: fx.GraphModule) -> int:
        (block,) = get_all_comm_blocks(gm, "all_reduce")
        calls(gm, "cat")[-1].replace_all_uses_with(block.wait_nodes[0])
        return 1

    def other_order(gm: fx.GraphModule) -> int:
        joined = calls(gm, "cat")[-1]
        joined.args = (list(reversed(joined.args[0])),)
        return 1

    step = StepUnderTest(in_order, args)
    assert step.check(exact(of_bucket), after=BUCKETS, idempotent=False).changed
    with pytest.raises(VerificationError):
        step.check(exact(other_order), after=BUCKETS, idempotent=False)


def test_a_product_depends_on_a_transposition() -> None:
    """Arrangements are followed for readers alone to which they make no difference."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        turned = x.t()
        return (turned @ model(x)).sum() + turned.norm()

    args = nn.Linear(4, 4), torch.randn(4, 4)

    def untransposed(gm: fx.GraphModule) -> int:
        (x,) = (n for n in gm.graph.find_nodes(op="placeholder") if n.target == "x")
        for matrices in calls(gm, "mm"):
            matrices.args = (x, matrices.args[1])
        return 1

    declared = graph_optimization_pass(changes_numerics=True, registry=PassRegistry())
    with pytest.raises(VerificationError, match="%mm does not depend on %t"):
        StepUnderTest(step, args).check(declared(untransposed), idempotent=False)
