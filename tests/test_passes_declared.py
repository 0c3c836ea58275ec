"""Declaring, naming and finding passes, and the order that their constraints allow."""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import pickle
import pkgutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import graphopt.passes
from graphopt.errors import PassDefinitionError, PipelineSyntaxError
from graphopt.manager import PassRegistry, default_registry, discovery, graph_optimization_pass
from toy_passes import declare

ISOLATED = PassRegistry()


@graph_optimization_pass(["earlier"], ["first"], registry=ISOLATED, repeatable=True)
def documented(gm: fx.GraphModule, size: int, names: list[str] | None = None) -> int:
    """What it does.

    How it does it.
    """
    return 0


def test_a_pass_knows_what_was_declared() -> None:
    assert documented.name == documented.__name__ == "documented"
    assert documented.module == __name__
    assert documented.prerequisites == ("earlier",)
    assert documented.apply_after == ("first",)
    assert documented.repeatable and not documented.changes_numerics
    assert documented.doc == "What it does."
    assert documented.__doc__ is not None and "How it does it." in documented.__doc__
    file, _, line = documented.source.rpartition(":")
    assert file == __file__
    assert "documented" in "".join(
        Path(file).read_text().splitlines()[int(line) - 1 : int(line) + 1]
    )
    assert [str(option) for option in documented.options.values()] == [
        "size: int",
        "names: list[str] | None = None",
    ]
    assert documented.options["size"].required


def test_a_pass_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(documented)) is documented
    assert copy.deepcopy(documented) is documented


@pytest.mark.parametrize(
    ("function", "message"),
    [(lambda: None, "use name="), (3, "a pass is a function"), (nn.ReLU(), "a pass is a function")],
)
def test_what_cannot_be_a_pass(function: Any, message: str) -> None:
    with pytest.raises(PassDefinitionError, match=message):
        graph_optimization_pass(registry=PassRegistry())(function)


def no_graph() -> None: ...


def keywords_only(*, gm: fx.GraphModule) -> None: ...


def any_positions(gm: fx.GraphModule, *sizes: int) -> None: ...


def any_names(gm: fx.GraphModule, **options: int) -> None: ...


def by_position(gm: fx.GraphModule, size: int, /) -> None: ...


def wrong_default(gm: fx.GraphModule, size: int = None) -> None: ...  # type: ignore[assignment] # noqa: RUF013


def takes_a_graph(graph: fx.Graph) -> None: ...


async def coroutine(gm: fx.GraphModule) -> None: ...


def generator(gm: fx.GraphModule) -> Any:
    yield


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_graph, "takes no graph"),
        (keywords_only, "takes no graph"),
        (any_positions, r"takes `\*sizes: 'int'`"),
        (any_names, r"takes `\*\*options: 'int'`"),
        (by_position, "give each option a name"),
        (wrong_default, "is annotated int, which its default None is not"),
        (takes_a_graph, "is annotated Graph; a pass takes an fx.GraphModule"),
        (coroutine, "is a coroutine"),
        (generator, "is a generator"),
    ],
)
def test_signatures_that_are_refused(function: Callable[..., Any], message: str) -> None:
    registry = PassRegistry()
    with pytest.raises(PassDefinitionError, match=message):
        graph_optimization_pass(registry=registry)(function)
    assert registry.names() == []


def test_parentheses_are_missing() -> None:
    with pytest.raises(PassDefinitionError, match=r"@graph_optimization_pass\(\)\n.*by_position"):
        graph_optimization_pass(by_position)  # type: ignore[arg-type]


def test_decorated_twice() -> None:
    with pytest.raises(PassDefinitionError, match="decorated twice"):
        graph_optimization_pass(registry=PassRegistry())(documented)


@pytest.mark.parametrize("constraint", ["fuse", documented, 3, [3], [None]])
@pytest.mark.parametrize("what", ["prerequisites", "apply_after"])
def test_constraints_are_lists_of_passes(what: str, constraint: Any) -> None:
    with pytest.raises(PassDefinitionError, match=what):
        declare(PassRegistry(), "one", **{what: constraint})


@pytest.mark.parametrize("name", ["", "two words", "1st", "class", "a-b", 3])
def test_names_that_no_text_could_hold(name: Any) -> None:
    with pytest.raises(PassDefinitionError, match="cannot name a pass"):
        declare(PassRegistry(), "one", name=name)


def test_options_of_many_types() -> None:
    registry = PassRegistry()

    @graph_optimization_pass(registry=registry)
    def typed(
        gm: Any,
        mode: Literal["fast", "slow"] = "fast",
        scale: float = 1,
        pair: tuple[int, str] = (1, "a"),
        node: fx.Node | None = None,
        unread: Missing = None,  # type: ignore[name-defined] # noqa: F821
        bare=3,  # type: ignore[no-untyped-def]
    ) -> None: ...

    assert {o.name: o.type_name for o in typed.options.values()} == {
        "mode": "Literal['fast', 'slow']",
        "scale": "float",
        "pair": "tuple[int, str]",
        "node": "Node | None",
        "unread": "any",
        "bare": "any",
    }


