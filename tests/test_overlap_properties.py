"""What holds of every order that is found, on graphs drawn at random."""

from __future__ import annotations

import copy
import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from graphopt.cost import Collective, CostModel, Transfer
from graphopt.cost.roofline import is_free
from graphopt.schedule import apply_schedule, overlap_schedule, simulate
from graphopt.schedule.constraints import predecessors
from sketch import Sketch, c10d, targets

aten = torch.ops.aten
LATENCY, RATE = 2.0, 0.01


def costs_of(links: dict[str, str], rate: float = RATE) -> CostModel:
    """Each node that computes takes a second; a message 2, and its bytes."""

    def communication(collective: Collective) -> Transfer:
        return Transfer(LATENCY, collective.nbytes * rate, (links[collective.group],))

    def compute(node: fx.Node) -> float:
        return 0.0 if is_free(node) else 1.0

    return CostModel(compute, communication)


def drawn(words: list[tuple[str, int]], names: str = "ab") -> fx.GraphModule:
    """A graph with a wait right behind each launch: on the path, beside it, and of parameters."""
    s = Sketch()
    x = s.input("x", 8, 8)
    parameters = [s.input(f"p{i}", 4, 8) for i in range(len(words))]
    results = []
    for (word, number), parameter in zip(words, parameters, strict=True):
        group = names[number % 2]
        if word == "compute":
            x = s.call(aten.exp.default, x)
        elif word == "reduce":
            x = s.call(aten.neg.default, s.wait(s.all_reduce(x, group=group)))
        elif word == "gather":
            shard = s.call(aten.neg.default, parameter)
            whole = s.wait(s.call(c10d.all_gather_into_tensor.default, shard, 2, group))
            x = s.call(aten.mm.default, x, whole)
        else:
            gradient = s.call(aten.mm.default, s.call(aten.sin.default, x), x)
            sent = s.call(c10d.reduce_scatter_tensor.default, gradient, "sum", 2, group)
            results.append(s.call(aten.mul.Tensor, parameter, s.wait(sent)))
    return s.step([x, *results])


WORDS = st.lists(
    st.tuples(st.sampled_from(["compute", "reduce", "gather", "scatter"]), st.integers(0, 1)),
    min_size=1,
    max_size=14,
)
LINKS = st.sampled_from([{"a": "one", "b": "one"}, {"a": "one", "b": "two"}])


@settings(max_examples=40, deadline=None)
@given(WORDS, LINKS, st.booleans())
def test_orders_gain_within_bounds_and_memory(
    words: list[tuple[str, int]], links: dict[str, str], buckets: bool
) -> None:
    step, model = drawn(words), costs_of(links)
    before = simulate(step, model)
    schedule = overlap_schedule(step.graph, model, buckets=buckets)
    assert schedule == overlap_schedule(step.graph, model, buckets=buckets)
    if schedule is None:
        return
    schedule.check(predecessors(step.graph))
    apply_schedule(step.graph, schedule)
    step.graph.lint()
    after = simulate(step, model)
    assert after.step_seconds < before.step_seconds
    assert after.peak_bytes <= before.peak_bytes
    assert after.step_seconds >= after.preemptive_bound_seconds * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(WORDS, LINKS)
def test_more_memory_is_never_worse(words: list[tuple[str, int]], links: dict[str, str]) -> None:
    step, model = drawn(words), costs_of(links)
    held = simulate(step, model).peak_bytes
    taken = []
    for times in (1.0, 1.2, 1.6, 4.0, 100.0):
        tried = copy.deepcopy(step)
        schedule = overlap_schedule(tried.graph, model, max_bytes=int(times * held))
        if schedule is not None:
            apply_schedule(tried.graph, schedule)
        found = simulate(tried, model)
        assert found.peak_bytes <= int(times * held)
        taken.append(found.step_seconds)
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(taken))


@settings(max_examples=20, deadline=None)
@given(WORDS)
def test_names_decide_nothing(words: list[tuple[str, int]]) -> None:
    """Neither those of groups nor those of nodes."""
    first, second = drawn(words), drawn(words, "zy")
    for index, node in enumerate(reversed(second.graph.nodes)):
        node.name = f"n{index}"
    schedules = [
        overlap_schedule(first.graph, costs_of({"a": "one", "b": "two"})),
        overlap_schedule(second.graph, costs_of({"z": "one", "y": "two"})),
    ]
    for step, schedule in zip((first, second), schedules, strict=True):
        if schedule is not None:
            apply_schedule(step.graph, schedule)
    assert targets(first) == targets(second)
