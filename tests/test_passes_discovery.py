"""Finding passes: in the package, and in other packages that offer some."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path

import networkx as nx
import pytest

import graphopt.passes
from graphopt.manager import PassRegistry, default_registry, discovery

ISOLATED = PassRegistry()


def shipped_passes() -> list[str]:
    discovery.install()
    registry = default_registry()
    return [
        name
        for name in registry.names()
        if registry.get(name).module.startswith("graphopt.passes.")
    ]


def test_every_pass_is_an_attribute_of_the_package() -> None:
    modules = {found.name for found in pkgutil.iter_modules(graphopt.passes.__path__)}
    shipped = shipped_passes()
    assert shipped and sorted(dir(graphopt.passes)) == shipped
    for name in shipped:
        assert getattr(graphopt.passes, name) is default_registry().get(name)
        assert name not in modules, "a module of that name would hide the pass"
    with pytest.raises(AttributeError, match="no attribute 'no_such_pass'"):
        importlib.import_module("graphopt.passes").no_such_pass  # noqa: B018


def test_shipped_passes_have_an_order() -> None:
    shipped = shipped_passes()
    registry = default_registry()
    assert nx.is_directed_acyclic_graph(registry.graph)
    assert sorted(registry.order(registry.names())) == registry.names()
    for name in shipped:
        assert registry.get(name).doc


PLUGIN = """
from graphopt.manager import graph_optimization_pass

@graph_optimization_pass(apply_after=["schedule_comm_wait"])
def from_{name}(gm):
    "A pass of another package."
"""


def install_package(folder: Path, name: str, code: str, value: str) -> None:
    """What an installer writes: a module, and its metadata with an entry point."""
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[graphopt.passes]\n{name} = {value}\n")


def test_passes_of_other_packages_are_found(tmp_path: Path) -> None:
    install_package(tmp_path, "whole", PLUGIN.format(name="whole"), "whole")
    install_package(tmp_path, "single", PLUGIN.format(name="single"), "single:from_single")
    install_package(tmp_path, "broken", "raise RuntimeError('too old')", "broken")
    install_package(tmp_path, "absent", "", "absent:nothing")
    taken = PLUGIN.format(name="x").replace("def from_x", "def schedule_comm_wait")
    install_package(tmp_path, "taken", taken.replace('["schedule_comm_wait"]', "[]"), "taken")
    program = """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        from graphopt.manager import discovery
        from graphopt.manager import default_registry, parse_pipeline
        discovery.install()
        discovery.install()
        assert "from_whole" not in sys.modules
        print(parse_pipeline("from_whole -> from_single"))
        print(default_registry().get("schedule_comm_wait").module)
    """
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
         + textwrap.dedent(program)],
        cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    warnings = sorted(line for line in lines if line.startswith("WARNING"))
    assert [line.split()[3] for line in warnings] == ["absent", "broken", "taken"]
    assert "entry point broken = broken raised RuntimeError: too old" in warnings[1]
    assert "two passes are named 'schedule_comm_wait'" in warnings[2]
    assert lines[-2:] == ["from_whole -> from_single", "graphopt.passes.wait_scheduling"]


def test_a_plugin_that_fails_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_package(tmp_path, "graphopt_broken_plugin", "import no_such_module_at_all", "graphopt_broken_plugin")  # noqa: E501  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING, "graphopt"):
        discovery.load()
    (message,) = caplog.messages
    assert message.startswith("passes of graphopt_broken_plugin are left out")
    assert "ModuleNotFoundError" in message
