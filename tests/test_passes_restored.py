"""After a pass that raises in the middle, everything is as it was before it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx

from graphopt.errors import PassError
from graphopt.graph_utils import call_function_with_meta
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import (
    PassArgumentError,
    PassManager,
    PassRegistry,
    applied_passes,
    graph_optimization_pass,
)
from graphs import inputs_of, training_step
from toy_passes import call, devastate, late_step, state

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("without_settings")


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
