"""Chunk specs: how an argument or output is divided into microbatches and merged again."""

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

    >>> from graphopt.pipelining import TensorChunkSpec, split_args_kwargs_into_chunks
    >>> x, spec = torch.ones(3, 4), (TensorChunkSpec(1),)
    >>> args, _ = split_args_kwargs_into_chunks((x,), None, 2, spec)
    >>> [part.shape for (part,) in args]
    [torch.Size([3, 2]), torch.Size([3, 2])]
    """

    split_dim: int

    @staticmethod
    def from_tuple(split_dims: Sequence[Any]) -> tuple[Any, ...]:
        """One spec for each positional argument, nested as the dimensions are."""
        return tuple(_nested_specs(dim) for dim in split_dims)

    @staticmethod
    def from_dict(split_dims: Mapping[str, Any]) -> dict[str, Any]:
        """One spec for each keyword argument, nested as the dimensions are."""
        return {name: _nested_specs(dim) for name, dim in split_dims.items()}


def _nested_specs(dims: Any) -> Any:
    return rebuild(dims, {path: TensorChunkSpec(dim) for path, dim in leaves(dims).items()})


@dataclass(frozen=True)
class Replicated:
    """A value that every microbatch gets whole, as cumulative sequence lengths must be.

    >>> from graphopt.pipelining import Replicated, split_args_kwargs_into_chunks
    >>> args, _ = split_args_kwargs_into_chunks((torch.ones(4),), None, 2, (Replicated(),))
    >>> [part.shape for (part,) in args]
    [torch.Size([4]), torch.Size([4])]
    """


@dataclass(frozen=True)
class Reducer:
    """An output that is reduced over microbatches instead of concatenated.

    Attributes:
        init_value: the value that the first microbatch is combined with.
        reduce_fn: `reduce_fn(result so far, value of the next microbatch)`, in order.

    >>> from graphopt.pipelining import Reducer, merge_chunks
    >>> largest = Reducer(torch.tensor(0.0), torch.maximum)
    >>> merge_chunks([torch.tensor(1.0), torch.tensor(3.0)], largest)
    tensor(3.)
    """

    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class LossReducer(Reducer):
    """The reducer of a loss: it adds the microbatches' losses unless given another function.

    >>> from graphopt.pipelining import LossReducer, merge_chunks
    >>> merge_chunks([torch.tensor(1.0), torch.tensor(3.0)], LossReducer())
    tensor(4.)
    """

    init_value: Any = 0.0
    reduce_fn: Callable[[Any, Any], Any] = operator.add


ChunkSpec = TensorChunkSpec | Replicated | Reducer | None
"""None: as without a spec."""

_KINDS = (TensorChunkSpec, Replicated, Reducer)


def spec_leaves(specs: Any) -> dict[Path, ChunkSpec]:
    """The specs in a nested value, by path; torch's own are converted."""
    return {path: _as_ours(spec) for path, spec in leaves(specs, _is_spec).items()}


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, _KINDS)


def _as_ours(spec: Any) -> Any:
    """A spec of torch as the one of graphopt; the class `Replicated` stands for its instance."""
    kind = _private.torch_spec_kind(spec)
    if spec is Replicated or kind == "replicate":
        return Replicated()
    if kind == "chunk":
        return TensorChunkSpec(spec.split_dim)
    return Reducer(spec.init_value, spec.reduce_fn) if kind == "reduce" else spec
