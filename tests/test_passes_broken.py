"""Passes that raise or leave a broken graph: refused, and everything is as before."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from graphopt.errors import PassError, VerificationError
from graphopt.graph_utils import (
    call_function_with_meta,
    find_nodes,
    get_output,
    is_collective,
    is_wait,
)
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import (
    PassArgumentError,
    PassManager,
    PassRegistry,
    applied_passes,
    graph_optimization_pass,
)
from graphs import inputs_of, training_step
from toy_passes import call, devastate, drop_update, late_step, refused, rewire, state

aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("without_settings")


def add_placeholder(gm: fx.GraphModule) -> None:
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        gm.graph.placeholder("extra").meta["val"] = first.meta["val"]


def remove_placeholder(gm: fx.GraphModule) -> None:
    node = next(iter(gm.graph.nodes))
    node.replace_all_uses_with(node.next)
    gm.graph.erase_node(node)


def swap_placeholders(gm: fx.GraphModule) -> None:
    first = next(iter(gm.graph.nodes))
    first.next.append(first)


def erase_output(gm: fx.GraphModule) -> None:
    gm.graph.erase_node(get_output(gm.graph))


def two_outputs(gm: fx.GraphModule) -> None:
    gm.graph.output(get_output(gm.graph).args[0])


def behind_the_output(gm: fx.GraphModule) -> None:
    node = call(gm)
    with gm.graph.inserting_after(get_output(gm.graph)):
        call_function_with_meta(gm.graph, aten.neg.default, (node,), like=node)


def forget_metadata(gm: fx.GraphModule) -> None:
    node = call(gm)
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(aten.alias.default, (node,))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def drop_metadata(gm: fx.GraphModule) -> None:
    del call(gm).meta["val"]


def foreign_node(gm: fx.GraphModule) -> None:
    node = call(gm)
    node.replace_input_with(node.args[0], call(training_step(2)))


def lost_attribute(gm: fx.GraphModule) -> None:
    node = call(gm)
    with gm.graph.inserting_before(node), pytest.warns(match="no underlying reference"):
        constant = gm.graph.get_attr("no_such_thing")
    constant.meta["val"] = node.meta["val"]
    node.replace_input_with(node.args[0], constant)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (add_placeholder, "it added a placeholder\n  > %extra"),
        (remove_placeholder, "it removed the placeholder"),
        (swap_placeholders, "it changed the order of the placeholders"),
        (erase_output, "it left a graph with no outputs"),
        (two_outputs, "it left a graph with 2 outputs"),
        (behind_the_output, "it put a node behind the output"),
        (forget_metadata, r"it left a node without meta\['val'\]\n  > %alias"),
        (drop_metadata, r"it left a node without meta\['val'\]\n  > %gelu"),
        (foreign_node, "it used a node of another graph\n  > %gelu"),
        (lost_attribute, "the graph is malformed: .*no_such_thing"),
    ],
)
@pytest.mark.parametrize("verify", ["off", "dependencies"])
def test_broken_graphs(
    function: Callable[..., Any], message: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHOPT_VERIFY", verify)
    error = refused(function, IterGraphModule(training_step(2)))
    assert isinstance(error, VerificationError)
    text = str(error)
    assert re.search(message, text), text
    assert text.startswith(f"pass '{function.__name__}' was refused: ")
    assert "graphopt-repro/01.pt" in text


def drop_collective(gm: fx.GraphModule) -> None:
    wait = find_nodes(gm.graph, is_wait)[0]
    launch = wait.args[0]
    wait.replace_all_uses_with(launch.args[0])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(launch)


def drop_wait(gm: fx.GraphModule) -> None:
    wait = find_nodes(gm.graph, is_wait)[0]
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)


@pytest.mark.parametrize("function", [drop_collective, drop_wait, drop_update, rewire])
def test_another_computation(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(function)
    assert isinstance(error, VerificationError)
    assert f"pass '{function.__name__}' was refused: " in str(error)
    assert "\n  > " in str(error) and "\n  reproduce: graphopt optimize" in str(error)
    monkeypatch.setenv("GRAPHOPT_VERIFY", "off")
    gm = training_step(2)
    graph_optimization_pass(registry=PassRegistry())(function)(gm)
    assert len(find_nodes(gm.graph, is_collective)) <= 4


def test_a_late_node_whose_user_is_not_late() -> None:
    def read_late(gm: IterGraphModule) -> None:
        (late, *_) = gm.graph.late
        with gm.graph.inserting_before(get_output(gm.graph)):
            new = call_function_with_meta(gm.graph, aten.neg.default, (late,), like=late)
        output = get_output(gm.graph)
        results, updates, carried = output.args[0]
        output.args = (([*results, new], updates, carried),)

    error = refused(read_late, late_step())
    assert isinstance(error, VerificationError)
    assert "pass 'read_late' was refused: " in str(error)


def test_a_pass_may_put_another_graph_in_place() -> None:
    """Nodes correspond by name then."""

    def rebuild(gm: fx.GraphModule) -> int:
        gm.graph = copy.deepcopy(gm.graph)
        return 1

    def rebuild_wrongly(gm: fx.GraphModule) -> int:
        rewire(gm)
        return rebuild(gm)

    for gm in (training_step(2), IterGraphModule(training_step(2))):
        text = str(gm.graph)
        assert graph_optimization_pass(registry=PassRegistry())(rebuild)(gm).changed
        assert str(gm.graph) == text
        assert isinstance(refused(rebuild_wrongly, gm), VerificationError)


@pytest.mark.parametrize("make", [late_step, lambda: training_step(2)])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, PassArgumentError])
def test_everything_is_as_before(
    make: Callable[[], fx.GraphModule], error: type[BaseException]
) -> None:
    @graph_optimization_pass(registry=PassRegistry())
    def destroy(gm: fx.GraphModule) -> None:
        devastate(gm)
        raise error("in the middle")

    gm = make()
    before = state(gm)
    expected = PassError if error is ValueError else error
    with pytest.raises(expected, match="in the middle"):
        destroy(gm)
    assert state(gm) == before
    gm.graph.lint()
    if isinstance(gm, IterGraphModule):
        assert gm.main_gm.code and gm.inner.offset == 0


def test_restored_graphs_run() -> None:
    @graph_optimization_pass(registry=PassRegistry(), repeatable=True)
    def destroy(gm: fx.GraphModule) -> None:
        devastate(gm)
        gm.recompile()
        raise ValueError("in the middle")

    gm = training_step(1, ranks=None)
    inputs = inputs_of(gm)
    expected = gm(*copy.deepcopy(inputs))[0][0]
    for _ in range(2):
        with pytest.raises(PassError):
            destroy(gm)
        assert torch.equal(gm(*copy.deepcopy(inputs))[0][0], expected)


def test_passes_before_stay_applied() -> None:
    registry = PassRegistry()

    @graph_optimization_pass(registry=registry)
    def fine(gm: fx.GraphModule) -> int:
        node = call(gm)
        with gm.graph.inserting_after(node):
            new = call_function_with_meta(gm.graph, aten.alias.default, (node,), like=node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return 1

    @graph_optimization_pass(registry=registry)
    def bad(gm: fx.GraphModule) -> None:
        raise RuntimeError

    gm, alone = training_step(1), training_step(1)
    fine(alone)
    with pytest.raises(PassError, match="pass 'bad' raised RuntimeError\n"):
        PassManager("fine -> bad", registry=registry).run(gm)
    assert applied_passes(gm) == ["fine"] and str(gm.graph) == str(alone.graph)
