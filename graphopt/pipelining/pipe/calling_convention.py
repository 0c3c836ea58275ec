"""The calling convention of a model: arguments bound, flattened, compared with the example's."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphopt import _compat

_Kind = inspect.Parameter


class CallingConvention:
    """The calling convention of a model, fixed by the example it was traced with.

    Immutable, and keeps no tensors of the example.

    Attributes:
        names: a name for each leaf of the example.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = type(module).__name__
        self._signature = inspect.signature(module.forward)
        bound = self._signature.bind(*args, **kwargs)
        self._positional = len(args)
        self._given = frozenset(bound.arguments)
        leaves, self._spec = _compat.tree_flatten(self._arrange(bound))
        self.names = _compat.leaf_names(module.forward, leaves, self._spec)
        self._constants = [None if isinstance(v, torch.Tensor) else (v,) for v in leaves]

    def __deepcopy__(self, memo: dict[int, Any]) -> CallingConvention:
        return self

    def arrange(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in the example's form, keyword arguments in the signature's order."""
        return self._arrange(self._signature.bind(*args, **kwargs))

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call's arguments, in the order of the example's.

        Raises:
            TypeError: the arguments do not fit the signature of the model's forward.
            ValueError: they are nested differently than the example's, or differ in what is not a
                tensor: that is part of the graph.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self._check_others(bound)
        leaves, spec = _compat.tree_flatten(self._arrange(bound))
        if spec != self._spec:
            raise ValueError(
                f"the arguments of {self._model} are nested differently than those it was traced"
                f" with:\n  now:     {spec}\n  traced:  {self._spec}"
            )
        for name, leaf, constant in zip(self.names, leaves, self._constants, strict=True):
            self._check_leaf(name, leaf, constant)
        return list(leaves)

    def nest(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call: `tensors` at their places, all else as in the example."""
        given = iter(tensors)
        leaves = [next(given) if kept is None else kept[0] for kept in self._constants]
        args, kwargs = _compat.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def _arrange(self, bound: inspect.BoundArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the example also gives, positional where the example's are."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in self._signature.parameters.items():
            if name not in self._given:
                continue
            value = bound.arguments[name]
            if parameter.kind is _Kind.VAR_POSITIONAL:
                args.extend(value)
            elif parameter.kind is _Kind.VAR_KEYWORD:
                kwargs.update({key: value[key] for key in sorted(value)})
            elif len(args) < self._positional and parameter.kind is not _Kind.KEYWORD_ONLY:
                args.append(value)
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    def _check_others(self, bound: inspect.BoundArguments) -> None:
        """Refuses arguments that the example leaves out unless they equal their defaults."""
        for name, parameter in self._signature.parameters.items():
            if name in self._given:
                continue
            empty: dict[Any, Any] = {_Kind.VAR_POSITIONAL: (), _Kind.VAR_KEYWORD: {}}
            default = empty.get(parameter.kind, parameter.default)
            if not _same(bound.arguments[name], default):
                raise ValueError(
                    f"argument '{name}' of {self._model} was left at its default when the pipe was"
                    " made; make the pipe with it among the example arguments"
                )

    def _check_leaf(self, name: str, value: Any, constant: tuple[Any] | None) -> None:
        if constant is None and not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; the pipe was made with a tensor")
        if constant is not None and not _same(value, constant[0]):
            raise ValueError(
                f"{name} is {_shown(value)}; the pipe was made with {constant[0]!r}, which is part"
                " of its graph"
            )


class OutputSpec:
    """The nested structure of a model's output, by which flat leaves are put together.
    Immutable."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputSpec:
        return self

    def nest(self, leaves: list[Any]) -> Any:
        """The nested output of the given leaves."""
        return _compat.tree_unflatten(leaves, self._spec)


@dataclass(frozen=True)
class OutputNest:
    """The mapping from the tensors of the last stage to the model's nested output.

    Attributes:
        leaves: for each leaf of the output the position of its tensor; or the constant that it is.
        spec: the nested structure of the leaves.
    """

    leaves: tuple[tuple[int] | tuple[None, Any], ...]
    spec: OutputSpec

    def nest(self, tensors: tuple[torch.Tensor, ...], *, per_chunk: bool = False) -> Any:
        """The nested output; `per_chunk` gives tensors without dimensions one, to concatenate."""
        values = [
            leaf[1] if len(leaf) == 2 else _chunk(tensors[leaf[0]], per_chunk)
            for leaf in self.leaves
        ]
        return self.spec.nest(values)


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(type(value) is type(other) and value == other)


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def _chunk(tensor: torch.Tensor, per_chunk: bool) -> torch.Tensor:
    return tensor[None] if per_chunk and tensor.ndim == 0 else tensor
