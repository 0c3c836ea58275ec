"""What is said of a pass that raises or is refused, and the file that reproduces it."""

from __future__ import annotations

import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from graphopt.errors import CaptureError, IterationError, PassError, VerificationError
from graphopt.graph_utils import call_function_with_meta
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import (
    PassArgumentError,
    PassCallback,
    PassContext,
    PassManager,
    PassRegistry,
    applied_passes,
    discovery,
    graph_optimization_pass,
)
from graphopt.saved import load_graph, save_graph
from graphs import training_step
from toy_passes import call, devastate, drop_update, refused

pytestmark = pytest.mark.usefixtures("without_settings")


def test_the_error_of_a_moved_read() -> None:
    def move_up(gm: fx.GraphModule) -> None:
        node = call(gm)
        node.meta["source"] = "train.py:41  return gelu(x)"
        node.args[0].prepend(node)

    error = refused(move_up)
    assert isinstance(error, VerificationError)
    assert str(error) == textwrap.dedent(f"""\
        pass 'move_up' was refused: it moved a read before the value exists
          > %gelu_default  = aten.gelu.default(%addmm_default)
            %addmm_default = aten.addmm.default(%p0_bias, %x, %t_default)
          from:      train.py:41  return gelu(x)
          pipeline:  [move_up]
          reproduce: graphopt optimize graphopt-repro/01.pt --pipeline move_up --import {__file__}
          hint:      insert the new reader after all of its inputs""")


def test_the_error_of_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHOPT_REPRO")
    registry = PassRegistry()

    @graph_optimization_pass(registry=registry)
    def first(gm: fx.GraphModule) -> None: ...

    @graph_optimization_pass(registry=registry)
    def crash(gm: fx.GraphModule, label: str = "", size: float = 1) -> None:
        raise LookupError("no such thing\n  as this")

    gm = training_step(1)
    manager = PassManager(
        "first -> crash(label='a b', size=0.5)", registry=registry, dump_dir=tmp_path / "dump"
    )
    with pytest.raises(PassError) as caught:
        manager.run(gm)
    path = tmp_path / "dump" / "graphopt-repro" / "01.pt"
    line = crash.function.__code__.co_firstlineno + 2
    command = shlex.join(
        [
            *("graphopt", "optimize", str(path)),
            *("--pipeline", "crash(label='a b', size=0.5)", "--import", __file__),
        ]
    )
    assert str(caught.value) == (
        "pass 'crash' raised LookupError: no such thing\n"
        "  as this\n"
        f'  at:        {__file__}:{line}  raise LookupError("no such thing\\n  as this")\n'
        "  pipeline:  first -> [crash(label='a b', size=0.5)]\n"
        f"  reproduce: {command}"
    )
    assert isinstance(caught.value.__cause__, LookupError)
    loaded = load_graph(path)
    assert str(loaded.graph) == str(gm.graph) and applied_passes(loaded) == ["first"]


def test_each_failure_has_a_file_of_its_own() -> None:
    def crash(gm: fx.GraphModule) -> None:
        raise LookupError

    for number in ("01", "02"):
        assert f"graphopt-repro/{number}.pt" in str(refused(crash))
    assert sorted(path.name for path in Path("graphopt-repro").iterdir()) == ["01.pt", "02.pt"]


def test_a_graph_that_cannot_be_saved() -> None:
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x

    def crash(gm: fx.GraphModule) -> None:
        raise LookupError("this matters")

    gm = training_step(1)
    call(gm).target = unknown
    error = refused(crash, gm)
    assert "raised LookupError: this matters" in str(error)
    assert "reproduce: no file was written (SavedGraphError:" in str(error)
    assert list(Path("graphopt-repro").iterdir()) == []


def test_a_folder_that_cannot_be_made() -> None:
    Path("graphopt-repro").write_text("in the way")

    def crash(gm: fx.GraphModule) -> None:
        raise LookupError("this matters")

    assert "no file was written (FileExistsError" in str(refused(crash))


def test_options_without_text() -> None:
    def crash(gm: fx.GraphModule, node: Any) -> None:
        raise LookupError

    error = refused(crash, node=object())
    assert "graphopt-repro/01.pt holds the graph; the options have no text form" in str(error)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [(True, "True"), (-1, "-1"), (1.0, "1.0"), ("3", "'3'"), (fx.Graph, "<class")],
)
def test_wrong_return_values(returned: Any, shown: str) -> None:
    def wrong(gm: fx.GraphModule) -> Any:
        devastate(gm)
        return returned

    error = refused(wrong)
    assert isinstance(error, PassError)
    assert f"pass 'wrong' was refused: it returned {shown}" in str(error)
    assert "hint:      a pass edits gm.graph in place, and returns how many" in str(error)


def test_returning_the_graph_module() -> None:
    def wrong(gm: fx.GraphModule) -> Any:
        return gm

    assert "it returned a graph module" in str(refused(wrong))


def test_errors_of_graphopt_keep_their_type() -> None:
    def unfinished(gm: fx.GraphModule) -> None:
        devastate(gm)
        raise IterationError("no such node")

    error = refused(unfinished)
    assert isinstance(error, IterationError)
    assert str(error) == (
        "pass 'unfinished' raised IterationError: no such node\n"
        f'  at:        {__file__}:{line_of(unfinished, 2)}  raise IterationError("no such node")\n'
        "  pipeline:  [unfinished]\n"
        "  reproduce: graphopt optimize graphopt-repro/01.pt --pipeline unfinished"
        f" --import {__file__}"
    )


