"""Orders in which communication is hidden: by cases, and on graphs drawn at random."""

from __future__ import annotations

import copy
import itertools
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import graphopt
from due_dates import due_date_bound
from graphopt.cost import NETWORKS, Collective, CostModel, Transfer
from graphopt.cost.roofline import DEVICES, RooflineCost, is_free
from graphopt.graph_utils import is_collective, is_random
from graphopt.manager import PassArgumentError
from graphopt.schedule import Schedule, ScheduleError, apply_schedule, overlap_schedule, simulate
from graphopt.schedule.constraints import predecessors
from graphopt.schedule.emitting import Emitter
from graphopt.schedule.gathers import is_gather
from graphs import training_step
from llama_steps import Llama, llama_step
from sharded import Sizes, sharded_step
from sketch import Sketch, c10d, targets

LARGE = {"width": 4096, "hidden": 14336, "heads": 32, "tokens": 8192}


def two_networks(collective: Collective) -> Transfer:
    """Groups "tp" in a machine, all others between machines."""
    name = "nvlink" if collective.group == "tp" else "infiniband"
    return NETWORKS[name](collective)._replace(links=(name,))


MODEL = CostModel(RooflineCost(DEVICES["h100"]), two_networks)


@cache
def step_of(sizes: Sizes) -> fx.GraphModule:
    return sharded_step(sizes)


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        (Sizes(layers=3, fsdp=64, **LARGE), 1.06),
        (Sizes(layers=3, fsdp=8, tp=8, **LARGE), 1.05),
        (Sizes(layers=3, fsdp=1, tp=8, **LARGE), 1.05),
    ],
    ids=["sharded", "both", "tensor parallel"],
)
def test_sharded_steps_come_close_to_their_bound(sizes: Sizes, limit: float) -> None:
    step = copy.deepcopy(step_of(sizes))
    before = simulate(step, MODEL)
    schedule = overlap_schedule(step.graph, MODEL)
    assert schedule is not None
    assert schedule == overlap_schedule(step.graph, MODEL)
    assert apply_schedule(step.graph, schedule) > 0
    step.graph.lint()
    after = simulate(step, MODEL)
    assert after.step_seconds < before.step_seconds
    assert after.step_seconds <= limit * due_date_bound(after)
    assert after.peak_bytes <= before.peak_bytes
    graphopt.verify.check_dependencies(step_of(sizes), step).raise_for_failure()


@pytest.mark.parametrize(
    ("sizes", "gain"),
    [
        (Sizes(layers=3, fsdp=512, **{**LARGE, "tokens": 2048}), 0.85),
        (Sizes(layers=3, fsdp=64, width=1024, hidden=4096, heads=16, tokens=1024), 0.75),
        (Sizes(layers=3, fsdp=64, tp=8, **{**LARGE, "tokens": 2048}), 0.9),
    ],
    ids=["many ranks", "small", "both"],
)
def test_fewer_gathers_and_scatters_where_starting_them_takes_long(
    sizes: Sizes, gain: float
) -> None:
    """In no more memory, and faster than an order of what there was."""
    given = step_of(sizes)
    orders, steps = [], []
    for buckets in (False, True):
        step = copy.deepcopy(given)
        schedule = overlap_schedule(step.graph, MODEL, buckets=buckets)
        assert schedule is not None and bool(schedule.buckets) == buckets
        apply_schedule(step.graph, schedule)
        step.graph.lint()
        orders.append(simulate(step, MODEL))
        steps.append(step)
    alone, joined = orders
    assert joined.step_seconds < gain * alone.step_seconds
    assert joined.peak_bytes <= simulate(given, MODEL).peak_bytes
    assert len(joined.program.messages) < len(alone.program.messages)
    graphopt.verify.check_dependencies(given, steps[1]).raise_for_failure()
    report = graphopt.verify.check_equivalence(given, steps[1])
    assert report.ok, str(report)


SMALL = {"width": 64, "heads": 8, "kv_heads": 4, "hidden": 128, "vocabulary": 96, "tokens": 64}


