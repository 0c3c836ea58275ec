"""How one argument or output is divided into microbatches, and put together again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphopt._compat import pipelining as _private
from graphopt.pipelining.trees import Path, leaves, rebuild


@dataclass(frozen=True)
class TensorChunkSpec:
    """A tensor that is divided along one dimension.

    Attributes:
        split_dim: the dimension; negative ones count from the end.
    """

    split_dim: int

    @staticmethod
    def from_tuple(split_dims: Sequence[Any]) -> tuple[Any, ...]:
        """One spec for each positional argument; dimensions may be nested as arguments are."""
        return tuple(_nested_specs(dim) for dim in split_dims)

    @staticmethod
    def from_dict(split_dims: Mapping[str, Any]) -> dict[str, Any]:
        """One spec for each keyword argument; dimensions may be nested as arguments are."""
        return {name: _nested_specs(dim) for name, dim in split_dims.items()}


def _nested_specs(dims: Any) -> Any:
    return rebuild(dims, {path: TensorChunkSpec(dim) for path, dim in leaves(dims).items()})


@dataclass(frozen=True)
class Replicated:
    """A value that every microbatch gets whole, as cumulative sequence lengths must be."""


@dataclass(frozen=True)
class Reducer:
    """An output that is reduced over microbatches instead of concatenated.

    Attributes:
        init_value: what the first microbatch is combined with.
        reduce_fn: `reduce_fn(result so far, value of the next microbatch)`, in order.
    """

    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class LossReducer(Reducer):
    """The reducer of a loss: the sum over microbatches unless told otherwise."""

    init_value: Any = 0.0
    reduce_fn: Callable[[Any, Any], Any] = operator.add


ChunkSpec = TensorChunkSpec | Replicated | Reducer | None
"""None: as without a spec."""

_KINDS = (TensorChunkSpec, Replicated, Reducer)


def spec_leaves(specs: Any) -> dict[Path, ChunkSpec]:
    """The specs in a nest, by path. Those of `torch.distributed.pipelining` count as ours."""
    return {path: _as_ours(spec) for path, spec in leaves(specs, _is_spec).items()}


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, _KINDS)


def _as_ours(spec: Any) -> Any:
    """The class `Replicated` stands for its instance."""
    kind = _private.torch_spec_kind(spec)
    if spec is Replicated or kind == "replicate":
        return Replicated()
    if kind == "chunk":
        return TensorChunkSpec(spec.split_dim)
    return Reducer(spec.init_value, spec.reduce_fn) if kind == "reduce" else spec
