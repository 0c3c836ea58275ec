"""Whole pipelines on real gloo ranks against DistributedDataParallel, with steps left in flight.

Each training is one scenario: several steps without anyone looking, a flush, a checkpoint that is
saved and loaded, a batch of another size, accumulation under `no_sync`, a learning rate that
changes in every step. State is compared after each of these, outputs in every step."""

from __future__ import annotations

import copy
import gc
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from gloo import Pool
from graphopt.errors import PassError, SpmdMismatchError
from graphopt.manager import PassManager, PassRegistry, applied_passes, graph_optimization_pass
from graphopt.passes import comm_fusion_with_concat
from graphopt.runtime.late.tensors import LateTensors
from graphopt.saved import load_graph
from graphs import training_step
from scenario import NO_ACCUMULATION, PIPELINES, Scenario
from twins import assert_same
from zoo import MODELS, train_step


def run_scenario(rank: int, model: str, optimizer: str, pipeline: str, accumulates: bool) -> int:
    scenario = Scenario(rank, model, optimizer, pipeline=pipeline)
    return scenario.run(accumulates=accumulates)


@pytest.mark.parametrize("model", ["partial", "gpt", "convnet", "recurrent", "shared-storage"])
def test_model(two_ranks: Pool, model: str) -> None:
    accumulates = model not in NO_ACCUMULATION
    pipeline = PIPELINES[{"gpt": "default", "shared-storage": "moves"}.get(model, "small buckets")]
    flights = two_ranks.run(run_scenario, model, "adamw-fused", pipeline, accumulates)
    assert min(flights) > 0


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw-amsgrad-fused", "nadam-foreach"])
def test_optimizer(two_ranks: Pool, optimizer: str) -> None:
    flights = two_ranks.run(run_scenario, "mlp", optimizer, PIPELINES["small buckets"], True)
    assert min(flights) > 0


@pytest.mark.parametrize("pipeline", ["copies", "fusion", "waits", "moves"])
def test_each_pass_alone(two_ranks: Pool, pipeline: str) -> None:
    flights = two_ranks.run(run_scenario, "mlp", "adamw-foreach", PIPELINES[pipeline], True)
    assert (min(flights) > 0) == (pipeline == "moves")


# Who reads state while a step is in flight


def readers() -> dict[str, Any]:
    return {
        "state_dict": lambda w: w.model.state_dict(),
        "load_state_dict": lambda w: w.model.load_state_dict(
            {k: v + 1 for k, v in w.model.state_dict().items()}
        ),
        "parameters": lambda w: [p.detach().clone() for p in w.model.parameters()],
        "one parameter": lambda w: w.model.head.weight.detach().clone(),
        "deepcopy": lambda w: copy.deepcopy(w.model).state_dict(),
        "forward": lambda w: w.model(torch.ones(2, 8)).detach(),
        "optimizer.state_dict": lambda w: w.optimizer.state_dict(),
        "param_groups": lambda w: [
            p.detach().clone() for g in w.optimizer.param_groups for p in g["params"]
        ],
        "average": lambda w: torch.optim.swa_utils.AveragedModel(w.model).module.state_dict(),
        "in-place change": lambda w: [p.data.mul_(0.5) for p in w.model.parameters()][:0],
    }


def read_in_flight(rank: int) -> None:
    scenario = Scenario(rank, "mlp", "adamw-fused", pipeline="default")
    for name, reader in readers().items():
        scenario.steps(3)
        assert scenario.twins.compiled.graph_module.in_flight, name
        scenario.twins.both(reader)
    scenario.twins.finish()


def test_readers_of_state_see_it_finished(two_ranks: Pool) -> None:
    two_ranks.run(read_in_flight)


def calls_one_after_another(rank: int, marked: bool) -> None:
    scenario = Scenario(rank, "mlp", "adamw-fused", pipeline="default")
    if marked:
        for parameter in scenario.twins.captured.model.parameters():
            vars(parameter)["scale"] = 0.5
    scenario.steps(3)
    uses: list[int] = []
    settle = LateTensors.settle

    def counted(late: LateTensors) -> None:
        uses.append(1)
        settle(late)

    LateTensors.settle = counted  # type: ignore[method-assign]
    try:
        scenario.steps(3)
    finally:
        LateTensors.settle = settle  # type: ignore[method-assign]
    assert scenario.twins.compiled.graph_module.in_flight
    assert uses == []
    scenario.twins.finish()


@pytest.mark.parametrize("marked", [False, True])
def test_a_call_uses_nothing_that_is_in_flight_before_its_graph_runs(
    two_ranks: Pool, marked: bool
) -> None:
    two_ranks.run(calls_one_after_another, marked)


def flush_on_rank_0(rank: int) -> None:
    scenario = Scenario(rank, "mlp", "adamw-foreach", pipeline="default")
    scenario.steps(3)
    if rank == 0:
        torch.save(scenario.twins.captured.model.state_dict(), io.BytesIO())
    scenario.steps(2)
    scenario.twins.finish()


def test_rank_0_may_flush_alone(two_ranks: Pool) -> None:
    """A checkpoint on one rank does not wait for the others: flushing does not communicate."""
    two_ranks.run(flush_on_rank_0)


def moved_collective(rank: int) -> None:
    scenario = Scenario(rank, "mlp", "sgd-loop", pipeline="none")
    scenario.steps(2)
    name = next(
        node.name
        for node in scenario.twins.compiled.graph_module.graph.nodes
        if "all_reduce" in str(node.target)
    )
    pipeline: list[Any] = ["remove_copy_from_optimizer"]
    pipeline.append(("iter_move_grads_and_optimizers", {"target_comm_node": name}))
    scenario = Scenario(rank, "mlp", "sgd-loop", pipeline=pipeline)
    scenario.steps(3)
    with pytest.raises(graphopt.GraphOptError, match=r"call flush\(\).*every rank"):
        scenario.twins.captured.model.state_dict()
    scenario.twins.compiled.flush()
    scenario.twins.finish()