@pytest.mark.parametrize(
    "model",
    [
        Llama(2, fsdp=2, tp=2, updates=False, **SMALL),
        Llama(2, fsdp=2, whole_layers=True, ahead=1, **SMALL),
        Llama(2, tp=2, recompute=True, updates=False, **SMALL),
    ],
    ids=["both", "a layer ahead", "recomputed"],
)
def test_orders_of_whole_models_are_proven(model: Llama) -> None:
    """With an embedding, a loss over sharded tokens, and gathers in the backward."""
    given = llama_step(model)
    costs = CostModel(RooflineCost(DEVICES["h100"]), MODEL.communication)
    step = copy.deepcopy(given)
    schedule = overlap_schedule(step.graph, costs)
    assert schedule is not None
    apply_schedule(step.graph, schedule)
    step.graph.lint()
    before, after = simulate(given, costs), simulate(step, costs)
    assert after.step_seconds < before.step_seconds
    assert after.peak_bytes <= before.peak_bytes
    graphopt.verify.check_dependencies(given, step).raise_for_failure()
    report = graphopt.verify.check_equivalence(given, step)
    assert report.ok, str(report)


def test_gradients_of_weights_fill_the_time_of_collectives() -> None:
    """Of the backward; the forward of tensor parallelism has nothing else to compute."""
    step = llama_step(Llama(3, tp=8, tokens=8192, updates=False))
    before = simulate(step, MODEL)
    schedule = overlap_schedule(step.graph, MODEL)
    assert schedule is not None and not schedule.buckets
    apply_schedule(step.graph, schedule)
    after = simulate(step, MODEL)
    assert after.exposed_comm_seconds < 0.65 * before.exposed_comm_seconds
    assert after.peak_bytes <= before.peak_bytes


def test_the_pass_is_checked_and_bitwise() -> None:
    """On a step with dropout and several updates, whose averages are those of one rank."""
    step = graphopt.IterGraphModule(training_step(4, dropout=True))
    order = [node.name for node in step.graph.nodes if is_random(node)]
    record = graphopt.PassManager('schedule_overlap(network="ethernet")').run(step)[0]
    assert record.changes
    assert [node.name for node in step.graph.nodes if is_random(node)] == order
    assert sum(map(is_collective, step.graph.nodes)) == 8


def test_memory_is_a_limit() -> None:
    step = copy.deepcopy(step_of(Sizes(layers=3, fsdp=64, **LARGE)))
    given = simulate(step, MODEL)
    with pytest.raises(ScheduleError, match=r"at most .* GiB: the graph as it is holds .* GiB"):
        overlap_schedule(step.graph, MODEL, max_bytes=given.peak_bytes // 2)


def test_what_stands_early_costs_no_budget() -> None:
    """All gathers are launched at the begin: orders within what the step held before are found."""
    step = copy.deepcopy(step_of(Sizes(layers=3, fsdp=64, **LARGE)))
    most = simulate(step, MODEL).peak_bytes
    emitter = Emitter(step.graph.nodes, predecessors(step.graph))
    for node in filter(is_gather, step.graph.nodes):
        emitter.emit(node)
    apply_schedule(step.graph, emitter.finished())
    assert simulate(step, MODEL).peak_bytes > most
    schedule = overlap_schedule(step.graph, MODEL, max_bytes=most)
    assert schedule is not None
    apply_schedule(step.graph, schedule)
    assert simulate(step, MODEL).peak_bytes <= most


def test_wrong_schedules_are_refused() -> None:
    step = training_step(2)
    before = predecessors(step.graph)
    nodes = tuple(step.graph.nodes)
    Schedule(nodes).check(before)
    with pytest.raises(ScheduleError, match="once"):
        Schedule(nodes[:-1]).check(before)
    with pytest.raises(ScheduleError, match="needs"):
        Schedule(nodes[::-1]).check(before)
    for options in ({"device": "h1000"}, {"network": "none"}):
        with pytest.raises(PassArgumentError, match="choose one of"):
            graphopt.PassManager([("schedule_overlap", options)]).run(training_step(2))


def test_updates_stay_behind_those_who_read_the_old_value() -> None:
    graph = fx.Graph()
    state = graph.placeholder("state")
    state.meta["val"] = torch.empty(4, device="meta")
    read = graph.call_function(torch.ops.aten.neg.default, (state,))
    written = graph.call_function(torch.ops.aten.copy_.default, (state, read))
    other = graph.call_function(torch.ops.aten.neg.default, (state,))
    graph.output((read, written, other))
    before = predecessors(graph)
    assert read in before[written] and written in before[other]


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
    assert after.step_seconds >= due_date_bound(after) * (1 - 1e-9)


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
