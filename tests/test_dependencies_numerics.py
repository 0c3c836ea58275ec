"""Passes that change numerics on purpose: what they send may have another dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx

from graphopt import PassManager, PassRegistry, VerificationError, graph_optimization_pass
from graphopt.graph_utils import call_function_with_meta, is_collective
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
        with pytest.raises(VerificationError, match=r"sends 0 elements of torch\.float32"):
            manager.run(gm)
