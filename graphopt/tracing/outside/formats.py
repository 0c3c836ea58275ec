"""Texts that `str.format`, f-strings and `%` make.

    "{x.val:.3f} {0[loss]}".format(d, x=meter)  ==>  f"{meter.val:.3f} {d['loss']}"

What C reads there cannot be seen; so an instruction that is about to call `str.format` calls a
function of the same line in its place, whose instructions say what it reads.
"""

from __future__ import annotations

import ast
import operator
import re
import string
import types
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from graphopt.ir.source import SourceLine
from graphopt.tracing.kept_items import as_piece
from graphopt.tracing.later import Later, is_later, leaves_in
from graphopt.tracing.outside.files import is_observed
from graphopt.tracing.outside.places import is_value
from graphopt.tracing.running_trace import current_trace

_METHODS = (types.BuiltinMethodType, types.MethodDescriptorType)
_CONVERSIONS: dict[str | None, int] = {None: -1, "s": 115, "r": 114, "a": 97}


def formatting(callee: Any, args: Sequence[Any], line: SourceLine) -> Callable[..., str] | None:
    """What is called in place of `str.format` and `str.format_map`; None in place of other
    functions, and where Python itself has to say that a text is malformed.

    Args:
        args: positional and keyword values; the text first, where the method is not bound.
        line: where it is called.
    """
    if not isinstance(callee, _METHODS) or callee.__name__ not in ("format", "format_map"):
        return None
    bound = isinstance(callee, types.BuiltinMethodType)
    text = getattr(callee, "__self__", None) if bound else args[0] if args else None
    if type(text) is not str or is_later(text):
        return None
    of_map = callee.__name__ == "format_map"
    parameters = [*([] if bound else ["text", "/"]), "named" if of_map else "*args, **named"]
    try:
        made = _FieldsOfText(of_map).of_text(text)
    except ValueError:
        return None
    return _function(f"lambda {', '.join(parameters)}: 0", made, line)


def _function(head: str, body: ast.expr, line: SourceLine) -> Callable[..., str]:
    """A function of an expression that stands in a line of the program's."""
    tree = ast.parse(head, mode="eval")
    tree.body.body = body  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if "lineno" in node._attributes:
            node.lineno = node.end_lineno = line.line  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
    function: types.FunctionType = eval(compile(tree, line.file, "eval"), {})
    function.__code__ = function.__code__.replace(co_name=line.function)
    return function


class _FieldsOfText:
    """Makes an expression of a text with fields.

    Args:
        of_map: all of them are names.
    """

    def __init__(self, of_map: bool) -> None:
        self._of_map = of_map
        self._numbers = count()
        self._kinds: set[bool] = set()

    def of_text(self, text: str, depth: int = 2) -> ast.JoinedStr:
        """The expression.

        Raises:
            ValueError: the text is malformed.
        """
        if not depth:
            raise ValueError(text)
        pieces: list[ast.expr] = []
        for literal, field, form, conversion in string.Formatter().parse(text):
            if literal:
                pieces.append(ast.Constant(literal))
            if field is not None:
                value, how = self._value(field), _conversion(conversion)
                spec = self.of_text(form, depth - 1) if form else None
                pieces.append(ast.FormattedValue(value, how, spec))
        return ast.JoinedStr(pieces)

    def _value(self, field: str) -> ast.expr:
        """What a field names: `0`, `x.val`, `m[loss]`, or nothing, for the next one."""
        first = _FIELD.fullmatch(field)
        if first is None:
            raise ValueError(field)
        name, rest = first.groups()
        if name == "" or name.isdecimal():
            self._kinds.add(name == "")
            if self._of_map or len(self._kinds) > 1:
                raise ValueError(field)
            name = name or str(next(self._numbers))
        of = "args" if name.isdecimal() else "named"
        value: ast.expr = _item(ast.Name(of, ast.Load()), name)
        for attribute, key in _PART.findall(rest):
            load = ast.Load()
            value = ast.Attribute(value, attribute, load) if attribute else _item(value, key)
        return value


_PART = re.compile(r"\.([^.\[\]]+)|\[([^\]]+)\]")
_FIELD = re.compile(rf"([^.\[\]]*)((?:{_PART.pattern.replace('(', '(?:')})*)")


def _item(value: ast.expr, key: str) -> ast.Subscript:
    constant = ast.Constant(int(key) if key.isdecimal() else key)
    return ast.Subscript(value, constant, ast.Load())


def _conversion(letter: str | None) -> int:
    if letter not in _CONVERSIONS:
        raise ValueError(letter)
    return _CONVERSIONS[letter]


class Converted:
    """Stands for a value that an instruction makes text of, and then brings into a form: which that
    text is may be known only when the graph has run."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return as_piece(str(self._value))

    def __repr__(self) -> str:
        return as_piece(repr(self._value))


class Percent:
    """The left side of `text % values`, which is known only when the graph has run."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._kinds = {kind for _, kind in _VALUES.findall("%s %r" if is_later(text) else text)}

    def __mod__(self, values: Any) -> str:
        return current_trace().text(Later(operator.mod, (self._text, self._shown(values))))

    def _shown(self, value: Any) -> Any:
        """A value with texts in place of objects."""
        if type(value) is tuple:
            return tuple(map(self._shown, value))
        if type(value) is dict:
            return {key: self._shown(each) for key, each in value.items()}
        if not _says_itself(value):
            return value
        texts = (
            str(value) if "s" in self._kinds else "",
            repr(value) if self._kinds & {"r", "a"} else "",
        )
        return Later(_Shown, texts)


def gives_objects_a_width(text: str, values: Any) -> bool:
    """Whether texts of objects, in which there may be what is known only when the graph has run,
    are brought to a width."""
    widths = any(width and kind in "sra" for width, kind in _VALUES.findall(text))
    return widths and any(map(_says_itself, leaves_in(values)))


_VALUES = re.compile(r"%(?:\([^)]*\))?[#0\- +]*((?:\d+|\*)?(?:\.(?:\d+|\*)?)?)[hlL]?([a-zA-Z%])")


class _Shown:
    """Has these texts."""

    def __init__(self, text: str, exactly: str) -> None:
        self._text, self._exactly = text, exactly

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return self._exactly


def _says_itself(value: Any) -> bool:
    """Whether the text of an object is made by code of its class that is followed."""
    kind = type(value)
    if is_value(value) or any(
        hasattr(kind, name) for name in ("__index__", "__int__", "__float__")
    ):
        return False
    method: Any = kind.__str__
    method = kind.__repr__ if method is object.__str__ else method
    return isinstance(method, types.FunctionType) and is_observed(method.__code__.co_filename)