def line_of(function: Callable[..., Any], number: int) -> int:
    """Where the line stands that comes `number` lines after the head of a function."""
    return function.__code__.co_firstlineno + number


def test_errors_of_graphopt_that_say_more() -> None:
    def captures(gm: fx.GraphModule) -> None:
        raise CaptureError("no reason", hint="none")

    error = refused(captures)
    assert isinstance(error, PassError) and isinstance(error.__cause__, CaptureError)
    assert "pass 'captures' raised CaptureError: the step cannot be captured: no rea" in str(error)


def test_errors_of_operators_name_pass_and_line() -> None:
    def multiplies(gm: fx.GraphModule) -> None:
        node = call(gm)
        with gm.graph.inserting_after(node):
            call_function_with_meta(gm.graph, torch.ops.aten.mm.default, (node, node))

    def puts_in(gm: fx.GraphModule) -> None:
        node = call(gm)
        with gm.graph.inserting_after(node):
            wrong = gm.graph.call_function(torch.ops.aten.mm.default, (node, node))
        wrong.meta = dict(node.meta)
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)

    raised = str(refused(multiplies))
    assert "pass 'multiplies' raised VerificationError: aten.mm.default does not take" in raised
    assert f"{__file__}:{line_of(multiplies, 3)}  call_function_with_meta(" in raised
    assert "pipeline:  [multiplies]\n  reproduce: graphopt optimize" in raised
    assert "pass 'puts_in' was refused" in str(refused(puts_in))


def test_work_that_is_dead_code() -> None:
    def observes(gm: fx.GraphModule) -> int:
        node = call(gm)
        with gm.graph.inserting_after(node):
            call_function_with_meta(gm.graph, torch.ops.aten.sum.default, (node,))
        return 1

    error = refused(observes)
    assert isinstance(error, PassError)
    assert "it reports 1 change, but nobody reads %sum_default" in str(error)
    assert "graphopt.host.insert_callback" in str(error)


def test_python_functions_are_no_operators() -> None:
    def log(value: object) -> None: ...

    def by_helper(gm: fx.GraphModule) -> int:
        node = call(gm)
        with gm.graph.inserting_after(node):
            call_function_with_meta(gm.graph, log, (node,))
        return 1

    def by_hand(gm: fx.GraphModule) -> int:
        node = call(gm)
        with gm.graph.inserting_after(node):
            gm.graph.call_function(log, (node,))
        return 1

    assert "log is a Python function" in str(refused(by_helper))
    for wrong in (by_helper, by_hand):
        assert "graphopt.host.insert_callback" in str(refused(wrong))


def test_a_pass_for_iterations_on_a_plain_graph() -> None:
    ran = []

    @graph_optimization_pass(registry=PassRegistry())
    def first(gm: fx.GraphModule) -> None:
        ran.append(1)

    @graph_optimization_pass(registry=PassRegistry())
    def late(gm: IterGraphModule) -> None:
        ran.append(2)

    with pytest.raises(IterationError) as caught:
        PassManager([first, late]).run(training_step(1))
    assert str(caught.value) == (
        "pass 'late' takes an IterGraphModule, and this is a plain GraphModule, which has no next"
        " iteration\n  pipeline: first -> [late]\n"
        "  hint:     wrap the graph: gm = graphopt.IterGraphModule(gm)"
    )
    assert ran == [] and not Path("graphopt-repro").exists()
    PassManager([first, late]).run(IterGraphModule(training_step(1)))


def test_values_that_a_pass_does_not_take() -> None:
    def sized(gm: fx.GraphModule, size: int = 0) -> None:
        raise PassArgumentError(f"size={size}: a number above 0 is expected")

    error = refused(sized)
    assert isinstance(error, PassArgumentError)
    assert "pass 'sized' does not take this: size=0: a number above 0" in str(error)


def test_the_dumps_of_a_refused_pass_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAPHOPT_REPRO")
    declared = graph_optimization_pass(registry=PassRegistry())(drop_update)
    with pytest.raises(VerificationError):
        PassManager([declared], dump_dir=tmp_path / "dump").run(training_step(1))
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["graphopt-repro"]


def test_callbacks_hear_of_failures() -> None:
    seen = []

    class Listener(PassCallback):
        def failed(self, context: PassContext, error: BaseException) -> None:
            seen.append((context.pass_.name, len(context.gm.graph.nodes)))

    gm = training_step(1)
    declared = graph_optimization_pass(registry=PassRegistry())(drop_update)
    with pytest.raises(VerificationError):
        PassManager([declared], callbacks=[Listener()]).run(gm)
    assert seen == [("drop_update", len(gm.graph.nodes))]


def test_the_command_reproduces_the_error(tmp_path: Path) -> None:
    """With the passes of the package, which the command finds by itself."""
    discovery.install()
    gm = training_step(1)
    manager = PassManager("comm_fusion_with_concat(bucket_size_mb=-1)")
    with pytest.raises(PassArgumentError, match="pass 'comm_fusion_with_concat' does not take"):
        manager.run(gm)
    save_graph(gm, tmp_path / "saved.pt")
    command = [sys.executable, "-m", "graphopt", "optimize", "saved.pt", "--pipeline", str(manager)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "pass 'comm_fusion_with_concat' does not take" in result.stderr
