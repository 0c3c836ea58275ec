"""Tensors that somebody holds while their update is in flight, on real ranks, against eager DDP."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graphopt
from gloo import Pool
from graphopt.graph_utils import written
from held_cases import (
    HOLDERS,
    OF_PARAMETERS,
    READERS,
    STATE_HOLDERS,
    VIEWS,
    WRITERS,
    Action,
    Holder,
    copies,
    parameters,
    states,
)
from scenario import PIPELINES, step
from twins import Twins, World, assert_same, world
from zoo import MODELS

MODEL = "mlp"
SEVERAL = PIPELINES["small buckets"].replace("0.002", "0.0005")
ALONE = PIPELINES["small buckets"].replace("0.002", "0.0001")
"""Buckets so small that weights go alone: only biases share one with what is launched last."""


def cases() -> dict[str, tuple[Holder, Action, bool]]:
    """Holder, action, and whether the update may be in flight while it is held."""
    found: dict[str, tuple[Holder, Action, bool]] = {}
    for name, action in {**READERS, **OF_PARAMETERS}.items():
        found[f"parameters: {name}"] = (parameters, action, True)
    for name, action in WRITERS.items():
        found[f"parameters, written: {name}"] = (parameters, action, True)
        found[f"states, written: {name}"] = (states, action, True)
    for name, action in READERS.items():
        found[f"states: {name}"] = (states, action, True)
    for name, (holder, tensors) in {**HOLDERS, **STATE_HOLDERS}.items():
        found[f"{name}: read"] = (holder, _after(tensors, copies), True)
        found[f"{name}: written"] = (holder, _after(tensors, WRITERS["clamp_"]), True)
        found[f"{name}: lists"] = (holder, _after(tensors, WRITERS["foreach mul_"]), True)
    for name, (holder, action) in VIEWS.items():
        found[f"view: {name}"] = (holder, action, False)
    return found


def _after(tensors: Callable[[Any], Any], action: Action) -> Action:
    return lambda held: action(tensors(held))


class Ways:
    """Both twins in one training, in which one case follows another."""

    def __init__(self, rank: int, pipeline: str, warm: int = 3) -> None:
        def build() -> World:
            return world(step, MODEL, "adamw-foreach")

        self.twins = Twins(build, ddp=True, seed=20 + rank, pipeline=pipeline)
        self.rank, self.count = rank, 0
        self.step(warm)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.count += 1
            batch = MODELS[MODEL].batch(1000 * self.rank + self.count)
            self.twins.step_unseen(*batch)

    @property
    def in_flight(self) -> bool:
        return self.twins.compiled.graph_module.in_flight

    def run(self, holder: Holder, action: Action, late: bool) -> str:
        """One case: "exact", "kept in its step", or what went wrong."""
        held = [holder(w) for w in (self.twins.eager, self.twins.captured)]
        self.step(2)
        if self.in_flight is not late:
            return "in flight" if self.in_flight else "not in flight"
        eager, captured = (plain(action(kept)) for kept in held)
        assert_same(captured, eager, "what was read")
        self.step()
        self.twins.compare_state()
        return "exact" if late else "kept in its step"


def plain(value: Any) -> Any:
    """A result without history, as lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def run_cases(rank: int, names: list[str], pipeline: str) -> dict[str, str]:
    ways, found = Ways(rank, pipeline), {}
    for name in names:
        try:
            found[name] = ways.run(*cases()[name])
        except AssertionError as error:
            found[name] = f"wrong: {str(error)[:200]}"
            ways = Ways(rank, pipeline)
        gc.collect()
        if found[name] == "kept in its step":  # until the step is reset, as the warning says
            ways.twins.compiled.reset()
    ways.twins.finish()
    return found


def check(two_ranks: Pool, names: list[str], pipeline: str = "default") -> Counter[str]:
    for found in two_ranks.run(run_cases, names, pipeline, timeout=600.0):
        good = ("exact", "kept in its step")
        assert {name: way for name, way in found.items() if way not in good} == {}
    return Counter(found.values())


SLICE = 24
"""One in so many cases belongs to the normal run, and one in six kinds of view."""


def test_a_slice_of_the_ways_of_holding_is_exact(two_ranks: Pool) -> None:
    seen = [name for name, (_, _, late) in cases().items() if late]
    views = [name for name, (_, _, late) in cases().items() if not late]
    counts = check(two_ranks, [*seen[::SLICE], *views[::6]])
    assert set(counts) == {"exact", "kept in its step"}


@pytest.mark.full
def test_orders_of_cases(two_ranks: Pool, seed: int) -> None:
    """What one case leaves behind does not spoil another."""
    names = list(cases())
    random.Random(seed).shuffle(names)
    check(two_ranks, names[:60], SEVERAL)


@pytest.mark.full
def test_every_way_of_holding_is_exact(two_ranks: Pool) -> None:
    counts = check(two_ranks, list(cases()))
    assert counts.total() >= 150
    print(dict(counts))


# ---------------------------------------------------------------- ranks and steps


