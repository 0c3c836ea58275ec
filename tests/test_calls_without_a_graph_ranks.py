"""Calls for which a rank has no graph when they begin, of programs whose ranks decide by values of
their own: it goes along with what the other ranks launch, or all ranks end the call."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool


class Model(nn.Module):
    """Each rank decides by its own batch whether it communicates, and which layer it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.ways = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        if x[0, 1] > 5:
            dist.all_reduce(hidden.detach().sum())
        result: Tensor = self.ways[0 if x[0, 2] > 5 else 1](hidden)
        return result


def batch(kind: str, numbers: torch.Generator) -> Tensor:
    """As many rows as `kind` begins with. With an "e" the step returns early, with a "c" it
    communicates, with a "-" it takes another layer."""
    x = torch.randn(int(kind[0]), 3, generator=numbers).clamp(-2, 2)
    x[0] = torch.tensor([9.0 if letter in kind else -9.0 for letter in "ec-"])
    return x


def trained(rank: int, kinds: str, keep: bool, skipped: list[int] | None) -> list[Any]:
    """What each call gives and leaves, or the text of its error.

    Args:
        keep: gradients are set to zero, not to None.
        skipped: calls that are left out, of DistributedDataParallel; None: of the compiled step.
    """
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = skipped is None
    net = model if compiled else DistributedDataParallel(model, find_unused_parameters=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=not keep)
        if x[0, 0] > 5:
            return x.sum()
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    run: Any = graphopt.compile(step) if compiled else step
    numbers = torch.Generator().manual_seed(rank)
    found: list[Any] = []
    for call, kind in enumerate(kinds.split()):
        x = batch(kind, numbers)
        if call in (skipped or []):
            found.append("skipped")
            continue
        try:
            loss = run(x)
        except graphopt.SpmdMismatchError as error:
            found.append(str(error))
            continue
        found.append([loss, *(tensor.detach().clone() for tensor in model.state_dict().values())])
    return found


def compare(rank: int, kinds: list[str], keep: bool) -> list[tuple[int, str]]:
    """The calls that have ended with an error; the others are equal to the reference's."""
    found = trained(rank, kinds[rank], keep, None)
    failed = [(call, each) for call, each in enumerate(found) if isinstance(each, str)]
    expected = trained(rank, kinds[rank], keep, [call for call, _ in failed])
    for call, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != "skipped":
            assert all(map(torch.equal, one, other)), call
    return failed


ENDED = {
    "one rank has a graph": ["5 5 5 5", "5 5 4c 5"],
    "no rank has one": ["5 5 4 5", "5 5 4c 5"],
    "a way without launches came before": ["5 5 5e 5 5", "5 5 5e 4c 5"],
    "a rank has one for another way alone": ["5 5 5e 5 5 5", "5 5 4e 5 4c 5"],
}
TRAINED = {
    "all take a way that launches something else": ["5 5 4c 5 4c", "5 5 4c 5 4c"],
    "one takes another layer": ["5 5 5 4- 5", "5 5 4- 5 4"],
    "graphs of two ways": ["5 5 5e 5 5 5e 5", "5 5 4e 5 4- 4e 5-"],
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ENDED)
def test_a_rank_that_cannot_go_along_ends_the_call_on_all(
    two_ranks: Pool, name: str, keep: bool
) -> None:
    kinds = ENDED[name]
    (call,) = (i for i, kind in enumerate(kinds[1].split()) if "c" in kind)
    for failed in two_ranks.run(compare, kinds, keep):
        assert [number for number, _ in failed] == [call], failed
        assert "hint:  decide there" in failed[0][1], failed
        assert "  from:  " in failed[0][1], failed


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_ranks_that_may_go_along_train_on(two_ranks: Pool, name: str, keep: bool) -> None:
    assert two_ranks.run(compare, TRAINED[name], keep) == [[], []]


def alone(rank: int) -> str:
    """Rank 1 leaves a call to which rank 0 does not come."""
    model = Model()

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        return loss.detach()

    numbers = torch.Generator().manual_seed(rank)
    step(batch("5", numbers))
    if rank == 0:
        return ""
    with pytest.raises(graphopt.CollectiveError) as caught:
        step(batch("4c", numbers))
    return str(caught.value)


def test_a_rank_that_leaves_a_call_alone() -> None:
    pool = Pool(2, timeout=timedelta(seconds=10))
    try:
        assert "as this rank leaves the call" in pool.run(alone)[1]
    finally:
        pool.close()
