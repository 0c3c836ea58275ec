"""The IR contract is checked: every rule of docs/ir.md is broken once, and the check says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt.graph_utils import (
    call_function_with_meta,
    eliminate_dead_code,
    find_nodes,
    get_output,
    get_outputs,
    is_operator,
    is_wait,
    set_outputs,
)
from graphopt.tracing import CapturedStep
from graphopt.verify import check_captured
from zoo import MLP, MODELS, train_step

aten = torch.ops.aten


def captured_step(model: nn.Module | None = None) -> CapturedStep:
    model = model or MLP()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batch = MODELS["mlp"].batch(0)
    train_step(model, optimizer, *batch)
    return graphopt.capture(train_step, model, optimizer, *batch)


def test_a_capture_keeps_the_contract() -> None:
    report = check_captured(captured_step())
    assert report.ok and report.problems == []
    report.raise_for_failure()


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return find_nodes(graph, lambda node: node.op == "placeholder")


def first_computed(graph: fx.Graph) -> fx.Node:
    return find_nodes(graph, lambda node: node.op == "call_function")[0]


def swap_placeholders(graph: fx.Graph) -> None:
    first, second, *_ = placeholders(graph)
    first.target, second.target = second.target, first.target


def forget_output_convention(graph: fx.Graph) -> None:
    get_output(graph).args = (list(get_outputs(graph).results),)


def forget_an_update(graph: fx.Graph) -> None:
    outputs = get_outputs(graph)
    set_outputs(graph, outputs._replace(updates=outputs.updates[1:]))


def update_twice(graph: fx.Graph) -> None:
    outputs = get_outputs(graph)
    with graph.inserting_before(get_output(graph)):
        again = call_function_with_meta(graph, aten.copy_.default, outputs.updates[0].args)
    again.meta["phase"] = "optimizer"
    set_outputs(graph, outputs._replace(updates=[*outputs.updates, again]))


def drop_value(graph: fx.Graph) -> None:
    del first_computed(graph).meta["val"]


def drop_phase(graph: fx.Graph) -> None:
    first_computed(graph).meta["phase"] = "lunch"


def call_a_method(graph: fx.Graph) -> None:
    with graph.inserting_before(get_output(graph)):
        graph.call_method("neg", (placeholders(graph)[0],))


def write_in_place(graph: fx.Graph) -> None:
    relu = next(n for n in graph.nodes if n.target is aten.gelu.default)
    relu.target = aten.gelu_.default


def copy_into_a_value(graph: fx.Graph) -> None:
    outputs = get_outputs(graph)
    value = next(n for n in graph.nodes if n.target is aten.gelu.default)
    with graph.inserting_before(get_output(graph)):
        copy = call_function_with_meta(graph, aten.copy_.default, (value, value), like=value)
    set_outputs(graph, outputs._replace(updates=[*outputs.updates, copy]))


def read_after_update(graph: fx.Graph) -> None:
    update = get_outputs(graph).updates[0]
    with graph.inserting_after(update):
        neg = call_function_with_meta(graph, aten.neg.default, (update.args[0],), like=update)
    with graph.inserting_after(neg):
        call_function_with_meta(graph, aten.neg.default, (neg,), like=update)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (swap_placeholders, "not the inputs"),
        (forget_output_convention, "(user results, state updates, carried values)"),
        (forget_an_update, "orphan copy_"),
        (update_twice, "updated twice"),
        (drop_value, "no meta['val']"),
        (drop_phase, "no phase"),
        (call_a_method, "not part of the dialect"),
        (write_in_place, "writes in place"),
        (copy_into_a_value, "other than a placeholder"),
        (read_after_update, "is read after"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_broken_contract(break_it: Callable[[fx.Graph], None], said: str) -> None:
    captured = captured_step()
    break_it(captured.graph_module.graph)
    report = check_captured(captured)
    assert not report.ok
    assert said in str(report)
    with pytest.raises(graphopt.VerificationError) as error:
        report.raise_for_failure()
    assert isinstance(error.value, RuntimeError)


def test_one_storage_has_one_placeholder() -> None:
    captured = captured_step()
    first, second, *_ = placeholders(captured.graph_module.graph)
    second.meta["val"] = first.meta["val"]
    assert "two names of one storage" in str(check_captured(captured))


@pytest.fixture
def averaged() -> CapturedStep:
    """A step captured for a group of one rank: it has collectives, which nobody runs here."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = MLP()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batch = MODELS["mlp"].batch(0)
        parallel = graphopt.DataParallel()
        return graphopt.capture(train_step, model, optimizer, *batch, parallel=parallel)
    finally:
        torch.distributed.destroy_process_group()


def test_collectives_are_pairs(averaged: CapturedStep) -> None:
    graph = averaged.graph_module.graph
    waits = find_nodes(graph, is_wait)
    assert check_captured(averaged).ok
    assert len(waits) == len(list(MLP().parameters()))

    launched = waits[0].args[0]
    waits[0].replace_all_uses_with(launched)
    assert "before its wait" in str(check_captured(averaged)) or "0 waits" in str(
        check_captured(averaged)
    )


def test_dead_code_elimination_keeps_collectives(averaged: CapturedStep) -> None:
    """Other ranks join a collective, whether or not this one uses its result."""
    graph = averaged.graph_module.graph
    set_outputs(graph, get_outputs(graph)._replace(updates=[], carried=[]))
    for copy in find_nodes(graph, lambda node: is_operator(node.target, "aten::copy_")):
        graph.erase_node(copy)
    eliminate_dead_code(graph)
    assert len(find_nodes(graph, is_wait)) == len(list(MLP().parameters()))
