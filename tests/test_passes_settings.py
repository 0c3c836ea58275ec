"""Settings of a manager and the environment, callbacks, the log, dumps."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from torch import fx

import graphopt
from graphopt.errors import PassOrderError, PipelineSyntaxError
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import (
    PassCallback,
    PassContext,
    PassManager,
    PassRegistry,
    applied_passes,
    enable_graph_optimization_dump,
)
from graphs import training_step
from toy_passes import declare, double_negation

pytestmark = pytest.mark.usefixtures("without_settings")


@pytest.fixture
def registry() -> PassRegistry:
    return PassRegistry()


@pytest.fixture
def gm() -> fx.GraphModule:
    return training_step(1, ranks=None)


def test_disable(registry: PassRegistry, gm: fx.GraphModule) -> None:
    one, two = declare(registry, "one"), declare(registry, "two", ["one"])
    records = PassManager("one -> two", registry=registry, disable=["two"]).run(gm)
    assert [record.name for record in records] == applied_passes(gm) == ["one"]
    for disable in (["one"], [one], "one", "one,"):
        manager = PassManager([one, two], registry=registry, disable=disable)
        assert str(manager) == "one -> two"
        with pytest.raises(PassOrderError, match="'one' is disabled: disable 'two' as well"):
            manager.run(training_step(1, ranks=None))
    with pytest.raises(PipelineSyntaxError, match=r"disable names 'tow', .* did you mean 'two'"):
        PassManager("one", registry=registry, disable=["tow"])


def test_stop_after(registry: PassRegistry) -> None:
    for name in ("one", "two", "three"):
        declare(registry, name)
    for count, expected in ((0, []), (1, ["one"]), (2, ["one", "three"]), (9, ["one", "three"])):
        gm = training_step(1, ranks=None)
        PassManager(
            "one -> two -> three", registry=registry, disable=["two"], stop_after=count
        ).run(gm)
        assert applied_passes(gm) == expected


def test_settings_from_the_environment(
    registry: PassRegistry, gm: fx.GraphModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = declare(registry, "one"), declare(registry, "two")
    before = PassManager([one, two], registry=registry)
    monkeypatch.setenv("GRAPHOPT_DISABLE", "two")
    monkeypatch.setenv("GRAPHOPT_DUMP", str(tmp_path / "dump"))
    after = PassManager([two, one], registry=registry, disable=["one"])
    assert two(gm).skipped and "skipped" in str(two(gm))
    one(gm)
    assert applied_passes(gm) == ["one"]
    assert (tmp_path / "dump" / "after_one.txt").exists()
    monkeypatch.setenv("GRAPHOPT_STOP_AFTER", "0")
    for manager, expected in ((before, ["one", "two"]), (after, ["two"])):
        graph = training_step(1, ranks=None)
        manager.run(graph)
        assert applied_passes(graph) == expected, "settings are read when a manager is made"
    assert PassManager([one], registry=registry).run(training_step(1, ranks=None)) == []


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GRAPHOPT_VERIFY", "strict", "GRAPHOPT_VERIFY='strict': one of off, dependencies"),
        ("GRAPHOPT_STOP_AFTER", "-1", "GRAPHOPT_STOP_AFTER='-1': a number of passes is expected"),
        ("GRAPHOPT_STOP_AFTER", "two", "GRAPHOPT_STOP_AFTER='two'"),
        ("GRAPHOPT_DISABLE", "one,tow", "GRAPHOPT_DISABLE names 'tow', .* did you mean 'two'"),
        ("GRAPHOPT_DUMP", __file__, "GRAPHOPT_DUMP=.*: this is a file, not a folder"),
    ],
)
def test_errors_name_the_variable(
    registry: PassRegistry, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    declare(registry, "two")
    one = declare(registry, "one")
    monkeypatch.setenv(variable, value)
    with pytest.raises(PipelineSyntaxError, match=message):
        PassManager([one], registry=registry)
    monkeypatch.setenv(variable, "")
    PassManager([one], registry=registry)


@pytest.mark.parametrize(
    "settings",
    [
        {"verify": "some"},
        {"stop_after": -1},
        {"stop_after": True},
        {"stop_after": 1.0},
        {"dump_dir": 3},
    ],
)
def test_wrong_settings(registry: PassRegistry, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(PipelineSyntaxError, match=f"{name}="):
        PassManager([], registry=registry, **settings)


def test_one_line_in_the_log_for_each_pass(
    registry: PassRegistry, gm: fx.GraphModule, caplog: pytest.LogCaptureFixture
) -> None:
    double_negation(registry)
    declare(registry, "one")
    with caplog.at_level(logging.INFO, "graphopt"):
        records = PassManager("one -> negate_twice", registry=registry).run(gm)
    assert caplog.messages == [str(record) for record in records]
    assert "one(size=1): no change in" in caplog.messages[0]
    assert "negate_twice(target='aten::gelu'): 1 change in" in caplog.messages[1]


@pytest.mark.parametrize("level", [None, "equivalence", "dependencies", "off"])
def test_no_level_warns(registry: PassRegistry, level: str | None) -> None:
    """A warning is an error in these tests."""
    PassManager([], registry=registry, verify=level)
    graphopt.compile(print, verify=level)


class Noting(PassCallback):
    """Notes what it is called with."""

    def __init__(self, name: str, notes: list[tuple[str, ...]]) -> None:
        self.name, self.notes = name, notes

    def before_pass(self, context: PassContext) -> None:
        self.notes.append((self.name, "before", context.pass_.name))

    def after_pass(self, context: PassContext) -> None:
        seconds = context.record.seconds
        assert seconds > 0 and applied_passes(context.gm)[-1] == context.pass_.name
        self.notes.append((self.name, "after", context.pass_.name))

    def failed(self, context: PassContext, error: BaseException) -> None:
        assert str(context.gm.graph) == str(context.before.graph)
        self.notes.append((self.name, "failed", context.pass_.name, type(error).__name__))


def test_callbacks(registry: PassRegistry, gm: fx.GraphModule) -> None:
    notes: list[tuple[str, ...]] = []
    declare(registry, "one")
    negate = double_negation(registry)
    manager = PassManager(
        "one -> negate_twice",
        registry=registry,
        callbacks=[Noting("outer", notes), Noting("inner", notes)],
    )
    manager.run(gm)
    one_pass = [("outer", "before"), ("inner", "before"), ("inner", "after"), ("outer", "after")]
    assert notes == [(*n, "one") for n in one_pass] + [(*n, "negate_twice") for n in one_pass]
    assert negate.name == "negate_twice"


def test_a_callback_that_raises_ends_the_run(registry: PassRegistry, gm: fx.GraphModule) -> None:
    class Refusing(PassCallback):
        def after_pass(self, context: PassContext) -> None:
            if context.record.changed:
                raise ZeroDivisionError("no changes, please")

    declare(registry, "one")
    double_negation(registry)
    text = str(gm.graph)
    notes: list[tuple[str, ...]] = []
    callbacks = [Noting("noting", notes), Refusing()]
    manager = PassManager("one -> negate_twice", registry=registry, callbacks=callbacks)
    with pytest.raises(ZeroDivisionError, match="no changes, please"):
        manager.run(gm)
    assert applied_passes(gm) == ["one"] and str(gm.graph) == text
    assert notes[-1] == ("noting", "failed", "negate_twice", "ZeroDivisionError")


def test_dumps(registry: PassRegistry, gm: fx.GraphModule, tmp_path: Path) -> None:
    again = declare(registry, "again", repeatable=True)
    negate = double_negation(registry)
    PassManager([again, negate, again], registry=registry, dump_dir=tmp_path / "made").run(gm)
    files = {path.name: path.read_text() for path in (tmp_path / "made").iterdir()}
    stems = ("after_again", "after_again_2", "after_negate_twice")
    assert sorted(files) == sorted(f"{stem}.{end}" for stem in stems for end in ("diff", "txt"))
    assert "neg" in files["after_negate_twice.txt"]
    difference = files["after_negate_twice.diff"]
    assert "--- before negate_twice" in difference and "+++ after negate_twice" in difference
    assert sum("neg" in line for line in difference.splitlines() if line[0] == "+") >= 2
    assert files["after_again.diff"] == files["after_again_2.diff"] == ""


def test_dumps_of_what_runs(registry: PassRegistry, gm: fx.GraphModule, tmp_path: Path) -> None:
    one = declare(registry, "one")
    PassManager([one], registry=registry, dump_dir=tmp_path).run(IterGraphModule(gm))
    names = {path.name for path in tmp_path.iterdir()}
    parts = {f"after_one_{part}.txt" for part in ("setup", "main", "drain", "cleanup")}
    assert names == {"after_one.txt", "after_one.diff", *parts}


def test_enable_dumps(
    registry: PassRegistry, gm: fx.GraphModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHOPT_DUMP", "")
    one = declare(registry, "one", repeatable=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    temporary = enable_graph_optimization_dump()
    assert temporary.is_dir() and temporary.parent == tmp_path
    one(gm)
    assert (temporary / "after_one.txt").is_file()
    chosen = enable_graph_optimization_dump(tmp_path / "a" / "b")
    assert chosen == tmp_path / "a" / "b" and os.environ["GRAPHOPT_DUMP"] == str(chosen)
    one(gm)
    assert (chosen / "after_one.txt").is_file()
    with pytest.raises(PipelineSyntaxError, match="this is a file"):
        enable_graph_optimization_dump(__file__)
