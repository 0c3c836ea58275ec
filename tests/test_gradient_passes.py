"""Gradients in bfloat16, and the log of their norms."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gloo
import graphopt
from gloo import Pool
from graphopt.comm import get_all_comm_blocks
from graphopt.graph_utils import get_outputs
from graphopt.host import is_host_call
from graphopt.manager import PassRegistry
from graphopt.optim import gradients_of
from graphopt.passes import compress_gradients, log_gradient_norms
from graphopt.stages.pipelines import default_pipeline
from graphopt.testing import StepUnderTest, check_pass, fake_ranks
from sketch import gradients, one_rank


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def captured(dtype: torch.dtype = torch.float32) -> graphopt.IterGraphModule:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(4, 8, dtype=dtype)
    found = graphopt.capture(step, model, optimizer, x, parallel=graphopt.DataParallel())
    return graphopt.IterGraphModule(found.graph_module)


def test_half_the_bytes() -> None:
    with one_rank():
        gm = captured()
        whole = [block.nbytes for block in get_all_comm_blocks(gm, "all_reduce")]
        buffers = [block.nbytes for block in get_all_comm_blocks(gm, "broadcast")]
        record = compress_gradients(gm)
        assert record.changes == len(whole) and record.changes_numerics
        assert [2 * b.nbytes for b in get_all_comm_blocks(gm, "all_reduce")] == whole
        assert [b.nbytes for b in get_all_comm_blocks(gm, "broadcast")] == buffers
        assert all(b.dtype is torch.bfloat16 for b in get_all_comm_blocks(gm, "all_reduce"))
        assert graphopt.comm.parameters_of(gm, get_all_comm_blocks(gm, "all_reduce")[0])
        with pytest.raises(graphopt.PassOrderError):
            compress_gradients(gm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_float32(dtype: torch.dtype) -> None:
    with one_rank():
        assert compress_gradients(captured(dtype)).changes == 0


def test_what_the_step_sends_itself_stays() -> None:
    with one_rank():
        assert compress_gradients(gradients((4,), (8,))).changes == 0


def with_compression() -> list[object]:
    pipeline = list(default_pipeline())
    pipeline.insert(3, compress_gradients)
    return pipeline


def train(rank: int, compressed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = with_compression() if compressed else "default"
    train_step = graphopt.compile(step, pipeline=pipeline)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(8):
        train_step(model, optimizer, torch.randn(32, 16, generator=generator))
    train_step.flush()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_error_of_a_training(two_ranks: Pool) -> None:
    """Ranks stay equal, and parameters are off by a small part of what they have moved."""
    exact = two_ranks.run(train, False)[0]
    one, other = two_ranks.run(train, True)
    assert all(map(torch.equal, one, other))
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).parameters()
    moved = torch.cat([(a - b.detach()).flatten() for a, b in zip(exact, start, strict=True)])
    off = torch.cat([(a - b).flatten() for a, b in zip(exact, one, strict=True)])
    assert 0 < off.norm() < 2**-7 * moved.norm()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rms": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 5, bias=False))


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def step_of_gradient_norms(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def expected_norms(net: nn.Module, optimizer: Any, batches: list[Tensor], clip: bool) -> list[Any]:
    """Norms in eager training, each step's gradients as the optimizer takes them."""
    found = []
    for batch in batches:
        net(batch).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        found.append([torch.linalg.vector_norm(p.grad) for p in net.parameters()])  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("function", [step_of_gradient_norms, clipped])
