"""Pipelines as text: ``comm_fusion_with_concat(bucket_size_mb=25) -> schedule_comm_wait``.

Passes are separated by ``->``. Options are keywords with Python literals as values: numbers (also
``inf`` and ``nan``), strings, ``True``, ``False``, ``None``, lists and tuples of these. White space
and line breaks may stand between any two parts. Empty text is a pipeline without passes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphopt.errors import PipelineSyntaxError
from graphopt.manager.declaration import Pass
from graphopt.manager.literals import has_literal, literal
from graphopt.manager.options import PassArgumentError, bind
from graphopt.manager.registry import PassRegistry, default_registry

_NAME = re.compile(r"[^\W\d]\w*")
_SPACE = re.compile(r"\s*")
_LITERALS = "values are Python literals, such as 3, 0.5, 'text', True, None or [1, 2]"


class Step(NamedTuple):
    """One pass of a pipeline, with its options."""

    pass_: Pass
    options: Mapping[str, Any]

    def __str__(self) -> str:
        if not self.options:
            return self.pass_.name
        options = ", ".join(f"{name}={literal(value)}" for name, value in self.options.items())
        return f"{self.pass_.name}({options})"


class Pipeline(tuple[Step, ...]):
    """Passes with their options, in order; `str` of it parses back to it.

    >>> pipeline = graphopt.parse_pipeline("comm_fusion_with_concat -> schedule_comm_wait")
    >>> len(pipeline), pipeline[1].pass_.name
    (2, 'schedule_comm_wait')
    """

    __slots__ = ()

    def __str__(self) -> str:
        return " -> ".join(map(str, self))


def parse_pipeline(text: str, registry: PassRegistry | None = None) -> Pipeline:
    """Parses a textual pipeline; the module's docstring has the grammar.

    Args:
        text: such as ``first(size=25) -> second``.
        registry: where names are looked up; None: all declared passes.

    Raises:
        PipelineSyntaxError: the text is not a pipeline, or names an unknown pass or option. Shows
            the place.
        PassDefinitionError: a constraint of one of the passes names an unknown pass.

    >>> import graphopt
    >>> str(graphopt.parse_pipeline("comm_fusion_with_concat( ) -> schedule_comm_wait"))
    'comm_fusion_with_concat -> schedule_comm_wait'
    """
    if not isinstance(text, str):
        raise PipelineSyntaxError(f"a pipeline text is a str, not {text!r}")
    registry = default_registry() if registry is None else registry
    pipeline = Pipeline(_Parser(text, registry).parse())
    registry.check_known([step.pass_ for step in pipeline])
    return pipeline


def is_text(pipeline: Pipeline) -> bool:
    """True if all options have literals, so that the pipeline's text is complete."""
    return all(has_literal(value) for step in pipeline for value in step.options.values())


def marked_text(pipeline: Pipeline, index: int) -> str:
    """Formats a pipeline with brackets around one of its passes."""
    steps = [f"[{step}]" if i == index else str(step) for i, step in enumerate(pipeline)]
    return " -> ".join(steps)


@dataclass
class _Parser:
    """A recursive-descent parser of one text; `place` is the current position."""

    text: str
    registry: PassRegistry
    place: int = 0

    def parse(self) -> list[Step]:
        steps: list[Step] = []
        self._skip_space()
        if self._at_end():
            return steps
        while True:
            steps.append(self._step())
            self._skip_space()
            if self._at_end():
                return steps
            self._arrow()

    def _step(self) -> Step:
        self._skip_space()
        start = self.place
        match = _NAME.match(self.text, start)
        if match is None:
            raise self._error("a pass is expected here", start)
        try:
            pass_ = self.registry.get(match.group())
        except PipelineSyntaxError as error:
            raise self._error(str(error), start) from None
        self.place = match.end()
        self._skip_space()
        options = self._options() if self.text.startswith("(", self.place) else {}
        try:
            bind(pass_.options, options, pass_.name)
        except PassArgumentError as error:
            raise self._error(str(error), start, PassArgumentError) from None
        return Step(pass_, options)

    def _arrow(self) -> None:
        if self.text.startswith("->", self.place):
            self.place += 2
            return
        if self.text.startswith(("{", "[", ":"), self.place):
            raise self._error("options stand in round brackets: pass(name=value)", self.place)
        raise self._error("passes are separated by ->", self.place)

    def _options(self) -> dict[str, Any]:
        start = self.place
        end = self._closing_bracket(start)
        # Line breaks are white space; inside strings, Python does not allow them either.
        source = "f" + re.sub(r"[\r\n]", " ", self.text[start : end + 1])
        try:
            call = ast.parse(source, mode="eval").body
        except SyntaxError as error:
            raise self._error(f"this cannot be read: {_LITERALS}", start + _offset(error)) from None
        except (ValueError, MemoryError, RecursionError):
            raise self._error(f"this cannot be read: {_LITERALS}", start) from None
        assert isinstance(call, ast.Call)
        if call.args:
            raise self._error("options are given by name: name=value", start + 1)
        options: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise self._error("options are given by name: name=value", start + 1)
            if keyword.arg in options:
                raise self._error(f"option {keyword.arg!r} is given twice", start + 1)
            options[keyword.arg] = self._value(keyword.value, source, start)
        self.place = end + 1
        return options

    def _closing_bracket(self, start: int) -> int:
        depth, quote, place = 0, "", start
        while place < len(self.text):
            char = self.text[place]
            if quote:
                if char == "\\":
                    place += 1
                elif char == quote:
                    quote = ""
            elif char in "'\"":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
                if depth == 0:
                    return place
            place += 1
        raise self._error("this bracket is never closed", start)

    def _value(self, node: ast.expr, source: str, start: int) -> Any:
        if isinstance(node, ast.Constant) and not isinstance(node.value, (bytes, complex)):
            if node.value is not Ellipsis:
                return node.value
        elif isinstance(node, ast.Name) and node.id in ("inf", "nan"):
            return float(node.id)
        elif isinstance(node, ast.List):
            return [self._value(item, source, start) for item in node.elts]
        elif isinstance(node, ast.Tuple):
            return tuple(self._value(item, source, start) for item in node.elts)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._value(node.operand, source, start)
            if type(number) in (int, float):
                return -number
        # Python counts columns in bytes; `source` begins with one character that the text has not.
        column = len(source.encode()[: node.col_offset].decode()) - 1
        raise self._error(f"this is not a value: {_LITERALS}", start + column)

    def _skip_space(self) -> None:
        match = _SPACE.match(self.text, self.place)
        assert match is not None
        self.place = match.end()

    def _at_end(self) -> bool:
        return self.place == len(self.text)

    def _error(
        self, what: str, place: int, kind: type[PipelineSyntaxError] = PipelineSyntaxError
    ) -> PipelineSyntaxError:
        """Builds an error that shows the line of `place` with a caret below it."""
        begin = self.text.rfind("\n", 0, place) + 1
        line = self.text[begin:].partition("\n")[0]
        return kind(f"{what}\n    {line}\n    {' ' * (place - begin)}^")


def _offset(error: SyntaxError) -> int:
    """Converts a syntax error's column to a position within the brackets: Python counts from 1,
    after an added `f`."""
    return max(0, (error.offset or 1) - 2)