def test_a_collective_in_flight_is_flushed_by_all_ranks(two_ranks: Pool) -> None:
    two_ranks.run(moved_collective)


def two_steps_on_one_model(rank: int) -> None:
    def half(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x).sum(-1), y.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    scenario = Scenario(rank, "mlp", "adamw-fused", pipeline="default")
    other = graphopt.compile(half, pipeline="default")
    for _ in range(3):
        scenario.steps(2)
        batch = MODELS["mlp"].batch(rank)
        w, eager = scenario.twins.captured, scenario.twins.eager
        loss = other(w.model, w.optimizer, *batch)
        expected = half(scenario.twins._eager_models[0], eager.optimizer, *batch)
        assert_same(loss, expected.detach(), "loss")
    scenario.twins.compare_state()


def test_two_steps_train_one_model(two_ranks: Pool) -> None:
    two_ranks.run(two_steps_on_one_model)


class Wrapped(nn.Module):
    """A model inside another, which only the training needs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def trained_inside(rank: int, steps: int, flushed: bool) -> nn.Module:
    """A model that was trained through a wrapper, which is gone by now."""
    torch.manual_seed(0)
    inner = MODELS["mlp"].make()
    wrapper = Wrapped(inner)
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=1e-2, fused=True)
    compiled = graphopt.compile(train_step)
    for i in range(steps):
        compiled(wrapper, optimizer, *MODELS["mlp"].batch(1000 * rank + i))
        if flushed:
            compiled.flush()
    assert compiled.graph_module.in_flight is not flushed
    del wrapper
    gc.collect()
    return inner


def model_dies_in_flight(rank: int) -> None:
    inner, expected = (trained_inside(rank, 4, flushed) for flushed in (False, True))
    assert_same(inner.state_dict(), expected.state_dict(), "parameters")


def test_layers_outlive_the_model_that_was_trained(two_ranks: Pool) -> None:
    two_ranks.run(model_dies_in_flight)


def read_by_a_thread(rank: int) -> None:
    scenario = Scenario(rank, "mlp", "adamw-fused", pipeline="default")
    scenario.steps(2)
    failures: list[BaseException] = []
    over = threading.Event()

    def read() -> None:
        try:
            while not over.is_set():
                scenario.twins.captured.model.state_dict()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    scenario.steps(6)
    over.set()
    thread.join()
    assert failures == []
    scenario.twins.finish()


def test_another_thread_may_read_at_any_time(two_ranks: Pool) -> None:
    two_ranks.run(read_by_a_thread)


def parameter_as_argument(rank: int) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, head: Tensor) -> Tensor:
        decay = 0.1 * head.square().sum()
        loss = F.cross_entropy(model(x), y) + decay
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = []
    for pipeline in ("none", "default"):
        torch.manual_seed(0)
        model = MODELS["mlp"].make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        compiled, head = graphopt.compile(step, pipeline=pipeline), model.head.weight.detach()
        batches = [MODELS["mlp"].batch(1000 * rank + i) for i in range(4)]
        losses.append([compiled(model, optimizer, *b, head) for b in batches])
        compiled.flush()
    assert_same(losses[1], losses[0], "losses")


def test_a_parameter_that_is_an_argument_as_well(two_ranks: Pool) -> None:
    two_ranks.run(parameter_as_argument)


def run_and_fail(rank: int, folder: str) -> str:
    registry = PassRegistry()

    @graph_optimization_pass(registry=registry)
    def fine(gm: fx.GraphModule) -> int:
        return 0

    @graph_optimization_pass(registry=registry)
    def crash(gm: fx.GraphModule) -> None:
        raise LookupError("on every rank")

    manager = PassManager("fine -> crash", registry=registry, dump_dir=folder)
    with pytest.raises(PassError, match="on every rank") as caught:
        manager.run(training_step(1))
    return str(caught.value)


def test_each_rank_has_files_of_its_own(two_ranks: Pool, tmp_path: Path) -> None:
    messages = two_ranks.run(run_and_fail, str(tmp_path))
    for rank in (0, 1):
        names = {path.name for path in (tmp_path / f"rank{rank}").iterdir()}
        assert names == {"after_fine.txt", "after_fine.diff"}
    files = sorted((tmp_path / "graphopt-repro").iterdir())
    assert [path.name for path in files] == ["01.pt", "02.pt"]
    assert all(applied_passes(load_graph(path)) == ["fine"] for path in files)
    assert all(any(str(path) in message for message in messages) for path in files)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run_unequally(rank: int) -> str:
    @graph_optimization_pass(registry=PassRegistry())
    def the_same(gm: fx.GraphModule) -> int:
        return 0

    @graph_optimization_pass(registry=PassRegistry())
    def by_rank(gm: fx.GraphModule) -> int:
        return comm_fusion_with_concat.function(gm) if rank else 0

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    train = graphopt.compile(step, pipeline=[the_same, by_rank])
    with pytest.raises(SpmdMismatchError) as caught:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
    return str(caught.value)


def test_a_pass_that_did_not_do_the_same_on_all_ranks_is_named(two_ranks: Pool) -> None:
    for message in two_ranks.run(run_unequally):
        assert "rank 1 has other collectives than rank 0" in message
        assert "pass:    'by_rank' did not do the same on all ranks" in message
