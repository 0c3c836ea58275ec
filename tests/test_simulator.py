"""Predicted steps by hand-computed cases, properties of every program, and memory as Inductor's."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import graphopt
from due_dates import Job, due_date_bound, jackson
from graphopt.cost import CostModel, Transfer
from graphopt.ir.metadata import set_phase
from graphopt.parallel import OverRanks
from graphopt.schedule import Message, Program, Timeline, collectives_text, simulate_program
from graphopt.schedule.links import fair_rates
from graphopt.schedule.program import step_peak_bytes
from graphopt.testing import fake_ranks
from graphs import training_step
from slices import examples
from timelines import program
from zero_cases import VOCABULARY, Language

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
APART = {"dp": ("a",), "tp": ("b",)}


@pytest.mark.parametrize(
    ("text", "step", "exposed"),
    [
        ("c3 c5", 8, []),
        ("c3 L0=2 c5 W0", 8, [0]),
        ("c3 L0=7 c5 W0 c1", 11, [2]),
        ("c1 L0=4 c1 L1=4 c1 W0 W1", 9, [2, 4]),  # one queue
        ("c1 L0=4 L1=4@tp W0 W1", 9, [8, 0]),  # one link
        ("L0=1+2 L1=1+2@tp W0 W1 c1", 6, [5, 0]),  # latency needs no link
        ("L0=1+2 L1=2@tp W1 W0 c1", 5, [1, 3]),
        ("c1 L0=4 c9 L1=1 c1", 11, [0, 0]),  # nobody waits
        ("W0~ c3 L0=10 c5", 13, [5]),
        ("c3 W0~ c1 c4 L0=3", 8, [0]),
        ("c3 W0~ c5 L0=9", 14, [6]),
        ("W1~ c1 W0~ c1 c1 L0=2 c1 L1=2", 7, [0, 3]),
        ("W0~ c1 W1~ c1 c1 L0=2 c1 L1=2", 6, [1, 1]),  # the first that is due is sent first
    ],
)
def test_by_hand(text: str, step: float, exposed: list[float]) -> None:
    timeline = simulate_program(program(text))
    assert timeline.step_seconds == pytest.approx(step)
    assert [slot.exposed for slot in timeline.collectives] == pytest.approx(exposed)
    assert timeline.exposed_comm_seconds == pytest.approx(sum(exposed))
    assert timeline.end - timeline.begin == pytest.approx(step)


def test_overhead_is_taken_from_compute() -> None:
    found = program("c3 L0=2 c5 W0")
    (launch,) = found.launched
    found.seconds[launch] = 1.0  # before anything is on its way
    timeline = simulate_program(found)
    assert (timeline.step_seconds, timeline.compute_seconds) == pytest.approx((9, 9))
    assert timeline.collectives[0].start == pytest.approx(timeline.begin + 4)
    assert timeline.bound_seconds <= timeline.step_seconds


def test_groups_with_links_of_their_own_do_not_slow_each_other() -> None:
    text = "c1 L0=4 L1=4@tp W0 W1"
    assert simulate_program(program(text, APART)).step_seconds == pytest.approx(5)
    three = {"dp": ("a", "b"), "tp": ("b",), "pp": ("a",)}
    found = simulate_program(program("L0=4 L1=4@tp L2=4@pp W0 W1 W2", three))
    assert found.step_seconds == pytest.approx(8)


def test_shares_are_max_min_fair() -> None:
    assert fair_rates([("a",), ("a",), ()]) == [0.5, 0.5, 1.0]
    assert fair_rates([("a", "b"), ("a",), ("a",), ("b",)]) == pytest.approx([1 / 3] * 3 + [2 / 3])


def test_collectives_slow_compute() -> None:
    timeline = simulate_program(program("c1 L0=2 c4 W0"), slowdown=0.5)
    assert timeline.step_seconds == pytest.approx(1 + 2 + (4 - 2 / 1.5))


@pytest.mark.parametrize(
    ("text", "step"),
    [
        # each iteration leaves 1, or 0.01, more behind than the one before, until a wait meets it
        ("W0~ c1 L0=50 c97 W1~ c1 L1=51 c1", 101),
        ("W0~ c1 L0=50 c97 W1~ c1 L1=50.01 c1", 100.01),
        ("W0~ c1 L0=50@dp c97 W1~ c1 L1=51@tp c1", 101),  # one link
    ],
)
def test_a_state_that_still_changes_is_not_steady(text: str, step: float) -> None:
    timeline = simulate_program(program(text))
    assert timeline.step_seconds == pytest.approx(step)
    assert timeline.end - timeline.begin == pytest.approx(step)


@pytest.mark.parametrize(
    ("text", "bound", "preemptive"),
    [
        ("c3 L0=7 c5 W0 c1", 9, 11),
        ("W0~ c3 L0=10 c5", 10, 13),
        ("c3 W0~ c5 L0=9", 9, 14),
        ("W0~ c1 W1~ c1 c1 L0=2 c1 L1=2", 4, 6),
        ("c1 L0=2 c1 L1=2 c1 W1 W0 c3", 6, 8),
        ("c2 L0=2 L1=2@tp W0 W1 c2", 4, 8),  # the link
        ("L0=4 W0 c3 L1=4 W1 c1", 8, 11),  # the second one needs what the first brings: not counted
        ("L0=4@tp W0 c3 L1=4 W1 c1", 8, 11),
    ],
)
def test_bounds_by_hand(text: str, bound: float, preemptive: float) -> None:
    timeline = simulate_program(program(text))
    assert timeline.bound_seconds == pytest.approx(bound)
    assert due_date_bound(timeline) == pytest.approx(preemptive)


def test_the_bound_lets_parts_run_side_by_side() -> None:
    graph = fx.Graph()
    batch = graph.placeholder("batch")
    parts = [graph.call_function(operator.neg, (batch,)) for _ in range(2)]
    firsts = [graph.call_function(operator.neg, (part,)) for part in parts]  # of the first layer
    gradients = [graph.call_function(operator.add, tuple(some)) for some in (parts, firsts)]
    launches = [graph.call_function(ALL_REDUCE, (some, "sum", "dp")) for some in gradients]
    waits = [graph.call_function(WAIT, (launch,)) for launch in launches]
    order = [parts[0], firsts[0], parts[1], firsts[1], *gradients, *launches, *waits]
    messages = [
        Message(i, launch, Transfer(0.0, 6.0), 8, 0, (wait,), None)
        for i, (launch, wait) in enumerate(zip(launches, waits, strict=True))
    ]
    seconds = dict.fromkeys([*parts, *firsts], 2.0)
    timeline = simulate_program(Program(order, frozenset(), seconds, messages))
    assert timeline.bound_seconds == 12
    assert due_date_bound(timeline) == 4 + 12


def backward_of_layers(scatter: float, weight: float) -> Program:
    """What is gathered, four seconds, is needed by a path of three layers; each gives the gradient
    of a weight, which is scattered, and the last one gives another gradient, scattered in six."""
    graph = fx.Graph()
    launch = graph.call_function(ALL_REDUCE, (graph.placeholder("rows"), "sum", "dp"))
    path = whole = graph.call_function(WAIT, (launch,))
    taken, waits, seconds = {launch: 4.0}, [whole], {}

    def send(gradient: fx.Node, transfer: float) -> None:
        sent = graph.call_function(ALL_REDUCE, (gradient, "sum", "dp"))
        taken[sent] = transfer
        waits.append(graph.call_function(WAIT, (sent,)))

    for _ in range(3):
        path = graph.call_function(operator.neg, (path,))
        gradient = graph.call_function(operator.neg, (path,))
        seconds |= {path: 5.0, gradient: weight}
        send(gradient, scatter)
    send(path, 6.0)
    messages = [
        Message(i, node, Transfer(0.0, each), 8, 0, (wait,), None)
        for i, ((node, each), wait) in enumerate(zip(taken.items(), waits, strict=True))
    ]
    return Program(list(graph.nodes), frozenset(), seconds, messages)


@pytest.mark.parametrize(("scatter", "weight"), [(3.0, 2.0), (2.0, 3.0)])
def test_what_is_computed_behind_a_launch_is_sent_behind_it(scatter: float, weight: float) -> None:
    """Gradients of weights whose compute would hide the last scatter are scattered behind it."""
    timeline = simulate_program(backward_of_layers(scatter, weight))
    assert due_date_bound(timeline) == 4 + 3 * 5 + 3 * 2 + 6


@pytest.mark.parametrize(("recomputed", "least"), [(True, 6 + 1 + 3), (False, 6 + 1)])
def test_nothing_is_recomputed_before_the_loss(recomputed: bool, least: float) -> None:
    """What the backward computes of the inputs alone does not hide a gather of the forward."""
    graph = fx.Graph()
    batch = graph.placeholder("batch")
    launch = graph.call_function(ALL_REDUCE, (batch, "sum", "dp"))
    wait = graph.call_function(WAIT, (launch,))
    loss = graph.call_function(operator.neg, (wait,))
    again = graph.call_function(operator.neg, (batch,))
    graph.call_function(operator.add, (loss, again))
    for node, phase in zip(
        [loss, again, *again.users], ["forward", *["backward"] * 2], strict=True
    ):
        set_phase(node, phase if recomputed else None)
    messages = [Message(0, launch, Transfer(0.0, 6.0), 8, 0, (wait,), None)]
    given = Program(list(graph.nodes), frozenset(), {loss: 1.0, again: 3.0}, messages)
    assert due_date_bound(simulate_program(given)) == least


@st.composite
def sharded_programs(draw: st.DrawFn) -> Program:
    """Collectives that need some of the compute before them, and are needed by some behind them."""
    graph, seconds = fx.Graph(), {}
    batch = graph.placeholder("batch")
    values, messages = [batch], []
    for _ in range(draw(st.integers(2, 8))):
        count = draw(st.integers(1, 2))
        read = tuple(draw(st.sampled_from(values)) for each in range(count))
        if draw(st.booleans()):
            node = graph.call_function(operator.add, read)
            seconds[node] = float(draw(times))
            values.append(node)
            continue
        group = draw(st.sampled_from(("dp", "tp")))
        launch = graph.call_function(ALL_REDUCE, (read[0], "sum", group))
        wait = graph.call_function(WAIT, (launch,))
        links = ("network",) if draw(st.booleans()) else (group,)
        transfer = Transfer(float(draw(st.integers(0, 2))), float(draw(times)), links)
        messages.append(Message(len(messages), launch, transfer, 8, 0, (wait,), None))
        values.append(wait)
    return Program(list(graph.nodes), frozenset(), seconds, messages)


def any_order(program: Program, random: Random) -> Program:
    """The same program in another order."""
    left, order = list(program.order), []
    while left:
        ready = [node for node in left if not set(node.all_input_nodes).intersection(left)]
        order.append(random.choice(ready))
        left.remove(order[-1])
    messages = [program.launched[node] for node in order if node in program.launched]
    return Program(order, frozenset(), program.seconds, messages)


@settings(max_examples=examples(200), deadline=None)
@given(sharded_programs(), st.randoms(use_true_random=False))
def test_no_order_is_faster_than_the_bound(program: Program, random: Random) -> None:
    bound = due_date_bound(simulate_program(program))
    for _ in range(20):
        order = any_order(program, random)
        assert simulate_program(order).step_seconds >= bound * (1 - 1e-9)


@pytest.mark.parametrize(
    ("at_once", "seconds"), [(1, [6, 8, 11]), (2, [11, 4, 10]), (3, [11, 6, 8])]
)
def test_collectives_that_a_backend_runs_at_once_share_the_link(
    at_once: int, seconds: list[float]
) -> None:
    given = program("c1 L0=6 L1=2 L2=3 W0 W1 W2")
    messages = [
        replace(each, transfer=each.transfer._replace(at_once=at_once)) for each in given.messages
    ]
    shared = Program(given.order, given.late, given.seconds, messages)
    slots = simulate_program(shared).collectives
    assert [slot.end - slot.launched for slot in slots] == pytest.approx(seconds)


def test_the_longest_tail_goes_first() -> None:
    assert jackson([Job(0, 4, 1), Job(1, 2, 9)]) == 12
    assert jackson([Job(0, 1, 0), Job(5, 1, 0)]) == 6
    assert jackson([]) == 0


times = st.integers(0, 20)


@st.composite
def programs(draw: st.DrawFn, groups: tuple[str, ...] = ("dp", "tp")) -> list[list[str]]:
    """Words of a program; the times of launches are words of their own."""
    words: list[list[str]] = [[f"c{draw(times)}"]]
    for index in range(draw(st.integers(1, 6))):
        group = draw(st.sampled_from(groups))
        at = draw(st.integers(1, len(words)))
        launch = [f"L{index}=", f"{draw(times)}+{draw(times)}", f"@{group}"]
        words[at:at] = [launch, [f"c{draw(times)}"]]
        at = words.index(launch)
        if draw(st.booleans()):
            words.insert(draw(st.integers(at + 1, len(words))), [f"W{index}"])
        else:
            words.insert(draw(st.integers(0, at)), [f"W{index}~"])
        words.append([f"c{draw(times)}"])
    return words


def written(words: list[list[str]]) -> str:
    return " ".join("".join(word) for word in words)


def check(timeline: Timeline) -> None:
    """What holds for every step."""
    assert timeline.step_seconds >= due_date_bound(timeline) * (1 - 1e-9)
    assert due_date_bound(timeline) >= timeline.bound_seconds
    assert timeline.step_seconds == pytest.approx(
        timeline.compute_seconds + timeline.exposed_comm_seconds
    )
    for group in {slot.message.group for slot in timeline.collectives}:
        slots = [slot for slot in timeline.collectives if slot.message.group == group]
        for before, after in itertools.pairwise(slots):
            assert before.end <= after.start
    for slot in timeline.collectives:
        assert slot.launched <= slot.start
        least = slot.message.transfer.seconds
        assert slot.end - slot.start >= least * (1 - 1e-9) - 1e-9


@given(programs())
@settings(max_examples=150, deadline=None)
def test_no_step_is_below_its_bounds(words: list[list[str]]) -> None:
    for links in (None, APART):
        check(simulate_program(program(written(words), links)))


@given(programs(), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_a_faster_link_is_never_slower(words: list[list[str]], chosen: int) -> None:
    before = simulate_program(program(written(words), APART)).step_seconds
    launches = [word for word in words if len(word) == 3]
    word = launches[chosen % len(launches)]
    latency, transfer = word[1].split("+")
    word[1] = f"{int(latency) // 2}+{int(transfer) // 2}"
    assert simulate_program(program(written(words), APART)).step_seconds <= before + 1e-9


@given(programs(), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_a_later_wait_is_never_slower(words: list[list[str]], chosen: int) -> None:
    before = simulate_program(program(written(words), APART)).step_seconds
    waits = [i for i, word in enumerate(words) if word[0][0] == "W" and word[0][-1] != "~"]
    if waits:
        word = words.pop(waits[chosen % len(waits)])
        words.append(word)
        assert simulate_program(program(written(words), APART)).step_seconds <= before + 1e-9


def test_a_captured_step(tmp_path: Path) -> None:
    step = graphopt.IterGraphModule(training_step(6))
    model = CostModel.preset("cpu", "ethernet")
    plain = graphopt.simulate(step, model)
    check(plain)
    assert len(plain.collectives) == 12 and plain.peak_bytes > 0
    assert [slot.message.lag for slot in plain.collectives] == [0] * 12
    manager = graphopt.PassManager(
        [
            "remove_copy_from_optimizer",
            "comm_fusion_with_concat",
            "schedule_comm_wait",
            "iter_move_grads_and_optimizers",
        ]
    )
    manager.run(step)
    moved = graphopt.simulate(step, model, world_size=2)
    check(moved)
    assert moved.step_seconds < plain.step_seconds
    assert all(slot.message.lag for slot in moved.collectives)
    text = collectives_text(moved)
    assert all(f"%{slot.message.launch.name}  " in text for slot in moved.collectives)
    assert text.count(", one iteration later") == len(moved.collectives)
    moved.save_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {event["name"] for event in events}
    assert {slot.message.launch.name for slot in moved.collectives} <= named
    moved.to_html(tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text()
    assert "http" not in text and "one iteration later" in text


def test_the_work_is_linear_in_the_size() -> None:
    """Events, not seconds: between launches and waits all compute is one."""
    texts = [" ".join(["c1 " * 20 + f"L{i}=9 c1 W{i}" for i in range(n)]) for n in (40, 400)]
    steps = [simulate_program(program(text)).step_seconds for text in texts]
    assert steps == pytest.approx([40 * 29, 400 * 29])


memory = pytest.importorskip("torch._inductor.fx_passes.memory_estimator")


class Checkpointed(Language):
    """Computes all of its forward again in the backward."""

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, words, use_reentrant=False)
        return found


def step(model: Any, optimizer: Any, words: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(words), words)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def captured(kind: OverRanks, model: nn.Module) -> fx.GraphModule:
    """With activations larger than what the optimizer makes: Inductor counts values that nobody
    reads, such as the gradients that a functional optimizer gives back."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    words = torch.zeros(1024, dtype=torch.long) % VOCABULARY
    return graphopt.capture(step, model, optimizer, words, parallel=kind).graph_module


