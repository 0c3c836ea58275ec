"""Files, folders and environment variables that cannot be used: a typed error that names them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import graphopt
from graphopt.cli import app
from graphopt.manager import enable_graph_optimization_dump
from graphopt.saved import SavedGraphError, load_graph, save_graph
from graphopt.schedule import Timeline
from graphs import training_step


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step.pt"
    save_graph(training_step(1, ranks=None), path)
    return path


@pytest.fixture
def home(without_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder, which is not the current one. No setting is in the environment."""
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def picture() -> Timeline:
    return graphopt.simulate(training_step(1, ranks=None))


# What is read


def unusable(folder: Path, saved: Path) -> Iterator[tuple[str, Path]]:
    """Files that hold no graph, by what is wrong with them."""
    whole = saved.read_bytes()
    for share in range(0, 100, 4):
        yield f"truncated to {share} %", _written(folder, whole[: len(whole) * share // 100])
    for missing in (1, 2, 8, 22, 23, 64):
        yield f"without its last {missing} bytes", _written(folder, whole[:-missing])
    yield "no archive", _written(folder, b"a text file\n")
    yield "not UTF-8", _written(folder, b"\xff\xfe\x80 caf\xe9\n")
    yield "zeros", _written(folder, bytes(4096))
    content = torch.load(saved, weights_only=True)
    without = {key: value for key, value in content.items() if key != "version"}
    for name, other in (
        ("no version", without),
        ("a later version", {**content, "version": 2}),
        ("another version", {**content, "version": "old"}),
        ("no content", {key: value for key, value in content.items() if key != "content"}),
        ("other content", {**content, "content": "[]"}),
        ("content of no JSON", {**content, "content": "{"}),
        ("no tensors", {**content, "tensors": None}),
        ("a list", [1, 2]),
        ("a tensor", torch.zeros(2)),
        ("another format", {"format": "other"}),
    ):
        path = folder / f"{len(list(folder.iterdir()))}.pt"
        torch.save(other, path)
        yield name, path
    below_a_file = _written(folder, whole) / "step.pt"
    for name, path in (
        ("missing", folder / "nothing.pt"),
        ("a folder", folder),
        ("below a file", below_a_file),
        ("a name with a zero", Path("step\0.pt")),
        ("a very long name", folder / ("x" * 300)),
    ):
        yield name, path


def _written(folder: Path, content: bytes) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.pt"
    path.write_bytes(content)
    return path


def test_files_without_a_graph(saved: Path, tmp_path: Path) -> None:
    tried = 0
    for what, path in unusable(tmp_path, saved):
        with pytest.raises(graphopt.GraphOptError) as caught:
            load_graph(path)
        assert isinstance(caught.value, (SavedGraphError, graphopt.FileError)), what
        assert str(path) in str(caught.value), what
        tried += 1
    assert tried > 40


def test_a_missing_file_is_what_python_users_expect(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load_graph(tmp_path / "nothing.pt")
    assert isinstance(caught.value, graphopt.FileError)


COMMANDS = ("show {}", "show good.pt --diff {}", "optimize {} --pipeline none", "lower {} --out o")


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_given_files_without_a_graph(
    words: str, saved: Path, home: Path, tmp_path: Path
) -> None:
    shutil.copy(saved, "good.pt")
    cases = dict(unusable(tmp_path, saved))
    for what in ("truncated to 48 %", "truncated to 0 %", "no version", "a folder", "below a file"):
        path = cases[what]
        result = CliRunner().invoke(app, words.format(path).split())
        assert (result.exit_code, str(path) in result.output) == (2, True), (what, result.output)
        assert isinstance(result.exception, SystemExit)


# What is written

WRITERS: dict[str, Callable[[str], object]] = {
    "save_graph": lambda path: save_graph(training_step(1, ranks=None), path),
    "save_chrome_trace": lambda path: picture().save_chrome_trace(path),
    "to_html": lambda path: picture().to_html(path),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_files_that_cannot_be_written(write: Callable[[str], object], home: Path) -> None:
    Path("file").write_text("")
    Path("folder").mkdir()
    for path in ("file/below", "file/far/below", "folder", "x" * 300):
        with pytest.raises(graphopt.FileError, match=path):
            write(path)


WRITING_COMMANDS = (
    "optimize good.pt --pipeline none --out {}/step.pt",
    "optimize good.pt --pipeline remove_copy_from_optimizer --dump {}",
    "lower good.pt --out {}",
)


@pytest.mark.parametrize("words", WRITING_COMMANDS)
def test_commands_that_cannot_write(words: str, saved: Path, home: Path) -> None:
    shutil.copy(saved, "good.pt")
    Path("file").write_text("")
    for path in ("file", "file/below"):
        result = CliRunner().invoke(app, words.format(path).split())
        assert (result.exit_code, "file" in result.output) == (2, True), result.output
        assert isinstance(result.exception, SystemExit)


# The home folder


def test_the_home_folder(saved: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_DUMP", "")  # so that it is taken back
    graph = training_step(1, ranks=None)
    save_graph(graph, "~/graphs/step.pt")
    load_graph("~/graphs/step.pt")
    picture().save_chrome_trace("~/trace.json")
    picture().to_html("~/trace.html")
    assert enable_graph_optimization_dump("~/enabled") == home / "enabled"
    monkeypatch.setenv("GRAPHOPT_DUMP", "~/variable")
    graphopt.PassManager("remove_copy_from_optimizer").run(graph)
    other = training_step(1, ranks=None)
    graphopt.PassManager("remove_copy_from_optimizer", dump_dir="~/argument").run(other)
    written = {path.name for path in home.iterdir()}
    assert written >= {"graphs", "trace.json", "trace.html", "enabled", "variable", "argument"}
    assert list(Path().iterdir()) == []


def test_the_home_folder_in_commands(saved: Path, home: Path) -> None:
    shutil.copy(saved, home / "step.pt")
    (home / "own.py").write_text("")
    for words in (
        "show ~/step.pt",
        "show ~/step.pt --diff ~/step.pt",
        "optimize ~/step.pt --pipeline none --out ~/out/step.pt --import ~/own.py",
        "optimize ~/step.pt --pipeline remove_copy_from_optimizer --dump ~/dump",
        "passes --import ~/own.py",
    ):
        result = CliRunner().invoke(app, words.split())
        assert result.exit_code == 0, result.output
    assert {"out", "dump"} <= {path.name for path in home.iterdir()}
    assert list(Path().iterdir()) == []


def test_a_home_folder_of_nobody(home: Path) -> None:
    with pytest.raises(graphopt.FileError, match="~nobody_of_this_name"):
        load_graph("~nobody_of_this_name/step.pt")
    with pytest.raises(graphopt.PipelineSyntaxError, match="~nobody_of_this_name"):
        graphopt.PassManager("remove_copy_from_optimizer", dump_dir="~nobody_of_this_name/x")


# The environment

VARIABLES = {
    "GRAPHOPT_DUMP": ["file", "file/below", "file/far/below", "~nobody_of_this_name/x"],
    "GRAPHOPT_VERIFY": ["maybe", "1", "Off", " "],
    "GRAPHOPT_STOP_AFTER": ["-1", "two", "1.5", "9" * 5000, " "],
    "GRAPHOPT_DISABLE": ["nothing", "remove_copy_from_optimizer,nothing", "*"],
}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_that_cannot_be_used(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said where the step is declared: training has not begun yet."""
    Path("file").write_text("")
    for value in VARIABLES[name]:
        monkeypatch.setenv(name, value)
        with pytest.raises(graphopt.PipelineSyntaxError, match=name) as caught:
            graphopt.compile(print)
        if len(value) < 100:
            assert value.split(",")[-1] in str(caught.value)


def test_empty_variables_are_not_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    graphopt.compile(print)


def test_a_dump_that_fails_on_the_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full by then. Training goes on where the environment asked for the dump, and
    a program that asks for it itself learns that there is none."""
    monkeypatch.setenv("GRAPHOPT_DUMP", "dump")
    manager = graphopt.PassManager("remove_copy_from_optimizer")
    Path("dump").write_text("in the way")
    graph = training_step(1, ranks=None)
    with pytest.warns(RuntimeWarning, match="GRAPHOPT_DUMP: dump"):
        records = manager.run(graph)
    assert graphopt.applied_passes(graph) == [record.name for record in records]
    Path("dump").unlink()
    required = graphopt.PassManager("remove_copy_from_optimizer", dump_dir="dump")
    Path("dump").write_text("in the way")
    with pytest.raises(graphopt.FileError, match="dump"):
        required.run(training_step(1, ranks=None))


# Pipelines without a pass


@pytest.mark.parametrize("words", [["optimize", "step.pt"], ["demo"]])
@pytest.mark.parametrize("text", ["", "  "])
def test_no_pass_at_all(words: list[str], text: str, home: Path) -> None:
    result = CliRunner().invoke(app, [*words, "--pipeline", text])
    assert result.exit_code == 2
    assert "--pipeline" in result.output and "names no pass" in result.output
