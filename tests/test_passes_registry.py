"""Passes by name, and the order that their constraints allow."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.errors import PassDefinitionError, PipelineSyntaxError
from graphopt.manager import PassRegistry, default_registry
from toy_passes import declare


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