def one_bucket_held(rank: int, name: str) -> list[str]:
    """On rank 0 an array holds one of the last layer; the other buckets stay in flight."""
    ways = Ways(rank, ALONE, warm=0)
    w = ways.twins.captured
    array = w.model.get_parameter(name).detach().numpy() if rank == 0 else None
    ways.step(4)
    assert ways.in_flight
    if array is not None:
        assert array.tolist() == ways.twins.eager.model.get_parameter(name).tolist()
        assert ways.in_flight
    ways.step(2)
    module = ways.twins.compiled.graph_module
    ways.twins.finish()
    updated = {state for node in module.graph.late for state in written(node)}
    return [str(state.meta["fqn"]) for state in updated if state.meta["kind"] == "parameter"]


@pytest.mark.parametrize("name", ["head.weight", "head.bias"])
def test_the_schedule_is_made_knowing_what_is_held(two_ranks: Pool, name: str) -> None:
    """A small one shares its bucket with what is near it, and not with all that are small."""
    held, free = two_ranks.run(one_bucket_held, name)
    assert name in free and name not in held
    assert "layers.0.weight" in held


def two_steps(rank: int) -> None:
    """The late update of one step, and another step over the same and over other tensors."""
    ways = Ways(rank, "default")
    held = [parameters(w) for w in (ways.twins.eager, ways.twins.captured)]
    other = graphopt.compile(step, pipeline="default")
    model = ways.twins.captured.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    twin = torch.optim.SGD(ways.twins.eager.model.parameters(), lr=0.01, momentum=0.9)
    for k in range(4):
        ways.step(2)
        assert ways.in_flight
        batch = MODELS[MODEL].batch(500 + 10 * rank + k)
        other(model, optimizer, *batch)
        step(ways.twins._eager_models[0], twin, *batch)
        if k % 2:
            assert_same(copies(held[1]), copies(held[0]), "parameters")
    ways.twins.finish()


def test_two_steps_and_a_held_list(two_ranks: Pool) -> None:
    two_ranks.run(two_steps)


def only_rank_0_reads(rank: int) -> None:
    ways = Ways(rank, "default")
    held = [parameters(w) for w in (ways.twins.eager, ways.twins.captured)]
    for _ in range(3):
        ways.step(2)
        if rank == 0:
            assert_same(copies(held[1]), copies(held[0]), "parameters")
    ways.twins.finish()


def test_rank_0_may_read_alone(two_ranks: Pool) -> None:
    two_ranks.run(only_rank_0_reads)


def read_while_steps_run(rank: int) -> int:
    """A thread reads what is held again and again between steps, each of which it may find in
    flight; all it sees are values of eager steps."""
    ways = Ways(rank, "default")
    held = parameters(ways.twins.captured)
    seen: list[list[Tensor]] = []
    over, between = threading.Event(), threading.Lock()

    def read() -> None:
        while not over.is_set():
            assert len(held[0].shape) == 2
            with between:
                found = [held[0].detach().clone()]
            if not seen or not torch.equal(seen[-1][0], found[0]):
                seen.append(found)

    thread = threading.Thread(target=read)
    thread.start()
    expected = copies(parameters(ways.twins.eager)[:1])
    for _ in range(8):
        with between:
            ways.step()
        expected += copies(parameters(ways.twins.eager)[:1])
    over.set()
    thread.join()
    ways.twins.finish()
    assert all(any(torch.equal(found[0], value) for value in expected) for found in seen)
    return len(seen)


def test_a_thread_reads_what_is_held(two_ranks: Pool) -> None:
    assert min(two_ranks.run(read_while_steps_run)) >= 1


def in_turn(rank: int) -> None:
    """What else happens to a step between its calls, with a list held all the time."""
    ways = Ways(rank, "default")
    held = [parameters(w) for w in (ways.twins.eager, ways.twins.captured)]
    with ways.twins.no_sync():
        ways.twins.step_unseen(*MODELS[MODEL].batch(rank), False)
        assert_same(copies(held[1]), copies(held[0]), "under no_sync")
    ways.step(3)
    ways.twins.compiled.reset()
    assert [type(p) for p in held[1]] == [torch.nn.Parameter] * len(held[1])
    assert_same(copies(held[1]), copies(held[0]), "after reset")
    ways.step(3)
    ways.twins.step_unseen(*MODELS[MODEL].batch(rank, 3))  # another shape, in flight
    assert_same(copies(held[1]), copies(held[0]), "after another shape")
    ways.step(2)
    for w in (ways.twins.eager, ways.twins.captured):  # other tensors in their place
        entries = w.optimizer.state[w.model.head.weight]
        entries["exp_avg"] = torch.full(entries["exp_avg"].shape, 0.01)
    ways.step(2)
    ways.twins.compare_state()
    ways.step(2)
    del ways.twins.compiled
    gc.collect()
    assert_same(copies(held[1]), copies(held[0]), "after the step is gone")


def test_no_sync_reset_other_shapes_and_the_end_of_a_step(two_ranks: Pool) -> None:
    two_ranks.run(in_turn)
