"""Every way in which a step reads, sets, deletes or writes gradients, at every place of the step,
on one, two and three ranks: the bits of DistributedDataParallel, or a refusal on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool
from gradient_accesses import ACCESSES, AVERAGED_EACH, HOOKS, PLACES, Net, Trained, step_of
from twins import assert_same

Case = tuple[str, str, bool]
"""An access, a place, and whether the model has layers that some ranks or none use."""


def trained_on(rank: int, access: str, spare: bool) -> Trained:
    torch.manual_seed(5)
    model = Net(spare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    trained = Trained(model, optimizer, rank)
    if access in HOOKS:
        HOOKS[access](trained)
    return trained


def left(trained: Trained) -> list[Any]:
    """Parameters, gradients and optimizer state."""
    found: list[Any] = []
    for parameter in trained.model.parameters():
        momentum = trained.optimizer.state.get(parameter, {}).get("momentum_buffer")
        found.append([parameter, parameter.grad, momentum])
    return [[None if each is None else each.detach().clone() for each in row] for row in found]


def batches(rank: int, spare: bool) -> list[tuple[Tensor, bool]]:
    """Rank 0 uses the spare layer in the first call, all ranks in the second, none in the last."""
    numbers = torch.Generator().manual_seed(70 + rank)
    uses = [rank == 0, True, False] if spare else [False, False]
    return [(torch.randn(4, 3, generator=numbers), each) for each in uses]


class Eager:
    """What a case does under DistributedDataParallel, or alone where there is one rank."""

    def __init__(self, case: Case, rank: int, ranks: int) -> None:
        access, place, spare = case
        self.trained = trained_on(rank, access, spare)
        net: nn.Module = self.trained.model
        local: Any = None
        if ranks > 1:
            bucket = 1e-6 if ranks > 2 else 25
            unused = spare or ranks > 2  # else the first call has all gradients in one bucket
            net = DistributedDataParallel(net, find_unused_parameters=unused, bucket_cap_mb=bucket)
            if access not in AVERAGED_EACH:
                local = net.no_sync  # where nobody looks between backwards (docs/exactness.md)
        self._step = step_of(self.trained, net, place, ACCESSES[access], local)

    def __call__(self, x: Tensor, uses_spare: bool) -> list[Any]:
        return [self._step(x, uses_spare), left(self.trained)]


def outcome(rank: int, ranks: int, cases: Sequence[Case], pipeline: str) -> dict[Case, str]:
    """Of cases that are all in one step, one after another: `"equal"`, or what was raised, or where
    the first difference is. Cases are tried one by one where the step is refused."""
    eager = [Eager(case, rank, ranks) for case in cases]
    captured = [trained_on(rank, access, spare) for access, _, spare in cases]
    parts = [
        step_of(trained, trained.model, place, ACCESSES[access])
        for trained, (access, place, _) in zip(captured, cases, strict=True)
    ]
    found = dict.fromkeys(cases, "equal")
    trained_by = [(trained.model, trained.optimizer) for trained in captured]
    step: Any = graphopt.compile(lambda _, *given: [p(*given) for p in parts], pipeline=pipeline)
    for number, given in enumerate(batches(rank, cases[0][2])):
        expected = [each(*given) for each in eager]
        try:
            read = step(trained_by, *given)
        except graphopt.GraphOptError as error:
            if len(cases) > 1:
                return {k: v for c in cases for k, v in outcome(rank, ranks, [c], pipeline).items()}
            return {cases[0]: f"{type(error).__name__}: {error}"}
        for case, mine, trained, wanted in zip(cases, read, captured, expected, strict=True):
            try:
                assert_same([mine, left(trained)], wanted, f"call {number}")
            except AssertionError as error:
                found[case] = f"different: {error}"
    return found


READS_TOO_EARLY = ("it reads a gradient while a second backward runs",)
REFUSED = {
    "hook_reads_the_gradient_before": READS_TOO_EARLY,
    "hook_of_a_module_reads": READS_TOO_EARLY,
    "shared_by_two": (
        "changes a tensor that stands in its lists twice",
        "share memory, to which a backward has added",  # DDP leaves there what its last bucket has
        "share storage",  # a graph made while those of an earlier call are there
    ),
}
"""Accesses that are refused, at some places, by parts of the reasons."""


def check(found: Sequence[dict[Case, str]]) -> None:
    """Each case is equal on all ranks, or refused on all of them for a known reason."""
    for case in found[0]:
        results = [theirs[case] for theirs in found]
        if results == ["equal"] * len(found):
            continue
        reasons = REFUSED.get(case[0], ())
        assert any(all(reason in text for text in results) for reason in reasons), (case, results)


AT_ONCE = 10
"""Cases that are in one step: a capture of its own takes each of them longer."""


def groups_at(place: str, spare: bool = False) -> list[list[Case]]:
    """All accesses at one place; hooks in steps of their own, since they change when the gradients
    of all models are averaged, and only in those steps that differ without an access."""
    cases = [(access, place, spare) for access in ACCESSES if access not in HOOKS]
    groups = [cases[start : start + AT_ONCE] for start in range(0, len(cases), AT_ONCE)]
    hooks = HOOKS if place in HOOKED else ()
    return [*groups, *([(access, place, spare)] for access in hooks)]


HOOKED = ("to_update", "to_clip", "between_backwards")
GROUPS = [(place, number) for place in PLACES for number in range(len(groups_at(place)))]
OF_THREE = ("to_update", "behind_clip", "around_backwards", "around_update")
"""Places at which three ranks try all accesses."""


def test_a_slice_in_one_process() -> None:
    """Each access at one of the places."""
    found: dict[Case, str] = {}
    for number, place in enumerate(PLACES):
        cases = [(access, place, False) for access in list(ACCESSES)[number :: len(PLACES)]]
        found |= outcome(0, 1, cases, "none")
    check([found])


SLICE: list[Case] = [
    ("no_more_trained", "to_update", True),
    ("none_by_param_groups", "between_backwards", False),
    ("own_values", "to_clip", False),
    ("swapped", "around_backwards", False),
    ("held_written", "around_backwards", False),
    ("data_replaced", "behind_clip", False),
]


def test_a_slice_on_two_ranks(two_ranks: Pool) -> None:
    for spare in (False, True):
        cases = [case for case in SLICE if case[2] == spare]
        check(two_ranks.run(outcome, 2, cases, "default"))


@pytest.mark.full
@pytest.mark.parametrize(("place", "number"), GROUPS)
def test_all_in_one_process(place: str, number: int) -> None:
    check([outcome(0, 1, groups_at(place)[number], "none")])


@pytest.mark.full
@pytest.mark.parametrize(("place", "number"), GROUPS)
def test_all_on_two_ranks(two_ranks: Pool, place: str, number: int) -> None:
    pipeline = ("none", "default")[number % 2]
    check(two_ranks.run(outcome, 2, groups_at(place)[number], pipeline, timeout=600.0))


@pytest.mark.full
@pytest.mark.parametrize(("place", "number"), [each for each in GROUPS if each[0] in OF_THREE])
def test_all_on_three_ranks(three_ranks: Pool, place: str, number: int) -> None:
    check(three_ranks.run(outcome, 3, groups_at(place)[number], "none", timeout=600.0))


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(groups_at("around_backwards"))))
@pytest.mark.parametrize("place", ["to_update", "around_backwards"])
def test_with_layers_that_some_ranks_or_none_use(two_ranks: Pool, place: str, number: int) -> None:
    cases = groups_at(place, spare=True)[number]
    check(two_ranks.run(outcome, 2, cases, "none", timeout=600.0))


class Sum(nn.Module):
    """The backward gives two parameters gradients of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + (self.one.unsqueeze(0) + self.two)).square().mean()


