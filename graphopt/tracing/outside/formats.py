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
from typing import Any, NoReturn

from graphopt.errors import GraphOptError
from graphopt.ir.source import SourceLine
from graphopt.tracing.kept_items import as_piece
from graphopt.tracing.later import Later
from graphopt.tracing.later_values import holds_unknown, is_later
from graphopt.tracing.nests import leaves_in
from graphopt.tracing.outside.files import is_observed
from graphopt.tracing.outside.places import is_value
from graphopt.tracing.running_trace import BEGIN, current_trace

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
    return _item_of(value, int(key) if key.isdecimal() else key)


def _item_of(value: ast.expr, key: str | int) -> ast.Subscript:
    return ast.Subscript(value, ast.Constant(key), ast.Load())


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
        return current_trace().text(Later(operator.mod, (self._text, self.shown(values))))

    def shown(self, value: Any) -> Any:
        """A value with texts in place of objects."""
        if type(value) is tuple:
            return tuple(map(self.shown, value))
        if type(value) is dict:
            return {key: self.shown(each) for key, each in value.items()}
        if not _says_itself(value):
            return value
        texts = (
            str(value) if "s" in self._kinds else "",
            repr(value) if self._kinds & {"r", "a"} else "",
        )
        return Later(_Shown, texts)


def keys_of_object(text: str, value: Any) -> list[str] | None:
    """The keys that `text % value` asks an object for, whose items code of its class gives; None
    where it does not ask one by keys alone."""
    method = getattr(type(value), "__getitem__", None)
    if not isinstance(method, types.FunctionType) or isinstance(value, (tuple, Later)):
        return None
    if not is_observed(method.__code__.co_filename):
        return None
    fields = [each.group() for each in _FIELDS.finditer(text) if each.group() != "%%"]
    keys = [_KEY.match(each) for each in fields]
    if not all(keys) or any(BEGIN in each for each in fields):
        return None
    return [each.group(1) for each in keys if each]


_KEY = re.compile(r"%\(([^()]*)\)")
_FIELDS = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(?:\d+|\*)?(?:\.(?:\d+|\*)?)?[hlL]?(?:[a-zA-Z%]|$)?")


class FieldsOfObject:
    """The left side of `text % value`, of which the fields are items of an object.

    Args:
        keys: of the items, in the order in which Python asks for them.
        line: where it stands.
    """

    def __init__(self, text: str, keys: Sequence[str], line: SourceLine) -> None:
        self._text, self._keys = text, tuple(keys)
        value = ast.Name("value", ast.Load())
        items: list[ast.expr] = [_item_of(value, key) for key in keys]
        self._items = _function("lambda value: 0", ast.Tuple(items, ast.Load()), line)

    def __mod__(self, value: Any) -> str:
        items = Percent(self._text).shown(self._items(value))
        fill = _Filled(self._keys)
        if not is_later(self._text) and not holds_unknown(items, of_host=True):
            return fill(self._text, *items)
        return current_trace().text(Later(fill, (self._text, *items)))


class _Filled:
    """Brings the items of an object into a text.

    Raises:
        GraphOptError: the text asks for others than it did at capture.
    """

    __name__ = "percent"

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys

    def __call__(self, text: str, *items: Any) -> str:
        given = _Items(list(zip(self.keys, items, strict=True)))
        filled = text % given
        if given.left:
            given.refuse()
        return filled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Filled) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)


class _Items:
    """Gives items in the order in which they have been asked for."""

    def __init__(self, left: list[tuple[str, Any]]) -> None:
        self.left = left

    def __getitem__(self, key: str) -> Any:
        if not self.left or self.left[0][0] != key:
            self.refuse()
        return self.left.pop(0)[1]

    def refuse(self) -> NoReturn:
        raise GraphOptError(
            "a text that is brought into another one with % has fields itself"
            "\n  hint:  bring it in with the others: '%(x)s %(text)s' % values"
        )

    def __str__(self) -> str:
        self.refuse()

    __repr__ = __str__


class RepeatedText:
    """A text of which a number says how often it is repeated that only the graph knows."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __mul__(self, times: Any) -> str:
        return current_trace().text(Later(operator.mul, (self._text, times)))

    __rmul__ = __mul__


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
