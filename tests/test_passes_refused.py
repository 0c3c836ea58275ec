"""Passes that raise, break a graph or change its meaning: refused, and nothing has happened."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphopt import discovery
from graphopt.errors import GraphOptError, IterationError, PassError, VerificationError
from graphopt.graph_utils import (
    call_function_with_meta,
    find_nodes,
    get_output,
    is_collective,
    is_operator,
    is_wait,
)
from graphopt.iter_graph import IterGraph, IterGraphModule
from graphopt.manager import (
    PassArgumentError,
    PassCallback,
    PassContext,
    PassManager,
    PassRegistry,
    applied_passes,
    graph_optimization_pass,
)
from graphopt.saved import load_graph, save_graph
from graphs import inputs_of, training_step

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VERIFY", "DUMP", "DISABLE", "STOP_AFTER"):
        monkeypatch.delenv(f"GRAPHOPT_{variable}", raising=False)
    monkeypatch.chdir(tmp_path)


def state(gm: fx.GraphModule) -> Any:
    """All that a pass may not leave changed. Nodes are given by name."""
    graph = gm.graph
    late = {n.name: d.name for n, d in graph.late.items()} if isinstance(graph, IterGraph) else {}
    return {
        "class": type(graph),
        "owner": graph.owning_module is gm,
        "text": [node.format_node() for node in graph.nodes],
        "types": [node.type for node in graph.nodes],
        "meta": [list(node.meta.items()) for node in graph.nodes],
        "late": late,
        "modules": {name: id(module) for name, module in gm.named_modules()},
        "buffers": {name: id(buffer) for name, buffer in gm.named_buffers()},
        "attributes": sorted(
            (module_name, name)
            for module_name, module in gm.named_modules()
            for name in vars(module)
        ),
        "module meta": dict(gm.meta),
    }


def late_step() -> IterGraphModule:
    """A step that has late nodes, a submodule and a record of a pass."""
    registry = PassRegistry()

    @graph_optimization_pass(registry=registry)
    def earlier(gm: IterGraphModule) -> int:
        copies = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::copy_"))
        gm.graph.move_to_next_iter_before(copies[-1:], next(iter(copies[-1].args[0].users)))
        return 1

    module = IterGraphModule(training_step(2))
    module.add_module("inner", nn.Module())
    module.inner.register_buffer("offset", torch.zeros(1))
    module.meta["note"] = "mine"
    earlier(module)
    return module


def call(gm: fx.GraphModule, number: int = 0) -> fx.Node:
    """One of the calls of an operator in the forward."""
    gelus = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::gelu"))
    return gelus[number]


def devastate(gm: fx.GraphModule) -> None:
    """Change everything there is."""
    node = call(gm)
    with gm.graph.inserting_after(node):
        new = call_function_with_meta(gm.graph, aten.neg.default, (node,), like=node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    node.meta["source"] = "elsewhere"
    node.meta.pop("phase")
    node.name = "renamed"
    if isinstance(gm.graph, IterGraph):
        copies = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::copy_"))
        late = copies[0]
        gm.graph.move_to_next_iter_before([late], next(iter(late.args[0].users)))
    last = get_output(gm.graph)
    results, updates, carried = last.args[0]
    last.args = ((results, updates[:1], carried),)
    for update in updates[1:]:
        gm.graph.erase_node(update)
    gm.add_module("added", nn.ReLU())
    gm.register_buffer("number", torch.zeros(1))
    gm.note = "more"
    gm.meta["note"] = "theirs"
    gm.meta["more"] = 1
    if hasattr(gm, "inner"):
        gm.inner.offset = torch.ones(1)
        gm.inner.extra = 1


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


def refused(
    function: Callable[..., Any], gm: fx.GraphModule | None = None, **options: Any
) -> GraphOptError:
    """The error of a pass, after which the graph is the same."""
    gm = training_step(2) if gm is None else gm
    before = state(gm)
    with pytest.raises(GraphOptError) as caught:
        graph_optimization_pass(registry=PassRegistry())(function)(gm, **options)
    assert state(gm) == before
    return caught.value


def test_the_error_of_a_moved_read() -> None:
    def move_up(gm: fx.GraphModule) -> None:
        node = call(gm)
        node.meta["source"] = "train.py:41  return gelu(x)"
        node.args[0].prepend(node)

    error = refused(move_up)
    assert isinstance(error, VerificationError)
    assert str(error) == textwrap.dedent("""\
        pass 'move_up' was refused: it moved a read before the value exists
          > %gelu_default  = aten.gelu.default(%addmm_default)
            %addmm_default = aten.addmm.default(%p0_bias, %x, %t_default)
          from:      train.py:41  return gelu(x)
          pipeline:  [move_up]
          reproduce: graphopt optimize graphopt-repro/01.pt --pipeline move_up
          hint:      insert the new reader after all of its inputs""")


def test_the_error_of_a_crash(tmp_path: Path) -> None:
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
    command = shlex.join(
        ["graphopt", "optimize", str(path), "--pipeline", "crash(label='a b', size=0.5)"]
    )
    assert str(caught.value) == (
        "pass 'crash' raised LookupError: no such thing\n"
        "  as this\n"
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
    assert isinstance(error, IterationError) and str(error) == "no such node"
    assert not Path("graphopt-repro").exists()


def test_values_that_a_pass_does_not_take() -> None:
    def sized(gm: fx.GraphModule, size: int = 0) -> None:
        raise PassArgumentError(f"size={size}: a number above 0 is expected")

    error = refused(sized)
    assert isinstance(error, PassArgumentError)
    assert "pass 'sized' does not take this: size=0: a number above 0" in str(error)


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


def drop_update(gm: fx.GraphModule) -> None:
    output = get_output(gm.graph)
    results, updates, carried = output.args[0]
    output.args = ((results, updates[1:], carried),)
    gm.graph.erase_node(updates[0])


def rewire(gm: fx.GraphModule) -> None:
    first, second = call(gm, 0), call(gm, 1)
    second.replace_input_with(second.args[0], first)


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


def test_the_dumps_of_a_refused_pass_are_not_written(tmp_path: Path) -> None:
    declared = graph_optimization_pass(registry=PassRegistry())(drop_update)
    with pytest.raises(VerificationError):
        PassManager([declared], dump_dir=tmp_path / "dump").run(training_step(1))
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["graphopt-repro"]


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


@pytest.mark.slow
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
