"""Costs by hand-computed cases, and calibration on real ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import graphopt
from gloo import Pool
from graphopt import _compat
from graphopt.cost import (
    DEVICES,
    NETWORKS,
    Collective,
    CollectiveTable,
    CostModel,
    CostTableError,
    Device,
    Network,
    OperatorTable,
    RooflineCost,
    calibrate,
    collective_of,
    costs_in,
    default_cost_model,
    operator_key,
)
from graphopt.cost.calibration import example_inputs
from graphopt.cost.collectives import fitted
from graphopt.cost.hosts import spans_hosts
from graphopt.cost.operators import Measurement, machine_name
from graphopt.cost.roofline import is_free, updates_in_place
from graphopt.errors import SpmdMismatchError
from graphopt.graph_utils import find_nodes, is_collective
from graphopt.optim import get_all_fused_optimizer_blocks, split_fused_optimizer
from graphs import inputs_of, training_step

aten = torch.ops.aten


TOY = Device("toy", {torch.float32: 1000.0, torch.bfloat16: 4000.0}, 100.0, launch_seconds=0.5)


def call(target: object, *args: object, **kwargs: object) -> fx.Node:
    """One call of an operator, on fake tensors of the given shapes and dtypes."""
    graph, mode = fx.Graph(), _compat.new_fake_mode()

    def placed(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = _compat.to_fake(mode, value)
        return node

    node = graph.call_function(target, tuple(map(placed, args)), kwargs)  # type: ignore[arg-type]
    with mode:
        values = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])  # type: ignore[operator]
    return node


def test_a_product_takes_the_time_of_its_arithmetic() -> None:
    node = call(aten.mm.default, torch.zeros(10, 50), torch.zeros(50, 10))
    assert RooflineCost(TOY)(node) == pytest.approx(
        0.5 + max(2 * 10 * 50 * 10 / 1000, 4 * 1100 / 100)
    )
    wide = Device("wide", TOY.flops, 1e9)
    assert RooflineCost(wide)(node) == pytest.approx(10.0)
    half = call(
        aten.mm.default, *(torch.zeros(s, dtype=torch.bfloat16) for s in ((10, 50), (50, 10)))
    )
    assert RooflineCost(wide)(half) == pytest.approx(2.5)


def test_a_sum_takes_the_time_of_what_it_moves() -> None:
    node = call(aten.add.Tensor, torch.zeros(25), torch.zeros(25))
    assert RooflineCost(TOY)(node) == pytest.approx(0.5 + 3 * 100 / 100)
    one = call(aten.add.Tensor, torch.zeros(1).expand(25), torch.zeros(25))
    assert RooflineCost(TOY)(one) == pytest.approx(0.5 + (4 + 2 * 100) / 100)


@pytest.mark.parametrize(
    "node",
    [
        call(aten.view.default, torch.zeros(4, 4), [16]),
        call(aten.permute.default, torch.zeros(4, 4), [1, 0]),
        call(aten.split_with_sizes.default, torch.zeros(4), [1, 3]),
        call(aten.detach.default, torch.zeros(4)),
    ],
    ids=lambda node: str(node.target),
)
def test_views_are_free(node: fx.Node) -> None:
    assert RooflineCost(TOY)(node) == 0


def test_updates_are_not_free() -> None:
    assert RooflineCost(TOY)(call(aten.copy_.default, torch.zeros(4), torch.ones(4))) > 0.5


def test_rings_and_trees() -> None:
    link = Network("toy", alpha=1.0, bytes_per_second=10.0, start=0.25)
    assert link(Collective("all_reduce", 80, 2, "g")) == (2.25, 8.0, ("network",), 0.0, 1)
    assert link(Collective("all_reduce", 80, 8, "g"))[:2] == (6.25, 14.0)  # a tree of depth 3
    assert link(Collective("all_gather_into_tensor", 80, 4, "g"))[:2] == (3.25, 6.0)
    assert link(Collective("reduce_scatter_tensor", 80, 4, "g"))[:2] == (3.25, 6.0)
    assert link(Collective("broadcast", 80, 4, "g"))[:2] == (2.25, 8.0)
    assert link(Collective("all_reduce", 80, 1, "g"))[:2] == (0.25, 0.0)


def test_tables_are_linear_between_their_points() -> None:
    table = CollectiveTable({("all_reduce", 2): ((10, 1.0), (20, 2.0), (40, 6.0))})
    seconds = [table(Collective("all_reduce", n, 2, "g")).seconds for n in (1, 10, 15, 30, 50)]
    assert seconds == pytest.approx([1.0, 1.0, 1.5, 4.0, 8.0])
    assert table(Collective("all_reduce", 30, 2, "g")).latency == 1.0
    other = Collective("broadcast", 30, 2, "g")
    assert table(other) == table.fallback(other)


@given(st.floats(0, 1e-2), st.floats(1e-12, 1e-6))
def test_a_fit_finds_what_made_the_samples(alpha: float, beta: float) -> None:
    samples = [(n, alpha + n * beta) for n in (2**12, 2**16, 2**20, 2**24)]
    found = fitted(samples)
    assert found[0] == pytest.approx(alpha, abs=1e-6 * max(alpha, 2**12 * beta) + 1e-15)
    assert found[1] == pytest.approx(beta, rel=1e-5)


def test_kinds_of_calls_are_told_apart() -> None:
    a, b = torch.zeros(4, 4), torch.zeros(4, 8).t()[:4]
    keys = [
        operator_key(node)
        for node in (
            call(aten.mm.default, a, a),
            call(aten.mm.default, a, torch.zeros(4, 4).t()),
            call(aten.sum.dim_IntList, a, [0]),
            call(aten.sum.dim_IntList, a, [1]),
            call(aten.mm.default, a.double(), a.double()),
            call(aten.add.Tensor, b[:, :4], a),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert operator_key(call(aten.mm.default, a, a)) == keys[0]
    many = [torch.zeros(n) for n in range(100)]
    graph = fx.Graph()
    nodes = [graph.placeholder("x") for _ in many]
    for node, value in zip(nodes, many, strict=True):
        node.meta["val"] = value
    long = graph.call_function(aten.cat.default, (nodes,))
    shorter = graph.call_function(aten.cat.default, (nodes[:-1],))
    assert len(operator_key(long)) < 200 and operator_key(long) != operator_key(shorter)


def test_the_default_costs_are_the_same_everywhere() -> None:
    step = training_step(2)
    first, second = (default_cost_model(step.graph) for _ in range(2))
    assert first == second
    launch = next(n for n in step.graph.nodes if is_collective(n))
    assert collective_of(launch, ranks=4).ranks == 4
    assert first.transfer(launch, 4).seconds > first.transfer(launch, 2).seconds


@pytest.mark.parametrize(
    ("local", "world", "ranks", "network"),
    [
        ("2", 2, 2, "loopback"),
        ("1", 2, 2, "ethernet"),
        ("8", 12, 12, "ethernet"),
        ("4", 12, 12, "ethernet"),  # the smaller machine of these: both decide alike
        ("4", 12, 4, "loopback"),
        ("8", 12, 4, "loopback"),
        (None, 2, 2, "loopback"),
        (None, 16, 16, "ethernet"),
        ("many", 2, 2, "loopback"),
    ],
)
def test_whether_ranks_share_a_machine_is_asked_of_the_launcher(
    local: str | None, world: int, ranks: int, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    with graphopt.testing.fake_ranks(world):
        assert spans_hosts(ranks) == (network == "ethernet")
        if ranks == world:
            costs = default_cost_model(training_step(ranks=ranks).graph)
            assert costs.communication == NETWORKS[network]


@pytest.mark.parametrize(
    "model",
    [
        CostModel.preset("h100", "nvlink"),
        CostModel(
            OperatorTable(
                {"aten.mm.default()": 0.5}, "here", DEVICES["a100"], {"aten.mm.default": 2.0}
            ),
            CollectiveTable({("all_reduce", 2): ((1, 0.5), (2, 0.75))}, overhead=0.25),
            slowdown=0.1,
        ),
    ],
    ids=["preset", "measured"],
)
def test_costs_are_saved(model: CostModel, tmp_path: Path) -> None:
    model.save(tmp_path / "new" / "costs.json")
    assert CostModel.load(tmp_path / "new" / "costs.json") == model


def test_wrong_costs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for text in ("", "{}", "[]", '{"format": "graphopt costs", "version": 99}'):
        path.write_text(text)
        with pytest.raises(CostTableError, match="costs"):
            CostModel.load(path)
    own = CostModel(lambda node: -1.0, NETWORKS["ethernet"])
    with pytest.raises(CostTableError, match="cannot be saved"):
        own.save(path)
    with pytest.raises(CostTableError, match="not less than 0"):
        own.compute_seconds(call(aten.neg.default, torch.zeros(1)))
    with pytest.raises(CostTableError, match="nvlink"):
        CostModel.preset("cpu", "nvlnk")
    with pytest.raises(CostTableError, match="slowdown"):
        CostModel(own.compute, own.communication, slowdown=-1)
    with pytest.raises(CostTableError, match="in order"):
        CollectiveTable({("all_reduce", 2): ((2, 1.0), (1, 1.0))})
    with pytest.raises(CostTableError, match="bytes_per_second"):
        Network("none", 0, 0)


def test_a_plan_by_costs_of_another_machine_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step, path = training_step(2, ranks=2), tmp_path / "costs.json"
    CostModel(OperatorTable({}, "a machine elsewhere"), CollectiveTable({})).save(path)
    with caplog.at_level(logging.WARNING, "graphopt"):
        assert costs_in(path, step.graph) == CostModel.load(path)
    assert "of another machine (a machine elsewhere)" in caplog.text
    caplog.clear()
    here = machine_name(torch.device("cpu"))
    CostModel(OperatorTable({}, here), CollectiveTable({})).save(path)
    CostModel.preset().save(tmp_path / "preset.json")  # which is of no machine
    with caplog.at_level(logging.WARNING, "graphopt"):
        costs_in(path, step.graph)
        costs_in(tmp_path / "preset.json", step.graph)
    assert not caplog.text


def test_operators_are_measured_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = training_step(2, ranks=None)
    path = tmp_path / "costs.json"
    inputs = inputs_of(step)
    before = [value.clone() for value in inputs]
    state = torch.get_rng_state()
    model = calibrate(step, inputs, table=path)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, inputs, before))
    assert isinstance(model.compute, OperatorTable) and not model.compute.lacks(step.graph)
    assert all(seconds > 0 for seconds in model.compute.seconds.values())
    again = calibrate(step, inputs, table=path)
    assert again == model  # times of a second measurement would differ
    elsewhere = CostModel(OperatorTable({}, "another machine"), CollectiveTable({}))
    elsewhere.save(path)
    with caplog.at_level(logging.WARNING, "graphopt"):
        calibrate(step, inputs, table=path)
    assert "measured anew" in caplog.text and "another machine" in caplog.text
    found = CostModel.load(path).compute
    assert isinstance(found, OperatorTable) and found.machine == model.compute.machine


def test_inputs_are_made_or_refused(tmp_path: Path) -> None:
    step = training_step(2, ranks=None)
    model = calibrate(step, table=tmp_path / "costs.json")
    assert isinstance(model.compute, OperatorTable) and not model.compute.lacks(step.graph)
    captured = graphopt.capture(lambda m, x: m(x).tanh(), torch.nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(CostTableError, match="takes 3 inputs, 3 of them tensors"):
        calibrate(captured.graph_module, captured.inputs)


def test_functions_of_the_program_are_not_called(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        graphopt.callback(seen.append, y)
        return y + 1

    captured = graphopt.capture(step, torch.nn.Tanh(), torch.ones(2, 4))
    calibrate(captured.graph_module, table=tmp_path / "costs.json")
    assert not seen


OPTIMIZERS = {
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "adamw, foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "adam, loop": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=False, fused=False),
    "sgd, fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "sgd, loop": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    "adagrad, fused": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
}


def captured_update(optimizer: str) -> graphopt.CapturedStep:
    """A step with a count of its calls, and the last batch kept in a buffer."""

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model.last.copy_(x)
        model.count.add_(1)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    model.register_buffer("last", torch.zeros(2, 4))
    model.register_buffer("count", torch.zeros(()))
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    step(model, made, torch.ones(2, 4))  # makes the optimizer's state
    return graphopt.capture(step, model, made, torch.ones(2, 4))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_copies_that_updates_in_place_leave_out_are_free(optimizer: str) -> None:
    graph = captured_update(optimizer).graph_module.graph
    copies = [n for n in graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert len(copies) > 2
    assert [str(n.args[0]) for n in copies if not is_free(n)] == ["last"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_measured_runs_change_no_input_and_measure_every_call(optimizer: str) -> None:
    gm = captured_update(optimizer).graph_module
    inputs = example_inputs(gm)
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    measurement = Measurement(gm, inputs)
    assert measurement.run() > 0
    assert all(
        torch.equal(value, kept) if isinstance(value, torch.Tensor) else value == kept
        for value, kept in zip(inputs, before, strict=True)
    )
    found = OperatorTable(measurement.medians(), "here")
    assert not found.lacks(gm.graph)


@pytest.mark.parametrize("optimizer", ["adamw, fused", "adamw, foreach", "sgd, fused"])
def test_a_divided_optimizer_costs_what_the_whole_one_was_measured_at(optimizer: str) -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 100))
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    step(model, made, torch.ones(2, 300))
    module = graphopt.IterGraphModule(
        graphopt.capture(step, model, made, torch.ones(2, 300)).graph_module
    )
    measurement = Measurement(module, example_inputs(module))
    measurement.run()
    table = OperatorTable(
        measurement.medians(), "here", DEVICES["cpu"], measurement.scales(DEVICES["cpu"])
    )
    (block,) = get_all_fused_optimizer_blocks(module)
    whole = sum(map(table, block.optim.nodes))
    parts = split_fused_optimizer(module, block, block.optim.grads[:2])
    assert table.lacks(module.graph)
    assert sum(map(table, [n for p in parts for n in p.optim.nodes])) == pytest.approx(
        whole, rel=0.1
    )


def calibrated(rank: int, folder: str) -> list[str]:
    step = training_step(2, ranks=None)
    table = Path(folder) / f"costs{rank}.json"
    first = calibrate(step, inputs_of(step), table=table)
    assert table.exists() == (rank == 0)
    assert isinstance(first.compute, OperatorTable)
    assert isinstance(first.communication, CollectiveTable)
    measured = first.communication.points["all_reduce", 2]
    assert [seconds for _, seconds in measured] == sorted(seconds for _, seconds in measured)
    assert first.communication(Collective("broadcast", 2**20, 2, "g")).seconds > 0
    assert 0 <= first.slowdown < 10
    again = calibrate(step, inputs_of(step), table=table)
    assert again == first
    return [first.to_text()]


def test_all_ranks_have_what_rank_0_found(two_ranks: Pool, tmp_path: Path) -> None:
    one, other = two_ranks.run(calibrated, str(tmp_path))
    assert one == other


def sent_once(rank: int) -> int:
    """How often a measured graph launches its collectives, in three runs."""
    step = training_step(2, ranks=2)
    launched = 0
    with torch.profiler.profile() as profile:
        measurement = Measurement(step, inputs_of(step))
        for _ in range(2):
            measurement.run()
    for event in profile.events():
        launched += event.name == "_c10d_functional::all_reduce"
    collectives = len(find_nodes(step.graph, is_collective))
    assert collectives > 0
    return launched - collectives


def test_collectives_of_a_measured_graph_run_once(two_ranks: Pool) -> None:
    assert two_ranks.run(sent_once) == [0, 0]


def alone(rank: int) -> str:
    if rank:
        return ""
    step = training_step(2, ranks=None)
    with pytest.raises(SpmdMismatchError) as caught:
        calibrate(step, inputs_of(step), table="/nonexistent/costs.json", timeout=1.0)
    return str(caught.value)


def test_a_rank_alone_is_told_so(two_ranks: Pool) -> None:
    assert "1" in two_ranks.run(alone)[0]


def test_updates_are_measured_in_place() -> None:
    """As the executable form runs them; what only looks like one is measured as it stands."""
    weight, gradient = torch.ones(8), torch.ones(8)

    def step(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        w.mul_(0.9).add_(g, alpha=-0.1)
        return g * 2

    graph = graphopt.capture(step, weight, gradient).graph_module.graph
    (copy,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    found = [str(node.target) for node in updates_in_place(copy)]
    assert found == ["aten.add.Tensor", "aten.mul.Tensor"]
    other = graph.find_nodes(op="placeholder")[1]
    copy.args = (other, copy.args[1])
    assert updates_in_place(copy) == []
