"""Callbacks as nodes: what may be done to them, by whom, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import graphopt
import test_callback as cases
from graphopt.graph_utils import eliminate_dead_code, get_outputs
from graphopt.host import HostCall, insert_callback, is_host_call
from graphopt.iter_graph import copy_graph
from graphopt.lowering.cudagraphs.recorder import Recordable
from graphopt.lowering.lowerable import reason_to_keep
from graphopt.manager import PassRegistry
from graphopt.saved import SavedGraphError, save_graph
from graphopt.verify import check_dependencies, dependency_graph


def two_calls(seen: list[Any]) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        graphopt.callback(lambda *values: seen.append(values), logits, x)
        loss = nn.functional.cross_entropy(logits, y)
        graphopt.callback(seen.append, loss)
        return cases.finish(optimizer, loss)

    return step


def captured(make: Callable[[list[Any]], Any] = two_calls) -> fx.GraphModule:
    model = cases.Net([])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return graphopt.capture(make([]), model, optimizer, *cases.batch(0)).graph_module


def calls_in(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_host_call(node)]


def test_capture_calls_nothing() -> None:
    seen: list[Any] = []
    model = cases.Net([])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gm = graphopt.capture(two_calls(seen), model, optimizer, *cases.batch(0)).graph_module
    assert seen == [] and len(calls_in(gm.graph)) == 2
    for node in calls_in(gm.graph):
        assert node.meta["val"] is None and node.meta["phase"] == "forward"
        assert "graphopt.callback(" in node.meta["source"].code


def test_dead_code_elimination_keeps_them() -> None:
    gm = captured()
    eliminate_dead_code(gm.graph)
    gm.graph.eliminate_dead_code()
    assert len(calls_in(gm.graph)) == len(calls_in(copy.deepcopy(gm).graph)) == 2


def erase(graph: fx.Graph) -> None:
    graph.erase_node(calls_in(graph)[0])


def repeat(graph: fx.Graph) -> None:
    node = calls_in(graph)[1]
    with graph.inserting_after(node):
        graph.node_copy(node, lambda source: source)


def make_again(graph: fx.Graph) -> None:
    repeat(graph)
    graph.erase_node(calls_in(graph)[1])


def swap(graph: fx.Graph) -> None:
    first, second = calls_in(graph)
    second.append(first)


def exchange_arguments(graph: fx.Graph) -> None:
    node = calls_in(graph)[0]
    node.args = node.args[::-1]


def drop_an_argument(graph: fx.Graph) -> None:
    node = calls_in(graph)[0]
    node.args = node.args[:1]


def other_value(graph: fx.Graph) -> None:
    first, second = calls_in(graph)
    second.args = first.args[:1]


def call_another(graph: fx.Graph) -> None:
    node = calls_in(graph)[1]
    node.target = HostCall(print, [1])


def update_first(graph: fx.Graph) -> None:
    """A statistic that is updated behind the first callback, before it."""
    first = calls_in(graph)[0]
    second = calls_in(graph)[1]
    update = next(node for node in get_outputs(graph).updates if node < first)
    assert not update.users or all(user.op == "output" for user in update.users)
    second.append(update)


MUTATIONS = [
    erase,
    repeat,
    make_again,
    swap,
    exchange_arguments,
    drop_an_argument,
    other_value,
    call_another,
    update_first,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_changed_graph_is_refused(mutate: Callable[[fx.Graph], None]) -> None:
    gm = captured()
    before, _ = copy_graph(gm.graph)
    assert check_dependencies(before, gm).ok
    mutate(gm.graph)
    report = check_dependencies(before, gm)
    assert not report.ok
    assert "callback" in str(report)


def test_dependency_graph_has_their_order() -> None:
    gm = captured()
    first, second = calls_in(gm.graph)
    assert "host" in dependency_graph(gm).edges[first, second]["kind"]


def test_a_late_callback_is_refused() -> None:
    module = graphopt.IterGraphModule(captured())
    (first, _) = calls_in(module.graph)
    with pytest.raises(graphopt.IterationError, match="cannot be late"):
        module.graph.move_to_next_iter_before([first], module.graph.output_node())


def test_neither_compiled_nor_recorded() -> None:
    for node in calls_in(captured().graph):
        assert reason_to_keep(node) is not None
        assert Recordable("cpu", lambda name: True).reason_against(node) is not None


def test_saving_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SavedGraphError, match=r"graphopt\.callback.*\n.*from:.*test_callback_graphs"
    ):
        save_graph(captured(), tmp_path / "graph.pt")


def test_shown() -> None:
    from graphopt.readable import graph_text

    rows = [row for row in graph_text(captured()).splitlines() if "graphopt.callback(" in row]
    assert len(rows) == 2 and "%loss" not in rows[0] and "%x" in rows[0]


def test_inserted_by_a_pass() -> None:
    got: list[Any] = []

    @graphopt.graph_optimization_pass(registry=PassRegistry())
    def watch_results(gm: fx.GraphModule) -> int:
        with gm.graph.inserting_before(gm.graph.output_node()):
            insert_callback(gm.graph, got.append, {"loss": get_outputs(gm.graph).results[0]})
        return 1

    seen: list[Any] = []
    model = cases.Net([])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphopt.compile(two_calls(seen), pipeline=[watch_results])
    losses = [step(model, optimizer, *cases.batch(i)) for i in range(3)]
    assert len(seen) == 6
    assert all(torch.equal(mine["loss"], loss) for mine, loss in zip(got, losses, strict=True))


def test_a_traced_function_calls_when_it_runs() -> None:
    seen: list[Any] = []

    def doubled(x: Tensor) -> Tensor:
        graphopt.callback(seen.append, x * 2)
        return x * 2

    traced = make_fx(doubled)(torch.ones(2))
    assert seen == []
    traced(torch.ones(2))
    assert [value.tolist() for value in seen] == [[2.0, 2.0]]


def test_fake_tensors_call_nothing() -> None:
    seen: list[Any] = []
    with FakeTensorMode():
        graphopt.callback(seen.append, torch.ones(2))
    assert seen == []


def test_eager_values_are_copies() -> None:
    seen: list[Any] = []
    weight = nn.Parameter(torch.ones(2))
    graphopt.callback(seen.append, weight)
    graphopt.callback(lambda tree: seen.append(tree["weight"]), {"weight": weight * 2})
    with torch.no_grad():
        weight.zero_()
    assert [value.tolist() for value in seen] == [[1.0, 1.0], [2.0, 2.0]]
    assert not any(value.requires_grad for value in seen)


def every_third(seen: list[Any]) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = cases.loss_of(model, x, y)
        graphopt.callback(lambda value: seen.append(value.item()), loss, every=3)
        return cases.finish(optimizer, loss)

    return step


@pytest.mark.parametrize("pipeline", ["none", "default"])
def test_every(pipeline: str) -> None:
    """Steps 3 and 6, although the first two are captured alone, and the fifth has another shape."""
    losses: list[float] = []
    seen: list[float] = []
    model = cases.Net([])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = graphopt.compile(every_third(seen), pipeline=pipeline)
    for number in range(8):
        x, y = cases.batch(number)
        rows = 4 if number == 4 else 6
        losses.append(step(model, optimizer, x[:rows], y[:rows]).item())
    assert seen == losses[2::3]


def test_every_in_eager_code() -> None:
    seen: list[Any] = []
    log = lambda name, value: graphopt.callback(seen.append, (name, value), every=2)  # noqa: E731
    for number in range(6):
        log("loss", number)
        log("norm", number)
    assert seen == [(name, n) for n in (1, 3, 5) for name in ("loss", "norm")]


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "2"])
def test_every_that_is_no_number(every: Any) -> None:
    with pytest.raises(ValueError, match="every"):
        graphopt.callback(print, every=every)


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="function"):
        graphopt.callback(torch.ones(1), print)  # type: ignore[arg-type]
