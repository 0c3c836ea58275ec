"""The uuid of a pipeline is another one whenever the pipeline may do something else."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import fx

from graphopt import PassManager, PassRegistry, graph_optimization_pass
from graphopt.hooks import inductor_pass
from graphopt.manager import Pass, PassCallback
from toy_passes import declare

PASS = """
from graphopt import PassRegistry, graph_optimization_pass
import helpers_of_{name}

LIMIT = 3
KINDS = {{"a", "b"}}

def used(node):
    return node.op in {{"placeholder", "output", "call_function"}} and LIMIT

@graph_optimization_pass(registry=PassRegistry())
def the_pass(gm):
    from inner_of_{name} import value
    for node in gm.graph.nodes:
        used(node)
        helpers_of_{name}.helper(node)
"""


class Files:
    """A module `name` that declares a pass, and two modules that the pass uses."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.write(name, PASS.format(name=name))
        self.write(f"helpers_of_{name}", "def helper(node):\n    return node.name\n")
        self.write(f"inner_of_{name}", "value = 1\n")

    def write(self, module: str, text: str) -> None:
        (self.folder / f"{module}.py").write_text(text)
        sys.modules.pop(module, None)
        importlib.invalidate_caches()

    def replace(self, module: str, old: str, new: str) -> None:
        text = (self.folder / f"{module}.py").read_text()
        assert old in text
        self.write(module, text.replace(old, new))

    def module(self) -> ModuleType:
        sys.modules.pop(self.name, None)
        return importlib.import_module(self.name)

    def uuid(self) -> Any:
        return uuid(self.module().the_pass)


def uuid(pipeline: Any, **options: Any) -> Any:
    return inductor_pass(pipeline, **options).uuid()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Files:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change within one second
    return Files(tmp_path, f"module_{abs(hash(request.node.name))}")


def test_the_same_code_has_the_same_uuid(files: Files) -> None:
    first = files.uuid()
    assert isinstance(first, str)
    assert files.uuid() == first


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("{}", "LIMIT = 3", "LIMIT = 4"),
        ("{}", "return node.op in", "return node.op not in"),
        ("{}", "        used(node)", "        used(node), 1"),
        ("{}", "def the_pass(gm):", "def the_pass(gm, size: int = 1):"),
        ("helpers_of_{}", "node.name", "node.target"),
        ("inner_of_{}", "value = 1", "value = 2"),
    ],
)
def test_other_code_has_another_uuid(files: Files, module: str, old: str, new: str) -> None:
    before = files.uuid()
    files.replace(module.format(files.name), old, new)
    assert isinstance(files.uuid(), str)
    assert files.uuid() != before


def test_what_an_import_needs_counts_as_well(files: Files) -> None:
    files.write(f"below_{files.name}", "x = 1\n")
    files.write(f"helpers_of_{files.name}", f"from below_{files.name} import x\nhelper = print\n")
    before = files.uuid()
    files.write(f"below_{files.name}", "x = 2\n")
    assert files.uuid() != before


def test_packages_are_followed_through_relative_imports(tmp_path: Path, files: Files) -> None:
    package = files.folder / f"package_{files.name}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("y = 1\n")
    (package / "passes.py").write_text(
        "from graphopt import PassRegistry, graph_optimization_pass\n"
        "@graph_optimization_pass(registry=PassRegistry())\n"
        "def the_pass(gm):\n"
        "    from .deep import y\n"
    )
    pass_ = importlib.import_module(f"{package.name}.passes").the_pass
    before = uuid(pass_)
    (package / "deep.py").write_text("y = 2\n")
    assert isinstance(before, str)
    assert uuid(pass_) != before


def test_code_that_is_loaded_counts_and_not_only_its_file(files: Files) -> None:
    """A process that goes on after an edit must not store its results under the new text."""
    module = files.module()
    path = files.folder / f"{files.name}.py"
    path.write_text(path.read_text().replace("LIMIT = 3", "LIMIT = 4"))
    stale = uuid(module.the_pass)
    assert files.uuid() != stale


def test_values_that_are_read_from_modules_count(files: Files) -> None:
    module = files.module()
    before = uuid(module.the_pass)
    module.LIMIT = 5
    assert uuid(module.the_pass) != before


def test_functions_that_are_exchanged_count(files: Files) -> None:
    module = files.module()
    before = uuid(module.the_pass)
    sys.modules[f"helpers_of_{files.name}"].helper = lambda node: node.op
    assert uuid(module.the_pass) != before