def test_the_same_function_replaces_itself() -> None:
    """As when a notebook cell runs again, with other constraints."""
    registry = PassRegistry()
    first = declare(registry, "one", ["typo"])
    second = declare(registry, "one", ["two"])
    assert registry.get("one") is second is not first
    assert set(registry.graph.edges) == {("two", "one")}


def test_two_passes_of_one_name() -> None:
    registry = PassRegistry()
    first = declare(registry, "one", name="shared")
    with pytest.raises(PassDefinitionError) as caught:
        declare(registry, "other", name="shared")
    source = first.source
    assert str(caught.value) == (
        f"two passes are named 'shared': one ({source}) and other ({source}); give one of them"
        " another name="
    )
    assert registry.get("shared") is first


def test_a_circle_of_constraints() -> None:
    registry = PassRegistry()
    declare(registry, "one", ["three"])
    declare(registry, "two", ["one"])
    with pytest.raises(PassDefinitionError) as caught:
        declare(registry, "three", (), ["two"])
    assert "three -> one -> two -> three" in str(caught.value)
    assert registry.names() == ["one", "two"]
    with pytest.raises(PassDefinitionError, match="after itself"):
        declare(registry, "four", (), ["four"])


def test_unknown_names_have_a_suggestion() -> None:
    registry = PassRegistry()
    with pytest.raises(PipelineSyntaxError, match="there is no pass 'one'; there are none"):
        registry.get("one")
    declare(registry, "fuse_all")
    declare(registry, "delay", ["fuse_al"])
    with pytest.raises(PipelineSyntaxError, match="did you mean 'fuse_all'"):
        registry.get("fuse_lal")
    with pytest.raises(PassDefinitionError, match="names 'fuse_al', which is not a pass"):
        registry.order(["delay"])
    assert issubclass(PipelineSyntaxError, ValueError) and issubclass(
        PassDefinitionError, TypeError
    )


def test_the_graph_of_constraints_is_a_copy() -> None:
    registry = PassRegistry()
    declare(registry, "one")
    declare(registry, "two", ["one"])
    declare(registry, "three", (), ["one", "two"])
    graph = registry.graph
    assert isinstance(graph, nx.DiGraph)
    assert dict(graph.edges) == {
        ("one", "two"): {"kind": "prerequisite"},
        ("one", "three"): {"kind": "apply_after"},
        ("two", "three"): {"kind": "apply_after"},
    }
    graph.clear()
    assert len(registry.graph) == 3


@st.composite
def constrained(draw: st.DrawFn) -> tuple[PassRegistry, dict[str, set[str]], list[str]]:
    """A registry, what comes before each pass, and some of the passes in any order."""
    registry, before = PassRegistry(), {}
    names = [f"p{i}" for i in range(draw(st.integers(1, 7)))]
    for i, name in enumerate(names):
        earlier = draw(st.lists(st.sampled_from(names[:i]), unique=True)) if i else []
        split = draw(st.integers(0, len(earlier)))
        declare(registry, name, earlier[:split], earlier[split:])
        before[name] = set(earlier)
    return registry, before, draw(st.lists(st.sampled_from(names), unique=True))


@given(constrained())
def test_order_is_valid_and_stable(
    case: tuple[PassRegistry, dict[str, set[str]], list[str]],
) -> None:
    registry, before, names = case
    order = registry.order(names)
    assert sorted(order) == sorted(names)

    def valid(candidate: list[str]) -> bool:
        return not any(b in before[a] for a, b in itertools.combinations(candidate, 2))

    assert valid(order)
    assert registry.order(order) == order
    if valid(names):
        assert order == names


def test_loaders_run_once_and_when_asked() -> None:
    registry, calls = PassRegistry(), []

    def load() -> None:
        calls.append(1)
        assert registry.names() == []
        declare(registry, "one")

    registry.add_loader(load)
    assert calls == []
    assert registry.names() == registry.names() == ["one"]
    assert calls == [1]


def test_a_loader_that_fails_runs_again() -> None:
    registry, calls = PassRegistry(), []

    def load() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("not now")

    registry.add_loader(load)
    with pytest.raises(OSError, match="not now"):
        registry.names()
    assert registry.names() == []


def test_isolated_registries_know_only_their_own() -> None:
    registry = PassRegistry()
    declare(registry, "one_of_this_test")
    assert registry.names() == ["one_of_this_test"]
    assert "one_of_this_test" not in default_registry().names()


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
