"""A further collective, fused optimizer or rule of the verifier is one row, and its test.

Here each does nothing new, and nothing else of the project knows of it. A further kind of
parallelism is in test_kinds_of_parallelism.py.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphopt
from gloo import Pool
from graphopt.graph_utils import find_nodes, is_operator
from graphopt.ir.families import COLLECTIVE_KINDS, CollectiveKind
from graphopt.testing import check_pass, fake_ranks
from graphopt.verify import check_equivalence
from graphopt.verify.values.axioms import AXIOMS, RULES, Axiom
from sketch import Sketch
from twins import SEED
from zoo import MODELS

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

TESTS = Path(__file__).parent


# A collective


@contextmanager
def keep() -> Iterator[None]:
    """The collective `keep`, in which each rank gets what it sends."""
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("keep(Tensor input, str group_name) -> Tensor")
        library.impl("keep", lambda value, group: value.clone(), "CompositeExplicitAutograd")
        yield
    while "keep" in c10d._dir:  # torch looks there for all operators, and this one is gone
        c10d._dir.remove("keep")


@pytest.fixture
def kept() -> Iterator[None]:
    with keep():
        yield


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    kept = c10d.wait_tensor(c10d.keep(x, "0"))
    scale = (x * x).mean()
    loss = F.cross_entropy(model(kept), y) * scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def without(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y) * (x * x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run_both(rank: int) -> list[str]:
    """Trains with the collective and, the same compiled, without; the operators of the graph."""
    found = []
    with keep():
        torch.manual_seed(SEED)
        model = MODELS["mlp"].make()
        twin = copy.deepcopy(model)
        for trained, function in ((model, step), (twin, without)):
            optimizer = torch.optim.AdamW(trained.parameters(), fused=True)
            compiled = graphopt.compile(function)
            for index in range(3):
                compiled(trained, optimizer, *MODELS["mlp"].batch(10 * rank + index))
            compiled.flush()
            found.append([str(node.target) for node in compiled.graph_module.graph.nodes])
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert not any("keep" in target for target in found[1])
    return found[0]


def test_a_further_collective_runs_on_real_ranks(two_ranks: Pool) -> None:
    first, second = two_ranks.run(run_both)
    assert first == second and first.count("_c10d_functional.keep.default") == 1
    assert any("all_reduce" in target for target in first)


def test_a_further_collective_is_scheduled_and_simulated(kept: None) -> None:
    with fake_ranks(2):
        model = MODELS["mlp"].make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gm = graphopt.capture(step, model, optimizer, *MODELS["mlp"].batch(0)).graph_module
        graphopt.PassManager("comm_fusion_with_concat -> schedule_comm_wait").run(gm)
        (block,) = graphopt.comm.get_all_comm_blocks(gm, "keep")
        assert block.group == "0" and graphopt.simulate(gm).comm_seconds > 0
        (wait,) = block.wait_nodes
        assert wait.next in wait.users and block.comm_node.next is not wait


def drop(launch: fx.Node, wait: fx.Node) -> None:
    wait.replace_all_uses_with(launch.args[0])  # type: ignore[arg-type]
    launch.graph.erase_node(wait)
    launch.graph.erase_node(launch)


def read_early(launch: fx.Node, wait: fx.Node) -> None:
    wait.replace_all_uses_with(launch)
    wait.args = (launch,)


def send_other(launch: fx.Node, wait: fx.Node) -> None:
    other = next(n for n in launch.graph.nodes if n.name == "y")
    launch.args = (other, *launch.args[1:])


@pytest.mark.parametrize("edit", [drop, read_early, send_other])
def test_a_wrong_edit_of_a_further_collective_is_refused(kept: None, edit: Any) -> None:
    def drawn() -> fx.GraphModule:
        s = Sketch()
        x, _ = s.input("x", 4), s.input("y", 4)
        return s.step([s.call(aten.neg.default, s.wait(s.call(c10d.keep.default, x, "0")))])

    before, after = drawn(), drawn()
    assert check_equivalence(before, after).ok
    (launch,) = find_nodes(after.graph, lambda n: is_operator(n.target, "_c10d_functional::keep"))
    (wait,) = launch.users
    edit(launch, wait)
    assert not check_equivalence(before, after).ok


@pytest.mark.parametrize("by_element", [True, False])
def test_the_row_of_a_collective_says_what_is_proven(
    kept: None, monkeypatch: pytest.MonkeyPatch, by_element: bool
) -> None:
    """Two messages in one are the same two where each element goes for itself, and only there."""
    monkeypatch.setitem(COLLECTIVE_KINDS, "keep", CollectiveKind(by_element=by_element))

    def message(s: Sketch, value: fx.Node) -> fx.Node:
        return s.wait(s.call(c10d.keep.default, value, "0"))

    apart, joined = Sketch(), Sketch()
    before = apart.step([message(apart, apart.input(name, 4)) for name in "xy"])
    both = joined.call(aten.cat.default, [joined.input(name, 4) for name in "xy"])
    sent = message(joined, both)
    parts = [joined.call(aten.slice.Tensor, sent, 0, 4 * i, 4 * i + 4) for i in range(2)]
    after = joined.step([joined.call(aten.clone.default, part) for part in parts])
    assert check_equivalence(before, after).ok is by_element


def test_ranks_that_are_pretended_refuse_a_further_collective(kept: None) -> None:
    with fake_ranks(2):
        model = MODELS["mlp"].make()
        args = model, torch.optim.SGD(model.parameters(), lr=0.1), *MODELS["mlp"].batch(0)
        with pytest.raises(graphopt.CollectiveError, match="keep cannot be replayed"):
            check_pass(step, args, "comm_fusion_with_concat")


# A fused optimizer


def test_a_further_fused_optimizer_is_one_row() -> None:
    """In a process in which the row is there before anything reads the table."""
    command = [sys.executable, TESTS / "further_optimizer.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["1", "4", "True"]


# A rule of the verifier


def test_a_further_rule_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*, same: bool, added: float = 1.0) -> fx.GraphModule:
        s = Sketch()
        x = s.input("x", 4)
        value = s.call(torch.ops.rule_for_test.same.default, x) if same else x
        return s.step([s.call(aten.add.Tensor, value, added)])

    with torch.library._scoped_library("rule_for_test", "DEF") as library:
        library.define("same(Tensor self) -> Tensor")
        library.impl("same", torch.clone, "CPU")
        library._register_fake("same", torch.empty_like)
        assert not check_equivalence(computed(same=True), computed(same=False)).ok
        name = "rule_for_test::same"
        rule = Axiom("does nothing", (name,), "it gives its argument", AXIOMS[0].apply)
        monkeypatch.setitem(RULES, name, rule)
        assert check_equivalence(computed(same=True), computed(same=False)).ok
        assert not check_equivalence(computed(same=True), computed(same=False, added=2.0)).ok
