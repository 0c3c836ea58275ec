"""How one argument or output is divided into microbatches, and put together again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorChunkSpec:
    """A tensor that is divided along one dimension.

    Attributes:
        split_dim: the dimension; negative ones count from the end.
    """

    split_dim: int

    @staticmethod
    def from_tuple(split_dims: Sequence[int]) -> tuple[TensorChunkSpec, ...]:
        """One spec for each positional argument."""
        return tuple(TensorChunkSpec(dim) for dim in split_dims)

    @staticmethod
    def from_dict(split_dims: Mapping[str, int]) -> dict[str, TensorChunkSpec]:
        """One spec for each keyword argument."""
        return {name: TensorChunkSpec(dim) for name, dim in split_dims.items()}


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


def is_chunk_spec(value: Any) -> bool:
    """Whether a value inside a nest of specs is a spec. The class `Replicated` stands for its
    instance."""
    return value is None or value is Replicated or isinstance(value, _KINDS)