def test_gradients_that_a_backward_gives_one_storage(three_ranks: Pool) -> None:
    three_ranks.run(run_sums)


def run_sums(rank: int) -> None:
    torch.manual_seed(3)
    model = Sum()
    eager = DistributedDataParallel(
        copy.deepcopy(model), find_unused_parameters=True, bucket_cap_mb=1e-6
    )

    def train(net: nn.Module, x: Tensor) -> None:
        net.zero_grad()
        net(x).backward()

    step = graphopt.compile(train, pipeline="none")
    for number in range(2):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(7 * number + rank))
        train(eager, x)
        step(model, x)
        found, wanted = ([p.grad for p in net.parameters()] for net in (model, eager))
        assert found[0] is not None
        assert_same(found, wanted, f"call {number}")


def test_models_of_two_closures_may_have_one_name(two_ranks: Pool) -> None:
    """Both are averaged, although a path through the step names the same for both."""
    two_ranks.run(run_two_closures)


def run_two_closures(rank: int) -> None:
    cases: list[Case] = [("all_none", "before", False), ("norm_read", "to_update", False)]
    eager = [Eager(case, rank, 2) for case in cases]
    captured = [trained_on(rank, access, spare) for access, _, spare in cases]
    parts = [
        step_of(trained, trained.model, place, ACCESSES[access])
        for trained, (access, place, _) in zip(captured, cases, strict=True)
    ]
    step: Any = graphopt.compile(lambda *given: [p(*given) for p in parts], pipeline="none")
    for given in batches(rank, False):
        expected = [each(*given) for each in eager]
        read = step(*given)
        actual = [[r, left(trained)] for r, trained in zip(read, captured, strict=True)]
        assert_same(actual, expected, "two closures")
