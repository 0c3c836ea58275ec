"""The page of `graphopt view`: whole, safe, small to draw, in a real browser; notebooks; DOT."""

from __future__ import annotations

import copy
import html
import json
import pickle
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from typer.testing import CliRunner

import graphopt
from graphopt import cli
from graphopt.graph_utils import call_function_with_meta, get_output
from graphopt.manager import records_of
from graphopt.saved import load_description, load_graph, save_graph
from graphopt.testing import fake_ranks
from graphopt.viewing import trace_page, view_page
from graphopt.viewing.graph_contents import contents_of
from steps import mean_square

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"NO BROWSER: none of {', '.join(BROWSERS)} is installed"
)

PROBE = """<script>
const wait = () => new Promise(done => setTimeout(done, 30));
(async () => {
  const out = {}, drawn = id => document.querySelectorAll(`#${id} .row`).length;
  out.tabs = TABS.map(tab => tab[0]);
  byId("close").click(); await wait(); out.folded = shown.length;
  byId("open").click(); await wait(); out.unfolded = shown.length; out.nodes = nodes.length;
  out.most = 0;
  for (let k = 0; k <= 50; k++) {
    list.host.scrollTop = k * list.room.offsetHeight / 50; list.render();
    out.most = Math.max(out.most, drawn("rows"));
  }
  out.end = document.querySelector("#rows .room").lastChild?.textContent;
  const box = byId("search"); box.value = "aten.add"; box.dispatchEvent(new Event("input"));
  out.found = shown.length;
  box.value = "↻"; box.dispatchEvent(new Event("input"));
  out.late = shown.map(line => nodes[lines[line]][N.name]);
  if (shown.length) { pick(lines[shown[0]]); out.lateDetails = byId("details").textContent; }
  if (nodes.length) pick(nodes.length - 1, true);
  await wait();
  out.details = byId("details").textContent;
  out.picked = document.querySelectorAll(".row.picked").length;
  for (const [name] of TABS) { select(name); await wait(); }
  out.sends = drawn("collective-rows"); out.changes = drawn("diff");
  out.injected = window.injected === true;
  document.documentElement.dataset.probe = JSON.stringify(out);
})().catch(error => {
  document.documentElement.dataset.probe = JSON.stringify({error: `${error}`});
});
</script></body>"""


def looked_at(page: str, folder: Path) -> dict[str, Any]:
    """What a browser makes of a page."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", PROBE), encoding="utf-8")
    assert BROWSER is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,800"]
    options += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000"]
    command = [BROWSER, *options, "--dump-dom", path.as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    probe = re.search(r'data-probe="([^"]*)"', found)
    assert probe is not None, found[:500]
    result: dict[str, Any] = json.loads(html.unescape(probe.group(1)))
    assert "error" not in result, result
    return result


@pytest.fixture(scope="module")
def module() -> graphopt.IterGraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fake_ranks(2):
        captured = graphopt.capture(mean_square, model, optimizer, torch.randn(3, 6))
        gm = graphopt.IterGraphModule(captured.graph_module)
        graphopt.PassManager("remove_copy_from_optimizer").run(gm)
    return gm


@pytest.fixture(scope="module")
def large() -> fx.GraphModule:
    """36,000 nodes."""
    gm = graphopt.capture(lambda m, x: m(x) + 1, nn.Identity(), torch.ones(3)).graph_module
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_before(get_output(gm.graph)):
        last = call_function_with_meta(gm.graph, torch.ops.aten.add.Tensor, (node, 1), like=node)
        for number in range(36_000 - 3):
            last = gm.graph.call_function(torch.ops.aten.add.Tensor, (last, 1))
            path = f"layers.{number // 300}"
            last.meta = {**node.meta, "nn_module_stack": {path: (path, nn.Linear)}}
    get_output(gm.graph).args = (([last], [], []),)
    return gm


@needs_browser
def test_page_in_a_browser(module: graphopt.IterGraphModule, tmp_path: Path) -> None:
    title = '</script><script>window.injected = true</script><img src=x onerror="injected=true">'
    diffs = {"remove_copy_from_optimizer": ["-%a </script>", "+%b <b>"]}
    seen = looked_at(view_page(module, title, diffs), tmp_path)
    assert seen["tabs"] == ["graph", "collectives", "passes", "timeline"]
    assert seen["nodes"] == len(module.graph.nodes) - 1
    assert seen["folded"] < seen["nodes"] < seen["unfolded"]
    assert seen["sends"] == 4
    assert seen["changes"] == 4  # the record, an empty line, and two of the difference
    assert seen["picked"] == 1 and "operator" in seen["details"]
    assert not seen["injected"]


@pytest.fixture(scope="module")
def late() -> graphopt.IterGraphModule:
    """A step whose waits and updates run one iteration late."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fake_ranks(2):
        captured = graphopt.capture(mean_square, model, optimizer, torch.randn(3, 6))
        gm = graphopt.IterGraphModule(captured.graph_module)
        graphopt.PassManager(
            "remove_copy_from_optimizer -> comm_fusion_with_concat(bucket_size_mb=0.0001)"
            " -> iter_move_grads_and_optimizers"
        ).run(gm)
    assert gm.graph.late
    return gm


@needs_browser
def test_late_work_in_a_browser(late: graphopt.IterGraphModule, tmp_path: Path) -> None:
    seen = looked_at(view_page(late), tmp_path)
    assert seen["late"] == [node.name for node in late.graph.nodes if node in late.graph.late]
    first = next(node for node in late.graph.nodes if node in late.graph.late)
    assert f"late → before %{late.graph.late[first].name}" in seen["lateDetails"]


