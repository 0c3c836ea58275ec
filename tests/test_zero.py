"""ZeRO on two and three real ranks: the bits of DDP in many settings, with the optimizer's state in
rows, and the values of ranks in one process."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from gloo import Pool
from graphopt.parallel.sharding import shards_of
from zero_cases import (
    Beside,
    Language,
    Uneven,
    batches,
    clipped_step,
    same,
    sharded,
    train_step,
    whole,
)
from zero_settings import (
    COMBINATIONS,
    FUSED,
    SETTINGS,
    accumulating,
    run_accumulated,
    run_averages,
    run_combination,
    run_setting,
    run_several_backwards,
)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def run_language(rank: int, stage: int, pipeline: str) -> dict[str, Any]:
    pair = Beside(Language, adamw, stage=stage, pipeline=pipeline)
    pair.run(rank)
    pair.compare()
    state = pair.optimizer.state[pair.model.blocks[0].up.weight]
    records = [record.name for record in pair.step.report]
    return {
        "moment": type(state["exp_avg"]).__name__,
        "rows": tuple(state["exp_avg"].to_local().shape),
        "parameter": type(pair.model.blocks[0].up.weight).__name__,
        "records": records,
    }


@pytest.mark.parametrize("pipeline", ["none", "default"])
def test_stage_one_is_ddp(two_ranks: Pool, pipeline: str) -> None:
    for found in two_ranks.run(run_language, 1, pipeline):
        assert found["moment"] == "DTensor"
        assert found["rows"] == (64, 64)
        assert found["parameter"] == "Parameter"
        assert "parallelize" in found["records"]


@pytest.mark.parametrize("pipeline", ["none", "default"])
def test_stage_three_is_ddp(two_ranks: Pool, pipeline: str) -> None:
    for found in two_ranks.run(run_language, 3, pipeline):
        assert (found["moment"], found["parameter"]) == ("DTensor", "DTensor")


def run_tied(rank: int) -> bool:
    """Tied weights whose rows are uneven; as DDP has them, they are one parameter."""
    pair = Beside(lambda: Language(tied=True, width=256), adamw, stage=3, pipeline="default")
    pair.run(rank)
    pair.compare()
    with pair.step.full_parameters():
        assert pair.model.head.weight is pair.model.tokens.weight
        same(pair.model.head.weight.detach(), pair.reference.head.weight.detach(), "head")
    assert pair.model.head.weight is pair.model.tokens.weight
    return sharded(pair.model.head.weight)


def test_tied_weights_with_uneven_rows(two_ranks: Pool) -> None:
    assert two_ranks.run(run_tied) == [True, True]


def run_uneven(rank: int, stage: int) -> tuple[bool, int]:
    pair = Beside(Uneven, adamw, stage=stage)
    pair.run(rank)
    pair.compare()
    moment = pair.optimizer.state[pair.model.tokens.weight]["exp_avg"]
    return sharded(moment), moment.to_local().shape[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_rows_that_no_cut_divides(two_ranks: Pool, stage: int) -> None:
    assert two_ranks.run(run_uneven, stage) == [(True, 34), (True, 33)]


def run_clipped(rank: int, stage: int) -> tuple[int, int]:
    """One all-reduce for all norms, and gathers of parameters alone; losses of the first step are
    the same bits."""
    pair = Beside(Uneven, adamw, stage=stage, step=clipped_step)
    given = next(batches(rank, 1))
    assert torch.equal(
        pair.step(pair.model, pair.optimizer, *given),
        pair.eager(pair.ddp, pair.reference_optimizer, *given),
    )
    pair.compare(1e-5)
    text = str(pair.step.graph_module.graph)
    names = ("all_reduce.default", "all_gather_into_tensor.default")
    reduced, gathered = (text.count(f"_c10d_functional.{name}") for name in names)
    return reduced, gathered


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_by_the_norm(two_ranks: Pool, stage: int) -> None:
    bias, norms = 1, 1
    once = 2  # the backward reads no weight of an embedding, and begins with the head's
    assert two_ranks.run(run_clipped, stage) == [(bias + norms, once)] * 2


def run_odd_stage(rank: int) -> str:
    pair = Beside(Uneven, adamw, stage=1 + 2 * rank, timeout=20.0)
    with pytest.raises(graphopt.SpmdMismatchError) as caught:
        pair.step(pair.model, pair.optimizer, *next(batches(rank, 1)))
    assert not sharded(pair.model.tokens.weight)
    return str(caught.value)


def test_ranks_with_other_stages(two_ranks: Pool) -> None:
    for said in two_ranks.run(run_odd_stage):
        assert "ZeRO(stage=3" in said and "ZeRO(stage=1" in said


def test_a_group_of_one(one_rank: None) -> None:
    model = Uneven()
    step = graphopt.compile(clipped_step, parallel=graphopt.ZeRO())
    with pytest.raises(graphopt.CollectiveError, match="single rank"):
        step(model, adamw(model.parameters()), *next(batches(0, 1)))


def test_bad_stage() -> None:
    with pytest.raises(ValueError, match="stages 1, 2 and 3"):
        graphopt.ZeRO(stage=4)
    for wrong in (-1, "much", True):
        with pytest.raises(graphopt.ParallelismError, match="keep_mb"):
            graphopt.ZeRO(stage=3, keep_mb=wrong)
    assert graphopt.ZeRO(stage=2) == graphopt.ZeRO(stage=1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stage", [1, 3])
def test_bits_of_ddp(two_ranks: Pool, stage: int, name: str) -> None:
    two_ranks.run(run_setting, name, stage)


@pytest.mark.parametrize("number", range(COMBINATIONS))
def test_bits_of_ddp_in_combinations(two_ranks: Pool, number: int) -> None:
    """Each of several models, optimizers, steps and ways to go on, with what stays whole."""
    two_ranks.run(run_combination, number)


@pytest.mark.parametrize("stage", [1, 3])
def test_several_backwards_for_one_update(two_ranks: Pool, stage: int) -> None:
    two_ranks.run(run_several_backwards, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_averages_among_the_arguments(two_ranks: Pool, stage: int) -> None:
    two_ranks.run(run_averages, stage)


@pytest.mark.parametrize("build", ["language", "uneven"])
def test_accumulated_gradients(two_ranks: Pool, build: str) -> None:
    two_ranks.run(run_accumulated, 1, build)


def run_refused(rank: int) -> str:
    pair = Beside(Uneven, FUSED, accumulating, 3)
    with pytest.raises(graphopt.CaptureError) as caught, pair.step.no_sync():
        pair.step(pair.model, pair.optimizer, *next(batches(rank, 1)), False)
    return str(caught.value)


def test_accumulation_over_calls_needs_whole_parameters(two_ranks: Pool) -> None:
    for said in two_ranks.run(run_refused):
        assert "stage=1" in said


Built = dict[str, Any]
MODELS: Built = {"uneven": Uneven}


def adamw_by_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def run_sharded(rank: int, model: str, stage: int, pipeline: str, count: int = 3) -> list[Tensor]:
    torch.manual_seed(3)
    made = MODELS[model]()
    optimizer = adamw_by_tensor(made.parameters())
    step = graphopt.compile(train_step, parallel=graphopt.ZeRO(stage=stage), pipeline=pipeline)
    for given in batches(rank, count):
        step(made, optimizer, *given)
    step.flush()
    return [whole(parameter.detach()).clone() for parameter in made.parameters()]


def in_rank_order(model: str, ranks: int, count: int = 3) -> list[Tensor]:
    """The same training in this process: gradients are added in the order of the ranks."""
    torch.manual_seed(3)
    made = MODELS[model]()
    replicas = [made, *(copy.deepcopy(made) for _ in range(1, ranks))]
    optimizer = adamw_by_tensor(made.parameters())
    given = [list(batches(rank, 3)) for rank in range(ranks)]
    for number in range(count):
        for replica, own in zip(replicas, given, strict=True):
            replica.load_state_dict(made.state_dict())
            tokens, wanted = own[number]
            F.cross_entropy(replica(tokens).flatten(0, 1), wanted.flatten()).backward()
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            scaled = [p.grad * (1 / ranks) for p in parameters]  # type: ignore[operator]
            total = scaled[0] + scaled[1]
            for more in scaled[2:]:
                total += more
            parameters[0].grad = total
        optimizer.step()
        for replica in replicas:
            replica.zero_grad()
    return [parameter.detach() for parameter in made.parameters()]


def check(found: list[list[Tensor]], model: str, ranks: int) -> None:
    """All ranks have the same; what is sharded has the bits of sums in rank order."""
    expected = in_rank_order(model, ranks)
    for parameters in found:
        for index, (ours, theirs, first) in enumerate(
            zip(parameters, expected, found[0], strict=True)
        ):
            same(ours, first, f"parameter {index}")
            same(ours, theirs, f"parameter {index}", 1e-6)


@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 3])
def test_three_ranks(three_ranks: Pool, stage: int, model: str, pipeline: str) -> None:
    check(three_ranks.run(run_sharded, model, stage, pipeline), model, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_scattered_gradients_have_the_bits_of_the_order_of_ranks(
    three_ranks: Pool, stage: int
) -> None:
    """Of one step, since a ring adds what is not cut in another order."""
    model = "uneven"
    expected = in_rank_order(model, 3, 1)
    cut = [shards_of(parameter, 3) for parameter in MODELS[model]().parameters()]
    assert sum(each is not None for each in cut) == 2
    for found in three_ranks.run(run_sharded, model, stage, "default", 1):
        for shards, ours, theirs in zip(cut, found, expected, strict=True):
            if shards is not None:
                same(ours, theirs, str(shards.shape))


class Few(nn.Module):
    """Fewer rows than ranks: nothing is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 16384))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.float().mean() * self.weight.square().mean()


def few_step(model: nn.Module, optimizer: Any, tokens: Tensor, wanted: Tensor) -> Tensor:
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def run_few(rank: int) -> tuple[bool, float]:
    model = Few()
    optimizer = adamw_by_tensor(model.parameters())
    step = graphopt.compile(few_step, parallel=graphopt.ZeRO(stage=3))
    start = time.monotonic()
    loss = float(step(model, optimizer, *next(batches(0, 1))))
    assert time.monotonic() - start < 60
    return sharded(model.weight), loss


def test_more_ranks_than_rows(three_ranks: Pool) -> None:
    found = three_ranks.run(run_few)
    assert {cut for cut, _ in found} == {False}
    assert len({loss for _, loss in found}) == 1
