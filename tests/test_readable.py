"""Graph text, differences, colour, and the listing that a saved graph has."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import fx, nn
from typer.testing import CliRunner

import graphopt
from graphopt import _compat, cli
from graphopt.comm import get_all_comm_blocks, parameters_of
from graphopt.graph_utils import call_function_with_meta, find_nodes, get_output, is_collective
from graphopt.iter_graph import IterGraphModule
from graphopt.readable import compact_text, graph_diff, graph_text, listing_of, readable_bytes
from graphopt.readable.diff import text_diff
from graphopt.readable.terminal import print_diff, print_listing
from graphopt.saved import load_graph, save_graph
from graphopt.testing import fake_ranks
from graphopt.tracing import SourceLine
from steps import mean_square
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten


c10d = torch.ops._c10d_functional


def small_step() -> IterGraphModule:
    """One averaged gradient of one weight, whose update is late, and one constant."""
    graph, mode = fx.Graph(), _compat.new_fake_mode()
    w, lr, x = (graph.placeholder(name) for name in ("w", "lr", "x"))
    for node, kind, dtype, shape in (
        (w, "parameter", torch.float32, (64, 8)),
        (lr, "hyperparameter", torch.float64, ()),
        (x, "user_input", torch.bfloat16, (4, 64)),
    ):
        with mode:
            value = torch.empty(shape, dtype=dtype)
        node.meta.update(val=value, kind=kind, fqn=f"model.{node.name}")
    line = SourceLine("/home/someone/train.py", 41, "step")
    stack = {"model": ("model", nn.Linear), "model.up": ("model.up", nn.Linear)}

    def call(phase: str, target: object, *args: object) -> fx.Node:
        node = call_function_with_meta(graph, target, args)  # type: ignore[arg-type]
        node.meta.update(phase=phase, provenance=("capture",))
        return node

    forward = call("forward", aten.mm.default, w, call("forward", aten.t.default, w))
    forward.meta.update(source=line, nn_module_stack=stack)
    factor = graph.get_attr("factor")
    factor.meta.update(val=_compat.to_fake(mode, torch.tensor(0.5)), phase="backward")
    gradient = call("backward", aten.mul.Tensor, w, factor)
    launch = call("communication", c10d.all_reduce.default, gradient, "sum", "0")
    wait = call("communication", c10d.wait_tensor.default, launch)
    new = call("optimizer", aten.add.Tensor, w, wait)
    new.meta["provenance"] = ("capture", "my_pass")
    update = call("optimizer", aten.copy_.default, w, new)
    graph.output(([forward], [update], []))
    root = nn.Module()
    root.factor = torch.tensor(0.5)
    module = IterGraphModule(fx.GraphModule(root, graph))
    nodes = {node.name: node for node in module.graph.nodes}
    module.graph.move_to_next_iter_before(
        [nodes["add_tensor"], nodes["copy__default"]], nodes["t_default"]
    )
    return module


def names_shown(text: str) -> list[str]:
    return re.findall(r"^\W*%(\w+)", text, flags=re.MULTILINE)


COMPACT = """\
── inputs: parameter ──
%w  f32[64, 8]
── inputs: hyperparameter ──
%lr  f64[]
── inputs: user_input ──
%x  bf16[4, 64]
── forward ──
%t_default = aten.t.default(%w)  f32[8, 64]
%mm_default = aten.mm.default(%w, %t_default)  f32[64, 64]
── backward ──
%factor = self.factor (0.5)  f32[]
%mul_tensor = aten.mul.Tensor(%w, %factor)  f32[64, 8]
── communication ──
▶ %all_reduce_default = _c10d_functional.all_reduce.default(%mul_tensor, 'sum', '0')  f32[64, 8]
■ %wait_tensor_default = _c10d_functional.wait_tensor.default(%all_reduce_default)  f32[64, 8]
── optimizer ──
↻ %add_tensor = aten.add.Tensor(%w, %wait_tensor_default)  f32[64, 8]  late → before %t_default
●↻ %copy__default = aten.copy_.default(%w, %add_tensor)  f32[64, 8]  late → before %t_default
── output ──
results: [%mm_default]
updates: [%copy__default]
carried: []
"""


@pytest.fixture
def step() -> IterGraphModule:
    return small_step()


def test_compact_text(step: IterGraphModule) -> None:
    assert compact_text(step) == COMPACT


def test_graph_text(step: IterGraphModule) -> None:
    lines = graph_text(step).splitlines()
    assert lines[0] == ("12 nodes, 1 collective of 2.0 KiB in all, 1 state update, 2 late nodes")
    shown = {name: line for line in lines if (name := re.match(r"\W*%(\w+)", line))}
    by_name = {match.group(1): " ".join(line.split()) for match, line in shown.items()}
    assert by_name["w"] == "%w f32[64, 8] 2.0 KiB model.w"
    assert by_name["mm_default"] == (
        "%mm_default = aten.mm.default(%w, %t_default) f32[64, 64] 16.0 KiB model.up train.py:41"
    )
    # Views take no memory, a launch says what it sends, and passes sign what they make.
    assert by_name["t_default"] == "%t_default = aten.t.default(%w) f32[8, 64]"
    assert (
        by_name["all_reduce_default"].startswith("▶ ")
        and "2.0 KiB" in by_name["all_reduce_default"]
    )
    assert by_name["add_tensor"].endswith("late → before %t_default by my_pass")
    assert "/home" not in graph_text(step)


def test_bytes_and_places_can_be_left_out(step: IterGraphModule) -> None:
    text = graph_text(step, bytes=False, places=False)
    assert "KiB" not in text.partition("──")[2]
    assert "train.py" not in text
    assert names_shown(text) == names_shown(graph_text(step))


def test_one_phase(step: IterGraphModule) -> None:
    assert names_shown(graph_text(step, phase="communication")) == [
        "all_reduce_default",
        "wait_tensor_default",
    ]


def test_every_node_of_a_captured_step_is_shown() -> None:
    model = MODELS["gpt"].make()
    optimizer = OPTIMIZERS["adamw-foreach"](model.parameters())
    graph = graphopt.capture(train_step, model, optimizer, *MODELS["gpt"].batch(0)).graph_module
    expected = [node.name for node in graph.graph.nodes if node.op != "output"]
    for text in (graph_text(graph), compact_text(graph)):
        assert names_shown(text) == expected
    assert "zoo.py:" in graph_text(graph)
    assert "more]" in graph_text(graph) and "more]" not in compact_text(graph)
    assert max(map(len, graph_text(graph).splitlines())) < 500


def test_a_graph_without_any_metadata() -> None:
    graph = fx.symbolic_trace(lambda x: (x + 1).relu()).graph
    assert compact_text(graph) == textwrap.dedent("""\
        ── inputs ──
        %x
        ── graph ──
        %add = operator.add(%x, 1)
        %relu = relu(%add)
        ── output ──
        %relu
        """)


def test_arguments_in_short_form() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "pin_memory": False}
    graph.call_function(aten.zeros.default, ([2, 3],), options)
    graph.call_function(aten.cat.default, ([x] * 9,))
    graph.output((x,))
    text = graph_text(graph)
    assert "aten.zeros.default([2, 3], dtype=bf16, device=cpu, pin_memory=False)" in text
    assert "aten.cat.default([%x, %x, %x, %x, … 5 more])" in text
    assert text.endswith("(%x,)\n")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")],
)
def test_readable_bytes(count: int, text: str) -> None:
    assert readable_bytes(count) == text


MOVED_AND_NEW = """\
--- before
+++ after my_pass
@@ -6,16 +6,17 @@
 %x  bf16[4, 64]
 ── forward ──
 %t_default = aten.t.default(%w)  f32[8, 64]