@needs_browser
def test_derived_graphs_in_a_browser(late: graphopt.IterGraphModule, tmp_path: Path) -> None:
    """The graphs that run: they have all nodes, and none of them is late."""
    for part in ("setup", "main", "drain"):
        gm = getattr(late, f"{part}_gm")
        seen = looked_at(view_page(gm, part), tmp_path)
        assert seen["nodes"] == sum(node.op != "output" for node in gm.graph.nodes)
        assert seen["late"] == []


def test_what_passes_changed_needs_no_dumps(late: graphopt.IterGraphModule, tmp_path: Path) -> None:
    """Of each pass that changed something, also after the graph was saved and loaded."""
    save_graph(late, tmp_path / "step.pt")
    for gm in (late, load_graph(tmp_path / "step.pt"), load_description(tmp_path / "step.pt")):
        passes = {entry["name"]: entry["diff"] for entry in contents_of(gm, "")["passes"]}
        fused = passes["comm_fusion_with_concat"]
        assert fused[:2] == [
            "--- before comm_fusion_with_concat",
            "+++ after comm_fusion_with_concat",
        ]
        assert any(line.startswith("+") and "aten.cat.default" in line for line in fused)
        moved = passes["iter_move_grads_and_optimizers"]
        assert any(line.startswith("+") and "late → before" in line for line in moved)
        assert passes["remove_copy_from_optimizer"] == []


def test_what_a_pass_changed_stays_as_it_was() -> None:
    """A difference is written out when it is read: later passes do not change it, nor do copies."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fake_ranks(2):
        captured = graphopt.capture(mean_square, model, optimizer, torch.randn(3, 6))
        steps = [graphopt.IterGraphModule(captured.graph_module) for _ in range(2)]
        records = [graphopt.PassManager("comm_fusion_with_concat").run(gm)[0] for gm in steps]
        text = records[0].difference
        graphopt.PassManager(
            "remove_copy_from_optimizer -> schedule_comm_wait -> iter_move_grads_and_optimizers"
        ).run(steps[1])
    assert "aten.cat.default" in text
    assert records[1].difference == text
    assert copy.deepcopy(records[1]).difference == text
    assert pickle.loads(pickle.dumps(records[1])).difference == text


@needs_browser
def test_only_what_is_visible_is_drawn(large: fx.GraphModule, tmp_path: Path) -> None:
    seen = looked_at(view_page(large), tmp_path)
    assert seen["nodes"] == seen["found"] + 1 == 36_000
    assert seen["most"] < 80
    assert f"%{list(large.graph.nodes)[-2].name} " in seen["end"]


@needs_browser
def test_trace_in_a_browser(module: graphopt.IterGraphModule, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    graphopt.simulate(module).save_chrome_trace(path)
    result = CliRunner().invoke(cli.app, ["view", str(path)])
    assert result.exit_code == 0, result.output
    page = path.with_suffix(".html").read_text()
    assert "all_reduce" in page
    assert looked_at(page, tmp_path)["tabs"] == ["timeline"]


def test_page_needs_nothing_else(module: graphopt.IterGraphModule) -> None:
    page = view_page(module, "<&>")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None and "<" not in data.group(1)
    contents = json.loads(data.group(1))
    assert contents["title"] == "<&>"
    assert "backward" in contents["phases"] and "1.1" in contents["modules"]
    assert [entry["name"] for entry in contents["passes"]] == graphopt.applied_passes(module)


def test_command(
    module: graphopt.IterGraphModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(module, "step.pt")
    runner = CliRunner()
    words = "optimize step.pt --pipeline comm_fusion_with_concat --dump dumps --out fused.pt"
    done = runner.invoke(cli.app, words.split())
    assert done.exit_code == 0, done.output
    assert runner.invoke(cli.app, ["view", "fused.pt", "--dumps", "dumps"]).exit_code == 0
    assert "--- before comm_fusion_with_concat" in Path("fused.html").read_text()
    assert runner.invoke(cli.app, ["view", "step.pt", "-o", "a/b.html"]).exit_code == 0
    assert Path("a/b.html").is_file()
    for words, message in (
        (["nothing.pt"], "nothing.pt cannot be read"),
        (["step.pt", "--dumps", "a"], "holds no after_PASS.diff"),
    ):
        result = runner.invoke(cli.app, ["view", *words])
        assert result.exit_code == 2 and message in result.output, result.output


@pytest.mark.parametrize("text", ["", "3", "{}", '{"traceEvents": [{"ph": "X"}]}', "[[]]"])
def test_what_is_no_trace(text: str) -> None:
    with pytest.raises(graphopt.FileError, match="is not a trace"):
        trace_page(text, "trace.json")


def test_notebooks(module: graphopt.IterGraphModule) -> None:
    shown: Iterator[str] = (value._repr_html_() for value in (module, *records_of(module)[:1]))
    graph, record = shown
    assert "<iframe srcdoc=" in graph and "remove_copy_from_optimizer" in record
    step = graphopt.compile(lambda m, x: m(x) + 1, pipeline="schedule_comm_wait")
    assert "not been called" in step._repr_html_()
    model = nn.Identity()  # a graph lives as long as its model
    step(model, torch.ones(2))
    assert "<iframe" in step._repr_html_() and "<table>" in step.report._repr_html_()
    escaped = graphopt.PassRecord("<script>", {"x": "<b>"})._repr_html_()
    assert "<script>" not in escaped and "<b>" not in escaped
