"""Declaring passes: names, options, constraints, and what cannot be a pass."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import fx, nn

from graphopt.errors import PassDefinitionError
from graphopt.manager import PassRegistry, graph_optimization_pass
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