@pytest.mark.parametrize(
    "statement",
    [
        "SEEN.append(gm)",
        "SEEN.extend([1])",
        "SEEN[0] = 1",
        "[SEEN.append(n) for n in gm.graph.nodes]",
    ],
)
def test_a_pass_that_changes_a_list_of_its_module_is_not_cached(
    files: Files, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    files.replace(files.name, "LIMIT = 3", "LIMIT = 3\nSEEN = [0]")
    files.replace(files.name, "        used(node)", f"        used(node)\n        {statement}")
    with caplog.at_level("INFO", "graphopt"):
        assert files.uuid() is None
    assert "the_pass changes the list SEEN of its module" in caplog.text


@pytest.mark.parametrize(
    ("declared", "statement", "what"),
    [
        ("COUNT = 0", "global COUNT; COUNT += 1", "COUNT"),
        ("COUNT = {'n': 0}", "COUNT['n'] += 1", "the dict COUNT"),
        ("COUNT = set()", "COUNT.add(node)", "the set COUNT"),
        ("COUNT = {}", "COUNT.update(n=1)", "the dict COUNT"),
    ],
)
def test_a_pass_that_counts_is_not_cached(
    files: Files, caplog: pytest.LogCaptureFixture, declared: str, statement: str, what: str
) -> None:
    """Its uuid would change with each run, or stay while it becomes another pass."""
    files.replace(files.name, "LIMIT = 3", f"LIMIT = 3\n{declared}")
    files.replace(files.name, "        used(node)", f"        used(node)\n        {statement}")
    with caplog.at_level("INFO", "graphopt"):
        assert files.uuid() is None
    assert f"the_pass changes {what} of its module" in caplog.text


def test_a_constant_key_is_not_a_change(files: Files) -> None:
    files.replace(files.name, "LIMIT = 3", "LIMIT = 3\nKEY = 'mark'")
    files.replace(files.name, "        used(node)", "        used(node); node.meta[KEY] = 1")
    assert isinstance(files.uuid(), str)


def test_a_list_that_is_only_read_counts_by_its_values(files: Files) -> None:
    files.replace(files.name, "LIMIT = 3", "LIMIT = 3\nSEEN = [0]")
    files.replace(files.name, "        used(node)", "        used(node), SEEN[0], len(SEEN)")
    module = files.module()
    before = uuid(module.the_pass)
    assert isinstance(before, str) and uuid(module.the_pass) == before
    module.SEEN.append(1)
    assert uuid(module.the_pass) != before


def closing_over(value: Any) -> Pass:
    @graph_optimization_pass(registry=PassRegistry())
    def made(gm: fx.GraphModule) -> None:
        print(value)

    return made


def one() -> int:
    return 1


def two() -> int:
    return 2


def test_values_of_closures_count() -> None:
    assert uuid(closing_over(1)) == uuid(closing_over(1)) != uuid(closing_over(2))
    assert uuid(closing_over(one)) == uuid(closing_over(one)) != uuid(closing_over(two))
    assert uuid(closing_over([1, "a"])) != uuid(closing_over([1, "b"]))


@pytest.mark.parametrize("value", [object(), {"a": 1}, int])
def test_what_cannot_be_known_is_not_cached(value: Any) -> None:
    assert uuid(closing_over(value)) is None


@pytest.mark.parametrize("named", [{"__name__": "__main__"}, {}])
def test_code_without_a_file_is_not_cached(named: dict[str, Any]) -> None:
    namespace: dict[str, Any] = {"registry": PassRegistry(), **named}
    exec(
        "from graphopt import graph_optimization_pass\n"
        "@graph_optimization_pass(registry=registry)\n"
        "def typed(gm): helper(gm)\n"
        "def helper(gm): ...\n",
        namespace,
    )
    assert uuid(namespace["typed"]) is None


def optioned(registry: PassRegistry | None = None, **declared: Any) -> Pass:
    @graph_optimization_pass(registry=registry or PassRegistry(), **declared)
    def with_option(gm: fx.GraphModule, size: Any = 1) -> None: ...

    return with_option


def test_options_count() -> None:
    pass_ = optioned()
    default = uuid(pass_)
    assert uuid([(pass_, {"size": 1})]) == default
    assert uuid([(pass_, {"size": 2})]) != default
    assert uuid([(pass_, {"size": 1.0})]) != default
    assert uuid([(pass_, {"size": object()})]) is None


def test_the_declaration_counts() -> None:
    registry = PassRegistry()
    first = declare(registry, "first")
    plain = uuid(optioned())
    after = optioned(registry, apply_after=[first])
    assert uuid(PassManager([after], registry=registry)) != plain
    assert uuid(optioned(changes_numerics=True)) != plain
    assert uuid(optioned(repeatable=True)) != plain
    assert uuid(optioned(name="renamed")) != plain


def test_settings_count() -> None:
    pass_ = optioned()
    assert len({uuid(pass_), uuid(pass_, verify="off"), uuid(pass_, on_error="skip")}) == 3


def test_what_does_not_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = PassRegistry()
    first, second = optioned(registry), declare(registry, "second")
    both = PassManager([first, second], registry=registry, disable=[second])
    assert uuid(both) == uuid(first)
    assert uuid(PassManager([first, second], stop_after=1)) == uuid(first)
    whole = declare(registry, "whole", whole_step=True)
    assert uuid(PassManager([first, whole], registry=registry)) == uuid(first)
    assert uuid(PassManager([first, second])) != uuid(first)


def test_who_watches_sees_passes_run(tmp_path: Path) -> None:
    pass_ = optioned()
    assert uuid(PassManager([pass_], dump_dir=tmp_path)) is None
    assert uuid(PassManager([pass_], callbacks=[PassCallback()])) is None


def test_shipped_passes_have_one() -> None:
    fusion = uuid("comm_fusion_with_concat")
    assert uuid("comm_fusion_with_concat(bucket_size_mb=25)") == fusion
    assert uuid("comm_fusion_with_concat(bucket_size_mb=5)") != fusion
    assert isinstance(uuid("default"), str)


SCRIPT = """
import {name}
from graphopt.hooks import inductor_pass
print(inductor_pass({name}.the_pass).uuid())
"""


def test_processes_agree(files: Files) -> None:
    """This one, and a new one whose strings have other hashes."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(name=files.name)],
        cwd=files.folder,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert len(found) == 64
    assert found == files.uuid()
