"""Passes that change numerics on purpose: what they send may have another dtype."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from graphopt import PassManager, PassRegistry, VerificationError, graph_optimization_pass
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_collective
from graphs import training_step

aten = torch.ops.aten


def compress(gm: fx.GraphModule) -> int:
    """Send gradients in bfloat16."""
    launches = [node for node in gm.graph.nodes if is_collective(node)]
    for launch in launches:
        (wait,) = launch.users
        with gm.graph.inserting_before(launch):
            sent = call_function_with_meta(
                gm.graph, aten._to_copy.default, launch.args[:1], {"dtype": torch.bfloat16}
            )
            new = call_function_with_meta(
                gm.graph, launch.target, (sent, *launch.args[1:]), like=launch
            )
        with gm.graph.inserting_before(wait):
            received = call_function_with_meta(gm.graph, wait.target, (new,), like=wait)
            back = call_function_with_meta(
                gm.graph, aten._to_copy.default, (received,), {"dtype": torch.float32}
            )
        wait.replace_all_uses_with(back)
        gm.graph.erase_node(wait)
        gm.graph.erase_node(launch)
    return len(launches)


@pytest.mark.parametrize("declared", [True, False])
def test_compression_must_be_declared(
    declared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    registry = PassRegistry()
    pass_ = graph_optimization_pass(changes_numerics=declared, registry=registry)(compress)
    gm, manager = training_step(2), PassManager([pass_], registry=registry)
    if declared:
        (record,) = manager.run(gm)
        assert record.changes_numerics
        assert record.changes
    else:
        with pytest.raises(VerificationError) as caught:
            manager.run(gm)
        text = str(caught.value)
        changed = r"the dtype of \d+ elements that are sent changed: all_reduce\(sum, group 0\) of"
        assert re.search(changed + " torch.bfloat16 now, before it was .* of torch.float32", text)
        assert "hint:      a pass declared with changes_numerics=True may send another" in text


def other_reduction(gm: fx.GraphModule) -> int:
    """Average where gradients are summed."""
    launches = find_nodes(gm.graph, is_collective)
    for launch in launches:
        launch.update_arg(1, "avg")
    return len(launches)


def other_group(gm: fx.GraphModule) -> int:
    """Communicate in another group."""
    find_nodes(gm.graph, is_collective)[0].update_arg(2, "1")
    return 1


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(other_reduction, "the reduction of "), (other_group, "there is no process group")],
)
def test_what_of_a_collective_changed_is_named(
    wrong: Callable[..., Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pass_ = graph_optimization_pass(changes_numerics=True, registry=PassRegistry())(wrong)
    with pytest.raises(VerificationError, match=what):
        PassManager([pass_]).run(training_step(2))
