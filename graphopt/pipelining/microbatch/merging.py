"""Merging of microbatch results into the result of the batch.

`merge_chunks(split(x), spec)` gives back `x` for every nesting when both use one spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphopt.ir.bits import same_bits
from graphopt.pipelining.microbatch.chunk_specs import (
    ChunkSpec,
    Reducer,
    TensorChunkSpec,
    spec_leaves,
)
from graphopt.pipelining.microbatch.splitting import part_starts
from graphopt.pipelining.trees import Path, leaves, path_name, rebuild


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any = None, *, mask: bool = False) -> Any:
    """Merges the results of microbatches into that of the batch: the inverse of the split.

    Args:
        chunks: one nested value per microbatch, all with the same structure.
        chunk_spec: for each leaf, nested as a chunk is: `TensorChunkSpec` to concatenate, a
            `Reducer` to reduce in order, `Replicated` where all microbatches must agree, or None:
            tensors with dimensions are concatenated along dimension 0, others must agree.
        mask: the chunks come from a split with `mask=True`.

    Raises:
        ValueError: no chunks, a chunk has another structure than the spec, or chunks do not agree.

    >>> graphopt.pipelining.merge_chunks([torch.zeros(2), torch.ones(1)])
    tensor([0., 0., 1.])
    """
    if not chunks:
        raise ValueError("there are no chunks to merge")
    by_chunk = [leaves(chunk) for chunk in chunks]
    paths = list(by_chunk[0])
    if chunk_spec is None:
        specs: dict[Path, ChunkSpec] = dict.fromkeys(paths)
        _same_structure(by_chunk, paths, "the first chunk")
    else:
        specs = spec_leaves(chunk_spec)
        _same_structure(by_chunk, list(specs), "its spec")
    merged = {
        path: _merge_leaf(path_name("output", path), [c[path] for c in by_chunk], specs[path], mask)
        for path in paths
    }
    return rebuild(chunks[0], merged)


def _same_structure(by_chunk: list[dict[Path, Any]], paths: list[Path], model: str) -> None:
    for index, chunk in enumerate(by_chunk):
        missing = [path for path in paths if path not in chunk]
        extra = [path for path in chunk if path not in paths]
        if not missing and not extra:
            continue
        problem = "lacks" if missing else "has an extra"
        where = path_name("output", (missing or extra)[0])
        raise ValueError(f"chunk {index} has another structure than {model}: it {problem} {where}")


def _merge_leaf(name: str, values: list[Any], spec: Any, mask: bool) -> Any:
    if isinstance(spec, Reducer):
        result = spec.init_value
        for value in values:
            result = spec.reduce_fn(result, value)
        return result
    dim = _merge_dim(name, values, spec)
    if dim is None:
        return _agreed(name, values)
    return _unmasked(values, dim) if mask else _concatenated(name, values, dim)


def _merge_dim(name: str, values: list[Any], spec: Any) -> int | None:
    if spec is None:
        splittable = all(isinstance(value, Tensor) and value.ndim > 0 for value in values)
        return 0 if splittable else None
    if not isinstance(spec, TensorChunkSpec):
        return None
    for index, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} of chunk {index} is a {type(value).__name__}; its spec says a tensor"
            )
        if not -value.ndim <= spec.split_dim < value.ndim:
            raise ValueError(
                f"{name} of chunk {index} has {value.ndim} dimensions; its spec says"
                f" {spec.split_dim} (a value per microbatch, such as a loss, needs a Reducer)"
            )
    return spec.split_dim % int(values[0].ndim)


def _concatenated(name: str, values: list[Tensor], dim: int) -> Tensor:
    try:
        return torch.cat(values, dim)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise ValueError(
            f"{name} cannot be concatenated along dimension {dim}: {shapes}"
        ) from error


def _unmasked(values: list[Tensor], dim: int) -> Tensor:
    """The rows of each full-size chunk that belong to its microbatch."""
    starts = part_starts(values[0].shape[dim], len(values))
    own = [v.narrow(dim, a, b - a) for v, a, b in zip(values, starts, starts[1:], strict=False)]
    return torch.cat(own, dim)


def _agreed(name: str, values: list[Any]) -> Any:
    for index, value in enumerate(values):
        if not _equal(values[0], value):
            raise ValueError(
                f"{name} differs between microbatches: {values[0]!r} in the first, {value!r} in"
                f" number {index}. A Reducer in the spec says how to combine them"
            )
    return values[0]


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return bool(one == other)
