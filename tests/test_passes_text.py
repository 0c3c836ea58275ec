"""Pipelines as text, and what is said of a text that is none."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from graphopt.errors import PassDefinitionError, PipelineSyntaxError
from graphopt.manager import (
    PassArgumentError,
    PassManager,
    PassRegistry,
    graph_optimization_pass,
    parse_pipeline,
)

REGISTRY = PassRegistry()


@graph_optimization_pass(registry=REGISTRY, repeatable=True)
def fuse(
    gm: fx.GraphModule,
    size_mb: float = 25,
    count: int | None = None,
    label: str = "",
    quick: bool = False,
    sizes: list[int] = [],  # noqa: B006
    spans: tuple[float, ...] = (),
    anything: Any = None,
) -> None:
    """Fuse."""


@graph_optimization_pass(registry=REGISTRY, repeatable=True)
def delay(gm: fx.GraphModule) -> None:
    """Delay."""


def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(s.pass_.name, dict(s.options)) for s in parse_pipeline(text, REGISTRY)]


floats = st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple),
    max_leaves=8,
)
fuses = st.tuples(
    st.just("fuse"),
    st.fixed_dictionaries(
        {},
        optional={
            "size_mb": floats | st.integers(),
            "count": st.none() | st.integers(),
            "label": st.text(),
            "quick": st.booleans(),
            "sizes": st.lists(st.integers()),
            "spans": st.lists(floats).map(tuple),
            "anything": values,
        },
    ),
)
steps = st.lists(fuses | st.just(("delay", {})), max_size=5)


@given(steps)
def test_text_parses_back_to_the_same_pipeline(pipeline: list[tuple[str, dict[str, Any]]]) -> None:
    text = str(PassManager(pipeline, registry=REGISTRY))
    assert parse(text) == pipeline
    assert str(PassManager(text, registry=REGISTRY)) == text


@given(st.text(alphabet="fusedlay ->(),='\"x1[]\n", max_size=40))
def test_any_text_is_a_pipeline_or_a_typed_error(text: str) -> None:
    try:
        pipeline = parse_pipeline(text, REGISTRY)
    except PipelineSyntaxError as error:
        shown = str(error)
    else:
        assert parse_pipeline(str(pipeline), REGISTRY) == pipeline
        return
    assert shown.endswith("^")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n ", []),
        ("delay", [("delay", {})]),
        ("delay()", [("delay", {})]),
        ("delay->fuse", [("delay", {}), ("fuse", {})]),
        ("  delay  ->\n  fuse ( size_mb = 1.5 ,\n  label='a -> b)' )", None),
        ('fuse(label="it\'s \\n")', [("fuse", {"label": "it's \n"})]),
        ("fuse(count=-3, sizes=[1, -2])", [("fuse", {"count": -3, "sizes": [1, -2]})]),
        ("fuse(size_mb=inf)", [("fuse", {"size_mb": math.inf})]),
    ],
)
def test_grammar(text: str, expected: Any) -> None:
    if expected is None:
        expected = [("delay", {}), ("fuse", {"size_mb": 1.5, "label": "a -> b)"})]
    assert parse(text) == expected


def test_nan_is_a_value() -> None:
    ((_, options),) = parse("fuse(size_mb=nan)")
    assert math.isnan(options["size_mb"])
    assert str(parse_pipeline("fuse(size_mb=nan)", REGISTRY)) == "fuse(size_mb=nan)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "delay -> fuze",
            """\
            there is no pass 'fuze'; did you mean 'fuse'?
                delay -> fuze
                         ^""",
        ),
        (
            "delay, fuse",
            """\
            passes are separated by ->
                delay, fuse
                     ^""",
        ),
        (
            "delay -> fuse{size_mb=25}",
            """\
            options stand in round brackets: pass(name=value)
                delay -> fuse{size_mb=25}
                             ^""",
        ),
        (
            "delay ->",
            """\
            a pass is expected here
                delay ->
                        ^""",
        ),
        (
            "delay ->\n  -> fuse",
            """\
            a pass is expected here
                  -> fuse
                  ^""",
        ),
        (
            "fuse(size_mb=25",
            """\
            this bracket is never closed
                fuse(size_mb=25
                    ^""",
        ),
        (
            "fuse(25)",
            """\
            options are given by name: name=value
                fuse(25)
                     ^""",
        ),
        (
            "fuse(label='é', count=ten)",
            """\
            this is not a value: values are Python literals, such as 3, 0.5, 'text', True, None or [1, 2]
                fuse(label='é', count=ten)
                                      ^""",  # noqa: E501
        ),
        (
            "delay -> fuse(count=1 2)",
            """\
            this cannot be read: values are Python literals, such as 3, 0.5, 'text', True, None or [1, 2]
                delay -> fuse(count=1 2)
                                    ^""",  # noqa: E501
        ),
        (
            "fuse(count=1, count=2)",
            """\
            option 'count' is given twice
                fuse(count=1, count=2)
                     ^""",
        ),
        (
            "delay -> fuse(siz_mb=3)",
            """\
            pass 'fuse' has no option 'siz_mb'; did you mean 'size_mb'?
                delay -> fuse(siz_mb=3)
                         ^""",
        ),
        (
            "fuse(count='3')",
            """\
            option 'count' of pass 'fuse' takes int | None, not '3'
                fuse(count='3')
                ^""",
        ),
        (
            "fuse(sizes=[1, 2.5])",
            """\
            option 'sizes' of pass 'fuse' takes list[int], not [1, 2.5]
                fuse(sizes=[1, 2.5])
                ^""",
        ),
        (
            "delay(x=1)",
            """\
            pass 'delay' has no option 'x'; there are none
                delay(x=1)
                ^""",
        ),
    ],
)
def test_errors_show_the_place(text: str, message: str) -> None:
    with pytest.raises(PipelineSyntaxError) as caught:
        parse_pipeline(text, REGISTRY)
    assert str(caught.value) == textwrap.dedent(message)


@pytest.mark.parametrize("text", ["fuse(quick=1)", "fuse(count=True)", "fuse(unknown=1)"])
def test_wrong_options_are_type_errors_too(text: str) -> None:
    with pytest.raises(PassArgumentError) as caught:
        parse_pipeline(text, REGISTRY)
    assert isinstance(caught.value, (TypeError, PipelineSyntaxError))


def test_values_without_a_literal_are_refused() -> None:
    for value in ("__import__('os')", "b'x'", "...", "1j", "{1: 2}", "1 + 1", "-'x'", "f''"):
        with pytest.raises(PipelineSyntaxError):
            parse_pipeline(f"fuse(anything={value})", REGISTRY)


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    with pytest.raises(PipelineSyntaxError):
        parse_pipeline(f"fuse(anything={'[' * 5000}{']' * 5000})", REGISTRY)


def test_unknown_prerequisite_is_an_error_when_parsed() -> None:
    registry = PassRegistry()

    @graph_optimization_pass(["fuse_all"], registry=registry)
    def later(gm: fx.GraphModule) -> None: ...

    @graph_optimization_pass(registry=registry)
    def fuse_al(gm: fx.GraphModule) -> None: ...

    assert later.prerequisites == ("fuse_all",)
    with pytest.raises(
        PassDefinitionError, match=r"names 'fuse_all', which is not a pass; did you mean 'fuse_al'"
    ):
        parse_pipeline("later", registry)


@pytest.mark.parametrize("pipeline", [None, 3, [3], [("fuse",)], [("fuse", 3)], {"fuse": {}}])
def test_what_is_not_a_pipeline(pipeline: Any) -> None:
    with pytest.raises(PipelineSyntaxError, match="pass"):
        PassManager(pipeline, registry=REGISTRY)


def test_a_function_is_not_yet_a_pass() -> None:
    def plain(gm: fx.GraphModule) -> None: ...

    with pytest.raises(PipelineSyntaxError, match="decorate it with @graph_optimization_pass"):
        PassManager([plain], registry=REGISTRY)  # type: ignore[list-item]


def test_ways_to_write_a_pipeline() -> None:
    text = "fuse(count=3) -> delay"
    manager = PassManager(text, registry=REGISTRY)
    for pipeline in (
        [(fuse, {"count": 3}), delay],
        [("fuse", {"count": 3}), "delay"],
        ["fuse(count=3)", "delay"],
        ["fuse(count=3) -> delay"],
        manager,
        manager.pipeline,
        parse_pipeline(text, REGISTRY),
    ):
        assert str(PassManager(pipeline, registry=REGISTRY)) == text
    assert str(PassManager([], registry=REGISTRY)) == ""
    assert str(PassManager(delay, registry=REGISTRY)) == "delay"
