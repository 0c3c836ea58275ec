"""A pass that does nothing, or less than one expects, says why: in its record and in the report."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.comm import get_all_comm_blocks, replace_collective
from graphopt.graph_utils import call_function_with_meta
from graphopt.manager import PassRecord, PassRegistry, Report
from graphopt.passes import (
    comm_fusion_with_concat,
    iter_move_grads_and_optimizers,
    log_gradient_norms,
    schedule_comm_wait,
)
from graphopt.testing import fake_ranks


def model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def keeps_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def returns_a_norm(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    model(x).square().mean().backward()
    norm = model[0].weight.grad.norm()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def returns_a_parameter(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    train_step(model, optimizer, x)
    return model[0].weight


def watch(norm: Tensor) -> None:
    """What a callback calls."""


def calls_back(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    graphopt.callback(watch, model[1].weight.grad.norm())
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


def graph(step: Callable[..., Any] = train_step, layers: int = 2) -> graphopt.IterGraphModule:
    made = model(layers)
    args = made, torch.optim.SGD(made.parameters(), lr=0.1), torch.randn(3, 8)
    return graphopt.IterGraphModule(graphopt.capture(step, *args).graph_module)


def noted(gm: graphopt.IterGraphModule, pass_: Any, **options: Any) -> str:
    manager = graphopt.PassManager([(pass_, options)])
    (record,) = manager.run(gm)
    assert " ".join(record.note.split()) in " ".join(str(Report([record])).split())
    assert f"note: {record.note}" in str(record) or not record.note
    return record.note


def alone(step: Callable[..., Any]) -> graphopt.IterGraphModule:
    gm = graph(step)
    graphopt.PassManager("remove_copy_from_optimizer").run(gm)
    return gm


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (keeps_gradients, r"4 of 4 buckets \(.*\) .* stays in .grad: call optimizer.zero_grad\(\)"),
        (
            returns_a_norm,
            r"of 4 buckets .*: the step returns %.*test_notes_of_passes.py:\d+.*0.weight",
        ),
        (calls_back, r"2 of 4 buckets .* ms .*: callback watch .*is given it .*1\.weight"),
        (returns_a_parameter, r"updates %_0_weight, which the step returns"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_why_no_update_is_late(step: Callable[..., Any], reason: str) -> None:
    note = noted(alone(step), iter_move_grads_and_optimizers)
    assert re.search(reason, note), note


def test_what_a_callback_of_a_pass_costs() -> None:
    gm = graph()
    graphopt.PassManager("log_gradient_norms").run(gm)
    graphopt.PassManager("remove_copy_from_optimizer").run(gm)
    note = noted(gm, iter_move_grads_and_optimizers)
    assert "4 of 4 buckets (576 B) are waited for in their own iteration" in note
    assert "ms of communication per step, by the cost tables: callback log_line" in note


def test_nothing_is_noted_where_all_is_late() -> None:
    assert noted(alone(train_step), iter_move_grads_and_optimizers) == ""


def strided(gm: graphopt.IterGraphModule) -> None:
    for block in get_all_comm_blocks(gm, "all_reduce"):
        (wait,) = block.wait_nodes
        size = wait.meta["val"].shape
        arguments = (wait, list(size), list(wait.meta["val"].stride()), 0)
        with gm.graph.inserting_after(wait):
            read = call_function_with_meta(
                gm.graph, torch.ops.aten.as_strided.default, arguments, like=wait
            )
        wait.replace_all_uses_with(read, delete_user_cb=lambda user, read=read: user is not read)


def several_dtypes(gm: graphopt.IterGraphModule) -> None:
    _, weight = get_all_comm_blocks(gm, "all_reduce")
    cast, c10d = torch.ops.aten._to_copy.default, torch.ops._c10d_functional
    with gm.graph.inserting_before(weight.wait_nodes[0]):

        def new(target: Any, *args: Any, **kwargs: Any) -> Any:
            return call_function_with_meta(gm.graph, target, args, kwargs, like=weight.comm_node)

        half = new(cast, weight.inputs[0], dtype=torch.bfloat16)
        launch = new(c10d.all_reduce.default, half, *weight.comm_node.args[1:])
        wait = new(c10d.wait_tensor.default, launch)
        replace_collective(gm, weight, new(cast, wait, dtype=torch.float32))


@pytest.mark.parametrize(
    ("edit", "layers", "options", "reason"),
    [
        (strided, 2, {}, "4 of 4 all-reduces cannot be fused: .* as_strided"),
        (several_dtypes, 1, {}, "each of 2 all-reduces has another .* dtype"),
        (None, 2, {"bucket_size_mb": 1e-6}, "each of 4 all-reduces fills a bucket by itself: 32 B"),
    ],
)
def test_why_nothing_is_fused(edit: Any, layers: int, options: dict[str, Any], reason: str) -> None:
    gm = graph(layers=layers)
    if edit is not None:
        edit(gm)
    note = noted(gm, comm_fusion_with_concat, **options)
    assert re.search(reason, note), note


def test_one_collective_or_none() -> None:
    gm = graph()
    comm_fusion_with_concat(gm)
    again = graphopt.graph_optimization_pass(registry=PassRegistry(), name="again")(
        comm_fusion_with_concat.function
    )
    assert "one all-reduce" in noted(gm, again)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    plain = graphopt.IterGraphModule(
        graphopt.capture(forward, model(), torch.ones(2, 8)).graph_module
    )
    assert "no all-reduce" in noted(plain, comm_fusion_with_concat)
    assert "no collective" in noted(plain, schedule_comm_wait)
    assert "no all-reduce" in noted(alone(forward_only), iter_move_grads_and_optimizers)


def forward_only(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return model(x)


def test_waits_that_are_late_enough() -> None:
    gm = graph()
    assert noted(gm, schedule_comm_wait) == ""
    again = graphopt.graph_optimization_pass(registry=PassRegistry(), name="again")(
        schedule_comm_wait.function
    )
    assert "just before the first node that reads" in noted(gm, again)


def test_the_peak_of_memory_is_on_record() -> None:
    gm = graph(layers=6)
    records = graphopt.PassManager(graphopt_default()).run(gm)
    for record, following in itertools.pairwise(records):
        assert record.peak_bytes_after == following.peak_bytes_before > 0
    table = str(Report(records)).splitlines()
    assert table[0].split() == ["pass", "changes", "ms", "nodes", "launches", "peak", "MiB"]
    assert max(map(len, table)) <= 80


def graphopt_default() -> Any:
    from graphopt.stages import default_pipeline

    return default_pipeline()


def test_a_note_outside_of_a_pass_is_nobodys() -> None:
    graphopt.note("nobody listens")

    @graphopt.graph_optimization_pass(registry=PassRegistry())
    def say_twice(gm: Any) -> int:
        graphopt.note("a reason")
        graphopt.note("a reason")
        graphopt.note("another")
        return 0

    record = say_twice(graph())
    assert isinstance(record, PassRecord) and record.note == "a reason\nanother"
    assert log_gradient_norms.name == "log_gradient_norms"
