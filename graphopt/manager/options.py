"""Options of passes, read from function signatures, and checks of their values."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from graphopt.errors import PassDefinitionError, PipelineSyntaxError
from graphopt.manager.names import suggestion

REQUIRED: Any = inspect.Parameter.empty
"""The default of an option that must be given."""


class PassArgumentError(PipelineSyntaxError, TypeError):
    """A pass got an option that it does not take, or a value of the wrong type.

    >>> from graphopt.manager import PassArgumentError
    >>> try:
    ...     graphopt.PassManager("schedule_comm_wait(no_such_option=3)")
    ... except PassArgumentError as error:
    ...     print("refused")
    refused
    """


@dataclass(frozen=True)
class Option:
    """One option of a pass: name, type and default.

    Attributes:
        name: as in the signature.
        type: its annotation; `typing.Any` where there is none.
        default: `REQUIRED` where there is none.

    >>> option = graphopt.registry.get("comm_fusion_with_concat").options["bucket_size_mb"]
    >>> option.default, option.required
    (25, False)
    """

    name: str
    type: Any
    default: Any = REQUIRED

    @property
    def required(self) -> bool:
        """True if the option has no default."""
        return self.default is REQUIRED

    @property
    def type_name(self) -> str:
        """The type in source form: ``int``, ``float | None``, ``list[str]``."""
        return _type_name(self.type)

    def __str__(self) -> str:
        text = f"{self.name}: {self.type_name}"
        return text if self.required else f"{text} = {self.default!r}"


def options_of(function: Callable[..., Any], name: str) -> dict[str, Option]:
    """Returns the options of pass `name`: its function's parameters after the graph module.

    Raises:
        PassDefinitionError: there is no first parameter, or an option cannot be given by name.
    """
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        raise PassDefinitionError(
            f"pass {name!r} takes no graph: write `def {name}(gm: fx.GraphModule) -> int`"
        )
    options = [_option(parameter, function, name) for parameter in parameters[1:]]
    return {option.name: option for option in options}


def graph_annotation(function: Callable[..., Any]) -> Any:
    """Returns the annotation of a pass's first parameter, or `typing.Any`."""
    return _annotation(next(iter(inspect.signature(function).parameters.values())), function)


def _option(parameter: inspect.Parameter, function: Callable[..., Any], name: str) -> Option:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise PassDefinitionError(
            f"pass {name!r} takes `{parameter}`: give each option a name of its own, as in"
            f" `def {name}(gm, threshold: int = 3)`"
        )
    option = Option(parameter.name, _annotation(parameter, function), parameter.default)
    if not option.required and not fits(option.default, option.type):
        raise PassDefinitionError(
            f"option {option.name!r} of pass {name!r} is annotated {option.type_name}, which its"
            f" default {option.default!r} is not"
        )
    return option


def _annotation(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, inspect.unwrap(function).__globals__)
    except Exception:  # a name that is imported for type checkers only, say
        return Any


def bind(options: Mapping[str, Option], given: Mapping[str, Any], pass_name: str) -> dict[str, Any]:
    """Returns the value of each option: the given one, or the default.

    Raises:
        PassArgumentError: an option is unknown or missing, or its value is of the wrong type.
    """
    for name, value in given.items():
        if name not in options:
            raise PassArgumentError(
                f"pass {pass_name!r} has no option {name!r}" + suggestion(name, options)
            )
        if not fits(value, options[name].type):
            raise PassArgumentError(
                f"option {name!r} of pass {pass_name!r} takes {options[name].type_name},"
                f" not {value!r}"
            )
    missing = [o.name for o in options.values() if o.required and o.name not in given]
    if missing:
        raise PassArgumentError(
            f"pass {pass_name!r} needs a value for {', '.join(map(repr, missing))}"
        )
    return {name: given.get(name, option.default) for name, option in options.items()}


def fits(value: Any, annotation: Any) -> bool:
    """True if a value matches an annotation. Annotations that it cannot interpret match
    anything."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is typing.Annotated:
        return fits(value, arguments[0])
    if origin is typing.Literal:
        return any(type(value) is type(a) and value == a for a in arguments)
    if origin is not None:
        return _fits_container(value, origin, arguments)
    if not is_class(annotation):
        return True
    if isinstance(value, bool) and annotation in (int, float):
        return False
    return isinstance(value, (int, float) if annotation is float else annotation)


def is_class(annotation: Any) -> bool:
    """True if an annotation works with `isinstance`; protocols and `Any` do not."""
    if annotation is Any or not isinstance(annotation, type):
        return False
    try:
        isinstance(None, annotation)
    except TypeError:
        return False
    return True


def _fits_container(value: Any, origin: Any, arguments: tuple[Any, ...]) -> bool:
    if not isinstance(origin, type):
        return True
    if not isinstance(value, origin):
        return False
    if not issubclass(origin, Sequence):
        return True
    items = cast(Sequence[Any], value)
    if origin is not tuple or arguments[1:] == (Ellipsis,):
        return all(fits(item, arguments[0]) for item in items)
    return len(items) == len(arguments) and all(map(fits, items, arguments))


def _type_name(annotation: Any) -> str:
    if annotation is Any:
        return "any"
    if annotation is None or annotation is type(None):
        return "None"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(_type_name(argument) for argument in typing.get_args(annotation))
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return annotation.__qualname__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