def test_norms_are_eagers(name: str, function: Callable[..., Any]) -> None:
    net, batches = model(), list(torch.randn(3, 4, 6))
    twin = copy.deepcopy(net)
    expected = expected_norms(
        twin, OPTIMIZERS[name](twin.parameters()), batches, function is clipped
    )
    seen: list[dict[str, Tensor]] = []
    train = graphopt.compile(function, pipeline=[(log_gradient_norms, {"log": seen.append})])
    optimizer = OPTIMIZERS[name](net.parameters())
    for batch in batches:
        train(net, optimizer, batch)
    assert len(seen) == 3
    for norms, theirs in zip(seen, expected, strict=True):
        assert len(norms) == 5
        assert all(any(torch.equal(norm, other) for other in theirs) for norm in norms.values())
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_norms_have_the_names_of_parameters() -> None:
    net = model()
    under_test = StepUnderTest(
        step_of_gradient_norms, (net, OPTIMIZERS["foreach"](net.parameters()), torch.ones(4, 6))
    )
    gm = under_test.graph_module
    found = gradients_of(gm)
    assert {p.target for p in found} == {
        n.target for n in gm.graph.nodes if n.meta.get("kind") == "parameter"
    }
    assert all(p.meta["val"].shape == g.meta["val"].shape for p, g in found.items())
    record = under_test.check(log_gradient_norms, changes=5)
    assert record.nodes_after == record.nodes_before + 5 + 1


def test_every_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train = graphopt.compile(step_of_gradient_norms, pipeline="log_gradient_norms(every=2)")
    with caplog.at_level(logging.INFO, "graphopt"):
        for _ in range(5):
            train(net, optimizer, torch.ones(4, 6))
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("gradient norm")]
    assert len(lines) == 2
    assert "0_weight" in lines[0] or "_0_weight" in lines[0]


def test_averages_are_what_is_logged() -> None:
    net = model()
    args = net, OPTIMIZERS["foreach"](net.parameters()), torch.randn(4, 6)
    seen: list[Any] = []
    with fake_ranks(2):
        check_pass(step_of_gradient_norms, args, log_gradient_norms, log=seen.append, changes=5)
        captured = graphopt.capture(step_of_gradient_norms, *args).graph_module
    manager = graphopt.PassManager(
        "comm_fusion_with_concat -> schedule_comm_wait -> log_gradient_norms"
        " -> remove_copy_from_optimizer -> iter_move_grads_and_optimizers"
    )
    module = graphopt.IterGraphModule(captured)
    records = manager.run(module)
    assert records[-1].changes == 0, "what is logged cannot be late"
    assert sum(map(is_host_call, module.graph.nodes)) == 1
    with pytest.raises(graphopt.PassOrderError, match="comes too late"):
        graphopt.PassManager("schedule_updates -> log_gradient_norms").run(
            graphopt.IterGraphModule(captured)
        )


def on_ranks(rank: int) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    net = model()
    seen: list[dict[str, Tensor]] = []
    train = graphopt.compile(
        step_of_gradient_norms, pipeline=[(log_gradient_norms, {"log": seen.append})]
    )
    optimizer = OPTIMIZERS["foreach"](net.parameters())
    for number in range(2):
        torch.manual_seed(10 * rank + number)
        train(net, optimizer, torch.randn(4, 6))
    train.flush()
    return seen, [p.detach().clone() for p in net.parameters()]


def test_on_real_ranks(two_ranks: gloo.Pool) -> None:
    (first, mine), (second, theirs) = two_ranks.run(on_ranks)
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(map(torch.equal, mine, theirs))


def test_callback_takes_nodes_in_a_pass() -> None:
    """`graphopt.callback` itself: behind the nodes, where no insertion point is active."""
    seen: list[Any] = []

    @graphopt.graph_optimization_pass(registry=PassRegistry())
    def log(gm: Any) -> int:
        outputs = get_outputs(gm.graph)
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        graphopt.callback(seen.append, outputs.results[0])
        graphopt.callback(lambda *values: seen.append(len(values) - len(inputs)), *inputs)
        with gm.graph.inserting_before(outputs.updates[0]):
            graphopt.callback(lambda value: seen.append("active"), outputs.results[0])
        return 3

    model = nn.Linear(2, 2)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = graphopt.compile(step_of_gradient_norms, pipeline=[log])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = compiled(model, optimizer, torch.ones(3, 2))
    assert len(seen) == 6
    assert seen[0] == 0 and torch.equal(seen[4], loss) and "active" in seen
    other = graphopt.capture(lambda m, x: m(x), model, torch.ones(3, 2)).graph_module
    nodes = [next(iter(gm.graph.nodes)) for gm in (other, compiled.graph_module)]
    with pytest.raises(ValueError, match="nodes of several graphs"):
        graphopt.callback(print, *nodes)