+%neg_default = aten.neg.default(%t_default)  f32[8, 64]
 %mm_default = aten.mm.default(%w, %t_default)  f32[64, 64]
 ── backward ──
 %factor = self.factor (0.5)  f32[]
 %mul_tensor = aten.mul.Tensor(%w, %factor)  f32[64, 8]
-── communication ──
-▶ %all_reduce_default = _c10d_functional.all_reduce.default(%mul_tensor, 'sum', '0')  f32[64, 8]
-■ %wait_tensor_default = _c10d_functional.wait_tensor.default(%all_reduce_default)  f32[64, 8]
 ── optimizer ──
 ↻ %add_tensor = aten.add.Tensor(%w, %wait_tensor_default)  f32[64, 8]  late → before %t_default
 ●↻ %copy__default = aten.copy_.default(%w, %add_tensor)  f32[64, 8]  late → before %t_default
+── communication ──
+▶ %all_reduce_default = _c10d_functional.all_reduce.default(%mul_tensor, 'sum', '0')  f32[64, 8]
+■ %wait_tensor_default = _c10d_functional.wait_tensor.default(%all_reduce_default)  f32[64, 8]
 ── output ──
 results: [%mm_default]
 updates: [%copy__default]
"""


def test_diff_shows_a_moved_and_a_new_node(step: IterGraphModule) -> None:
    before = compact_text(step)
    nodes = {node.name: node for node in step.graph.nodes}
    get_output(step.graph).prepend(nodes["all_reduce_default"])
    get_output(step.graph).prepend(nodes["wait_tensor_default"])
    with step.graph.inserting_before(nodes["mm_default"]):
        call_function_with_meta(
            step.graph, aten.neg.default, (nodes["t_default"],), like=nodes["t_default"]
        )
    assert graph_diff(before, step, ("before", "after my_pass")) == MOVED_AND_NEW


def test_no_difference(step: IterGraphModule) -> None:
    assert graph_diff(step, compact_text(step)) == ""


def applied(difference: str, old: list[str]) -> list[str]:
    """The new lines, from the old ones and a unified diff: what `patch` does."""
    new: list[str] = []
    place = 0
    for line in difference.splitlines()[2:]:
        if line.startswith("@@"):
            start, count = map(int, re.findall(r"\d+", line)[:2])
            start = start - 1 if count else start
            new += old[place:start]
            place = start
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            assert old[place] == line[1:]
            new += [line[1:]] if line.startswith(" ") else []
            place += 1
    return new + old[place:]


LINES = st.lists(st.sampled_from("abcdefgh"), max_size=30)


@given(LINES, LINES)
def test_a_diff_leads_from_one_text_to_the_other(old: list[str], new: list[str]) -> None:
    difference = text_diff("\n".join(old), "\n".join(new), ("old", "new"))
    assert (difference == "") is (old == new)
    assert applied(difference, old) == new


def test_a_long_diff_is_small_where_little_changed() -> None:
    old = [f"%n{i} = f(%n{i - 1})" for i in range(50_000)]
    new = list(old)
    moved = [new.pop(place) for place in (40_000, 30_000, 100)]
    new += moved
    difference = text_diff("\n".join(old), "\n".join(new), ("old", "new"))
    changed = [line for line in difference.splitlines()[2:] if line[0] in "+-"]
    assert len(changed) == 2 * len(moved)


def console(**options: object) -> Console:
    return Console(file=io.StringIO(), width=60, **options)  # type: ignore[arg-type]


def printed(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_print_in_colour_says_the_same(step: IterGraphModule) -> None:
    plain, coloured = console(), console(force_terminal=True, color_system="truecolor")
    print_listing(listing_of(step), plain)
    print_listing(listing_of(step), coloured)
    assert printed(plain) == graph_text(step)
    assert "\x1b[" in printed(coloured)
    assert re.sub(r"\x1b\[[\d;]*m", "", printed(coloured)) == graph_text(step)


def test_print_diff_in_colour(step: IterGraphModule) -> None:
    (launch,) = find_nodes(step.graph, is_collective)
    before = compact_text(step)
    launch.next.append(launch)
    difference = graph_diff(before, step)
    coloured = console(force_terminal=True, color_system="truecolor")
    print_diff(difference, coloured)
    assert re.sub(r"\x1b\[[\d;]*m", "", printed(coloured)) == difference
    assert "\x1b[32m+" in printed(coloured) and "\x1b[31m-" in printed(coloured)


class Scaled(nn.Module):
    """Has a constant in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.factor = torch.tensor(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.factor
        return result


def step_of_ranks() -> fx.GraphModule:
    model = Scaled()
    with fake_ranks(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = graphopt.capture(mean_square, model, optimizer, torch.randn(5, 4))
        module = graphopt.IterGraphModule(captured.graph_module)
        pipeline = "remove_copy_from_optimizer -> iter_move_grads_and_optimizers"
        graphopt.PassManager(pipeline).run(module)
    assert module.graph.late
    return module


def forward_alone() -> fx.GraphModule:
    return graphopt.capture(lambda m, x: m(x).tanh(), Scaled(), torch.ones(2, 4)).graph_module


GRAPHS = [step_of_ranks, forward_alone]


def test_a_loaded_graph_knows_what_its_collectives_send(tmp_path: Path) -> None:
    step = step_of_ranks()
    save_graph(step, tmp_path / "step.pt")
    loaded = load_graph(tmp_path / "step.pt")
    sent = [[parameters_of(gm, b) for b in get_all_comm_blocks(gm)] for gm in (step, loaded)]
    assert sent[0] == sent[1] == [("linear.bias",), ("linear.weight",)]


@pytest.mark.parametrize("make", GRAPHS)
def test_show(make: Callable[[], fx.GraphModule], tmp_path: Path) -> None:
    graph, path = make(), tmp_path / "step.pt"
    save_graph(graph, path)
    result = CliRunner().invoke(cli.app, ["show", str(path)])
    assert result.exit_code == 0, result.output
    assert graph_text(graph) in result.output
    assert ("collectives, predicted" in result.output) == bool(get_all_comm_blocks(graph))
    result = CliRunner().invoke(cli.app, ["show", str(path), "--phase", "forward"])
    assert result.output == graph_text(graph, phase="forward")