CASES: dict[str, Callable[[], fx.GraphModule]] = {
    "averaged": lambda: captured(graphopt.DataParallel(), Language(layers=2, width=256)),
    "stage 1": lambda: captured(graphopt.ZeRO(stage=1), Language(layers=2, width=256)),
    "stage 3": lambda: captured(graphopt.ZeRO(stage=3), Language(layers=2, width=256)),
    "stage 3, checkpointed": lambda: captured(graphopt.ZeRO(stage=3), Checkpointed(2, width=256)),
}
PIPELINES = {
    "given": "",
    "fused": "comm_fusion_with_concat -> fuse_exchanges -> schedule_comm_wait",
    "overlapped": "schedule_overlap(device='h100', network='infiniband')",
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("case", CASES)
def test_as_inductor_counts(case: str, pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within two percent, in the order of the graph."""
    monkeypatch.setattr(memory, "device_filter", lambda device: True)
    with fake_ranks(2):
        gm = CASES[case]()
        if PIPELINES[pipeline]:
            graphopt.PassManager(PIPELINES[pipeline]).run(gm)
    inputs = ("placeholder", "get_attr")
    profile = memory.build_memory_profile(gm.graph, lambda node: node.op not in inputs)
    assert step_peak_bytes(gm.graph) == pytest.approx(max(profile) - profile[0], rel=0.02)


def test_the_timeline_of_a_step_is_that_of_its_latest_graph() -> None:
    step = graphopt.compile(lambda model, x: model(x))
    with pytest.raises(graphopt.GraphOptError, match="not been called"):
        step.timeline()
    step(torch.nn.Linear(4, 4), torch.ones(2, 4))
    costs = graphopt.cost.CostModel.preset(device="cpu", network="ethernet")
    predicted = graphopt.simulate(step.graph_module, costs)
    assert step.timeline(costs).step_seconds == predicted.step_seconds > 0
