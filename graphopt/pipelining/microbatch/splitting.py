"""Division of a batch's arguments into those of microbatches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphopt._compat.pipelining import split_block_mask
from graphopt.pipelining.microbatch.block_masks import is_block_mask
from graphopt.pipelining.microbatch.chunk_specs import (
    ChunkSpec,
    Replicated,
    TensorChunkSpec,
    spec_leaves,
)
from graphopt.pipelining.trees import Path, leaves, path_name, rebuild


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the arguments: name, value and the dimension to split along, or None."""

    name: str
    value: Any
    dim: int | None


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
    *,
    mask: bool = False,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Divide the arguments of a batch into those of microbatches.

    Without a spec tensors and block masks of flex attention are split along dimension 0; tensors
    without dimensions, block masks for a batch of 1 and other values are repeated. Sizes that
    `chunks` does not divide give microbatches whose sizes differ by at most one, as
    `torch.tensor_split` does.

    Args:
        args: positional arguments, nested as they like.
        kwargs: keyword arguments; None is no arguments.
        chunks: number of microbatches.
        args_chunk_spec: `TensorChunkSpec`, `Replicated` or None (as without a spec) for each leaf,
            nested as `args` is.
        kwargs_chunk_spec: the same for `kwargs`.
        mask: for debugging: every microbatch keeps the full shape, with zeros for the rows of the
            other microbatches, so that kernels and rounding do not depend on the division.

    Returns:
        A list of positional arguments and a list of keyword arguments, one entry per microbatch.
        Fewer than `chunks` microbatches, with a warning, when a tensor has fewer rows.

    Raises:
        ValueError: a spec does not fit its argument, or there is nothing to split.

    >>> split = graphopt.pipelining.split_args_kwargs_into_chunks
    >>> split((torch.tensor([0.0, 1.0, 2.0]), "all"), None, 2)
    ([(tensor([0., 1.]), 'all'), (tensor([2.]), 'all')], [{}, {}])
    """
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"a batch is divided into at least 1 microbatch, not {chunks!r}")
    if not isinstance(args, (tuple, list)):
        raise ValueError(f"args is a {type(args).__name__}; it is a tuple, such as (x,)")
    given = dict(kwargs or {})
    named = _leaves_with_dims(
        args, args_chunk_spec, lambda path: path_name(f"args[{path[0]}]", path[1:])
    )
    keyed = _leaves_with_dims(
        given, kwargs_chunk_spec, lambda path: path_name(str(path[0]), path[1:])
    )
    count = _number_of_chunks([*named.values(), *keyed.values()], chunks)
    split_args = {path: _split_leaf(leaf, count, mask) for path, leaf in named.items()}
    split_kwargs = {path: _split_leaf(leaf, count, mask) for path, leaf in keyed.items()}
    return (
        [_nth(args, split_args, index) for index in range(count)],
        [_nth(given, split_kwargs, index) for index in range(count)],
    )


def _leaves_with_dims(value: Any, spec: Any, name: Callable[[Path], str]) -> dict[Path, _Leaf]:
    values = leaves(value)
    specs: dict[Path, ChunkSpec] = dict.fromkeys(values) if spec is None else spec_leaves(spec)
    for path in [*values, *specs]:
        if path not in specs:
            raise ValueError(f"{name(path)} has no entry in the chunk spec")
        if path not in values:
            where = name(path) if path else "all arguments together"
            raise ValueError(f"the chunk spec has an entry for {where}, which is no leaf")
    result = {}
    for path, leaf in values.items():
        result[path] = _Leaf(name(path), leaf, _split_dim(name(path), leaf, specs[path]))
    return result


def _split_dim(name: str, value: Any, spec: Any) -> int | None:
    if isinstance(spec, Replicated):
        return None
    if spec is None:
        return _default_dim(name, value)
    if not isinstance(spec, TensorChunkSpec):
        raise ValueError(
            f"{name} has the spec {spec!r}; arguments take a TensorChunkSpec, Replicated() or None"
            " (a Reducer says how outputs are merged)"
        )
    if is_block_mask(value):
        return _block_mask_dim(name, value, spec.split_dim)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} is a {type(value).__name__}, not a tensor, and cannot be split along a"
            " dimension; its spec should be Replicated()"
        )
    if not -value.ndim <= spec.split_dim < value.ndim:
        raise ValueError(f"{name} has {value.ndim} dimensions; its spec says {spec.split_dim}")
    return spec.split_dim % value.ndim


def _block_mask_dim(name: str, mask: Any, dim: int) -> int | None:
    if dim != 0:
        raise ValueError(
            f"{name} is a BlockMask, which is split along dimension 0; its spec says {dim}"
        )
    return None if mask.kv_num_blocks.shape[0] == 1 else 0  # one entry serves all rows


def _default_dim(name: str, value: Any) -> int | None:
    if is_block_mask(value):
        return _block_mask_dim(name, value, 0)
    if not isinstance(value, Tensor) or value.ndim == 0:
        return None
    if value.ndim == 1 and _is_integer(value):
        warnings.warn(
            f"{name} is a 1-D tensor of integers and is split along dimension 0. If it holds"
            " offsets, such as cumulative sequence lengths, give it the spec Replicated(); else"
            " TensorChunkSpec(0) says that this is meant",
            stacklevel=5,
        )
    return 0


def _is_integer(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _number_of_chunks(arguments: list[_Leaf], chunks: int) -> int:
    """The number of microbatches: `chunks`, or the rows of the smallest tensor if fewer."""
    split = [leaf for leaf in arguments if leaf.dim is not None]
    if not split:
        return chunks
    smallest = min(split, key=lambda leaf: int(leaf.value.shape[leaf.dim]))
    rows = int(smallest.value.shape[smallest.dim])
    if rows == 0:
        raise ValueError(f"{smallest.name} has size 0 along dimension {smallest.dim}")
    if rows >= chunks:
        return chunks
    warnings.warn(
        f"{smallest.name} has size {rows} along dimension {smallest.dim}, too small for {chunks}"
        f" microbatches: the batch is divided into {rows}",
        stacklevel=3,
    )
    return rows


def _split_leaf(leaf: _Leaf, count: int, mask: bool) -> list[Any]:
    if leaf.dim is None:
        return [leaf.value] * count
    if is_block_mask(leaf.value):
        # With full-size tensors the mask is full-size too.
        return [leaf.value] * count if mask else split_block_mask(leaf.value, count)
    parts = torch.tensor_split(leaf.value, count, leaf.dim)
    if not mask:
        return list(parts)
    starts = part_starts(leaf.value.shape[leaf.dim], count)[:-1]
    pairs = zip(parts, starts, strict=True)
    return [_masked(leaf.value, part, leaf.dim, start) for part, start in pairs]


def _masked(whole: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
    return torch.zeros_like(whole).slice_scatter(part, dim, start, start + part.shape[dim])


def _nth(value: Any, parts: dict[Path, list[Any]], index: int) -> Any:
    return rebuild(value, {path: chunks[index] for path, chunks in parts.items()})


def part_starts(size: int, count: int) -> list[int]:
    """The start of each part that `torch.tensor_split` makes, and the end of the last one."""
    small, larger = divmod(size, count)
    return [index * small + min(index, larger) for index in range(count + 1)]
