"""Batches divided into microbatches and merged again."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.pipelining import microbatch as oracle
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from graphopt.pipelining import (
    LossReducer,
    Reducer,
    Replicated,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Batch:
    tokens: Any
    extra: Any
    made: int = dataclasses.field(default=3, init=False)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(equal, one, other))
    if dataclasses.is_dataclass(one):
        return equal(vars(one), vars(other))
    return bool(one == other)


# ---------------------------------------------------------------------------- round trips


@st.composite
def leaf_and_spec(draw: st.DrawFn) -> tuple[Any, Any]:
    kind = draw(st.sampled_from(["float", "int", "bool", "scalar", "number", "text", "none"]))
    if kind == "number":
        return draw(st.integers() | st.floats(allow_nan=False)), draw(
            st.sampled_from([None, Replicated(), Replicated])
        )
    if kind == "text":
        return draw(st.text(max_size=3)), None
    if kind == "none":
        return None, Replicated()
    if kind == "scalar":
        return torch.tensor(draw(st.integers(0, 9))), draw(st.sampled_from([None, Replicated()]))
    shape = draw(st.lists(st.integers(6, 9), min_size=1, max_size=3))
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    tensor = {"float": values, "int": values.long(), "bool": values % 2 == 0}[kind]
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    specs = [TensorChunkSpec(dim), Replicated()]
    if len(shape) > 1 or kind != "int":
        specs.append(None)
    return tensor, draw(st.sampled_from(specs))


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def zipped(make: Any) -> Any:
        return lambda pairs: (make([p[0] for p in pairs]), make([p[1] for p in pairs]))

    def keyed(make: Any) -> Any:
        return lambda pairs: (
            make({key: p[0] for key, p in pairs.items()}),
            make({key: p[1] for key, p in pairs.items()}),
        )

    several = st.lists(children, max_size=3)
    two = st.lists(children, min_size=2, max_size=2)
    named = st.dictionaries(st.sampled_from("abcd"), children, max_size=3)
    return (
        several.map(zipped(list))
        | several.map(zipped(tuple))
        | two.map(zipped(lambda values: Pair(*values)))
        | two.map(zipped(lambda values: Batch(*values)))
        | named.map(keyed(dict))
        | named.map(keyed(OrderedDict))
    )


nested = st.recursive(leaf_and_spec(), _containers, max_leaves=6)


@given(
    positional=st.lists(nested, max_size=3),
    keyword=st.dictionaries(st.sampled_from(["x", "y", "z"]), nested, max_size=2),
    chunks=st.integers(1, 6),
    mask=st.booleans(),
)
def test_merging_what_was_split_gives_it_back(
    positional: list[Any], keyword: dict[str, Any], chunks: int, mask: bool
) -> None:
    args = tuple(value for value, _ in positional)
    args_spec = tuple(spec for _, spec in positional)
    kwargs = {name: value for name, (value, _) in keyword.items()}
    kwargs_spec = {name: spec for name, (_, spec) in keyword.items()}
    split = split_args_kwargs_into_chunks(args, kwargs, chunks, args_spec, kwargs_spec, mask=mask)
    assert [len(part) for part in split] == [chunks, chunks]
    assert equal(merge_chunks(split[0], args_spec, mask=mask), args)
    assert equal(merge_chunks(split[1], kwargs_spec, mask=mask), kwargs)


@given(value=nested, chunks=st.integers(1, 6))
def test_without_a_spec_values_come_back_as_they_were(value: tuple[Any, Any], chunks: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*1-D tensor of integers")
        args, _ = split_args_kwargs_into_chunks((value[0],), {}, chunks)
    assert equal(merge_chunks(args), (value[0],))


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_even_tensors_are_divided_as_torch_divides_them(chunks: int, dim: int) -> None:
    x, y = torch.randn(6, 6), torch.randn(6, 6, 2)
    ours = split_args_kwargs_into_chunks(
        (x, 5), {"y": y}, chunks, (TensorChunkSpec(dim), Replicated()), {"y": TensorChunkSpec(dim)}
    )
    theirs = oracle.split_args_kwargs_into_chunks(
        (x, 5),
        {"y": y},
        chunks,
        (oracle.TensorChunkSpec(dim), oracle._Replicate()),
        {"y": oracle.TensorChunkSpec(dim)},
    )
    assert equal(ours[0], list(theirs[0]))
    assert equal(ours[1], list(theirs[1]))
    spec, their_spec = {"y": TensorChunkSpec(dim)}, {"y": oracle.TensorChunkSpec(dim)}
    assert equal(merge_chunks(ours[1], spec), oracle.merge_chunks(theirs[1], their_spec))


# ---------------------------------------------------------------------------- splitting


def test_sizes_that_do_not_divide_differ_by_one() -> None:
    args, kwargs = split_args_kwargs_into_chunks((torch.arange(14.0).view(7, 2),), None, 3)
    assert [part.shape[0] for (part,) in args] == [3, 2, 2]
    assert kwargs == [{}, {}, {}]


def test_gradients_flow_through_the_parts() -> None:
    x = torch.randn(5, 2, requires_grad=True)
    args, _ = split_args_kwargs_into_chunks((x,), {}, 2)
    merge_chunks([part * 2 for (part,) in args]).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_cumulative_sequence_lengths_can_be_marked_replicated() -> None:
    lengths = torch.tensor([0, 3, 5, 9])
    _, kwargs = split_args_kwargs_into_chunks(
        (), {"cu_seqlens": lengths}, 2, None, {"cu_seqlens": Replicated()}
    )
    assert all(torch.equal(part["cu_seqlens"], lengths) for part in kwargs)


def test_integers_split_by_default_are_warned_about_by_name() -> None:
    with pytest.warns(UserWarning, match="batch.'cu_seqlens'. is a 1-D tensor of integers") as seen:
        split_args_kwargs_into_chunks((), {"batch": {"cu_seqlens": torch.arange(4)}}, 2)
    assert seen[0].filename == __file__


def test_booleans_and_matrices_of_integers_are_split_silently() -> None:
    args, _ = split_args_kwargs_into_chunks(
        (torch.ones(4, dtype=torch.bool), torch.ones(4, 2, dtype=torch.long)), {}, 2
    )
    assert [part.shape[0] for part in args[0]] == [2, 2]


def test_a_tensor_that_is_too_small_reduces_the_number_for_all() -> None:
    with pytest.warns(UserWarning, match="mask has size 2 along dimension 1, too small for 4"):
        args, kwargs = split_args_kwargs_into_chunks(
            (torch.ones(8, 2),), {"mask": torch.ones(8, 2)}, 4, None, {"mask": TensorChunkSpec(1)}
        )
    assert [part[0].shape for part in args] == [(4, 2), (4, 2)]
    assert [part["mask"].shape for part in kwargs] == [(8, 1), (8, 1)]


def test_masking_keeps_shapes() -> None:
    x = torch.arange(1.0, 6.0).view(5, 1)
    args, _ = split_args_kwargs_into_chunks((x,), {}, 2, mask=True)
    assert [part.flatten().tolist() for (part,) in args] == [[1, 2, 3, 0, 0], [0, 0, 0, 4, 5]]
    assert torch.equal(merge_chunks([part for (part,) in args], mask=True), x)


def test_specs_from_tuples_and_dictionaries() -> None:
    assert TensorChunkSpec.from_tuple((0, 1)) == (TensorChunkSpec(0), TensorChunkSpec(1))
    assert TensorChunkSpec.from_dict({"x": -1}) == {"x": TensorChunkSpec(-1)}


X = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "chunks", "args_spec", "kwargs_spec", "message"),
    [
        ((X,), {}, 0, None, None, "at least 1 microbatch, not 0"),
        ((X, X), {}, 2, (TensorChunkSpec(0),), None, r"args\[1\] has no entry in the chunk spec"),
        ((X,), {}, 2, TensorChunkSpec(0), None, r"args\[0\] has no entry in the chunk spec"),
        ((X,), {}, 2, (TensorChunkSpec(0),) * 2, None, r"has an entry for args\[1\]"),
        ((), {"y": X}, 2, None, {"z": TensorChunkSpec(0)}, "y has no entry"),
        (([X],), {}, 2, (TensorChunkSpec(0),), None, r"args\[0\]\[0\] has no entry"),
        ((5,), {}, 2, (TensorChunkSpec(0),), None, r"args\[0\] is a int, not a tensor"),
        ((X,), {}, 2, (TensorChunkSpec(2),), None, r"has 2 dimensions; its spec says 2"),
        ((X.sum(),), {}, 2, (TensorChunkSpec(0),), None, "has 0 dimensions; its spec says 0"),
        ((X,), {}, 2, (LossReducer(),), None, "has the spec LossReducer.*arguments take a Tensor"),
        ((X[:0],), {}, 2, None, None, r"args\[0\] has size 0 along dimension 0"),
    ],
)
def test_refused_splits(
    args: Any, kwargs: Any, chunks: int, args_spec: Any, kwargs_spec: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split_args_kwargs_into_chunks(args, kwargs, chunks, args_spec, kwargs_spec)


# ---------------------------------------------------------------------------- merging


def test_reducers_are_applied_in_order() -> None:
    spec = {"loss": LossReducer(), "names": Reducer("", lambda so_far, new: so_far + new)}
    chunks = [{"loss": torch.tensor(float(i)), "names": str(i)} for i in range(4)]
    merged = merge_chunks(chunks, spec)
    assert merged["loss"].item() == 6.0
    assert merged["names"] == "0123"


def test_a_reducer_starts_from_its_first_value() -> None:
    largest = Reducer(torch.tensor(2.5), torch.maximum)
    assert merge_chunks([torch.tensor(1.0), torch.tensor(2.0)], largest).item() == 2.5


def test_keys_may_come_in_another_order() -> None:
    chunks = [{"a": X, "b": 1}, {"b": 1, "a": X}]
    assert merge_chunks(chunks)["a"].shape == (8, 2)


@pytest.mark.parametrize(
    ("chunks", "spec", "message"),
    [
        ([], None, "no chunks"),
        ([{"a": X}, {"b": X}], None, "chunk 1 has another structure than the first chunk"),
        ([{"a": X}], {"a": None, "b": None}, r"chunk 0 .* than its spec: it lacks output\['b'\]"),
        ([(X, X)], (TensorChunkSpec(0),), r"it has an extra output\[1\]"),
        ([{"a": X}], TensorChunkSpec(0), "chunk 0 has another structure than its spec"),
        ([[3], [4]], None, r"output\[0\] differs between microbatches: 3 in the first, 4"),
        ([X.sum(), X.sum() + 1], None, "differs between microbatches"),
        ([X, X + 1], Replicated(), "differs between microbatches"),
        ([X, 3], None, "differs between microbatches"),
        ([3, 3], TensorChunkSpec(0), "output of chunk 0 is a int; its spec says a tensor"),
        ([X.sum()], TensorChunkSpec(0), "needs a Reducer"),
        ([X, X.T], None, "cannot be concatenated along dimension 0"),
    ],
)
def test_refused_merges(chunks: list[Any], spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_chunks(chunks, spec)


def block_mask(rows: int) -> BlockMask:
    lengths = torch.arange(1, rows + 1) * 40

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (k < lengths[b])

    return create_block_mask(inside, rows, 1, 256, 256, device="cpu")


@pytest.mark.parametrize(("rows", "chunks"), [(4, 2), (5, 2), (5, 3), (3, 3), (1, 2)])
def test_block_masks_are_divided_as_torch_divides_them(rows: int, chunks: int) -> None:
    mask, x = block_mask(rows), torch.randn(max(rows, chunks), 2)
    args, kwargs = split_args_kwargs_into_chunks((x, [mask]), {"mask": mask}, chunks)
    theirs, _ = oracle.split_args_kwargs_into_chunks((x, [mask]), {"mask": mask}, chunks)
    b, h, q, k = torch.meshgrid(
        torch.arange(rows), torch.zeros(1).long(), torch.arange(64), torch.arange(64), indexing="ij"
    )
    seen = []
    for ours, keyed, other in zip(args, kwargs, theirs, strict=True):
        mine, reference = ours[1][0], other[1][0]
        for part in (mine, keyed["mask"]):
            for name, value in vars(reference).items():
                if isinstance(value, Tensor):
                    assert torch.equal(getattr(part, name), value), name
            assert part.shape == reference.shape
        own = slice(0, mine.kv_num_blocks.shape[0])
        seen.append(mine.mask_mod(b[own], h[own], q[own], k[own]))
        assert torch.equal(seen[-1], reference.mask_mod(b[own], h[own], q[own], k[own]))
    if rows > 1:
        assert torch.equal(torch.cat(seen), mask.mask_mod(b, h, q, k))


def test_a_divided_block_mask_computes_what_the_whole_one_does() -> None:
    mask, x = block_mask(5), torch.randn(5, 2, 256, 8)
    args, _ = split_args_kwargs_into_chunks((x, mask), None, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        parts = [flex_attention(part, part, part, block_mask=m) for part, m in args]
        whole = flex_attention(x, x, x, block_mask=mask)
    assert torch.equal(torch.cat(parts), whole)


def test_block_masks_that_cannot_be_divided() -> None:
    mask, x = block_mask(2), torch.randn(4, 2)
    with pytest.raises(ValueError, match="a BlockMask, which is split along dimension 0"):
        split_args_kwargs_into_chunks((mask,), None, 2, (TensorChunkSpec(1),))
    with pytest.warns(
        UserWarning, match=r"args\[1\] has size 2 along dimension 0, too small for 4"
    ):
        assert len(split_args_kwargs_into_chunks((x, mask), None, 4)[0]) == 2
    args, _ = split_args_kwargs_into_chunks((x, mask), None, 2, (TensorChunkSpec(0), Replicated()))
    assert args[0][1] is args[1][1] is mask
    args, _ = split_args_kwargs_into_chunks((x, mask), None, 2, mask=True)
    assert args[0][1] is mask  # as full-size as the tensors


def test_specs_of_torch_count() -> None:
    x, y = torch.randn(4, 2), torch.randn(4, 6)
    spec = (oracle.TensorChunkSpec(1), oracle._Replicate())
    args, _ = split_args_kwargs_into_chunks((y, x), None, 3, spec)
    assert [part.shape for part, _ in args] == [(4, 2)] * 3
    assert all(whole is x for _, whole in args)
    losses = [torch.tensor(1.0), torch.tensor(2.0)]
    assert merge_chunks(losses, oracle.sum_reducer) == 3


def test_nested_dimensions() -> None:
    assert TensorChunkSpec.from_tuple((0, (1, [2]))) == (
        TensorChunkSpec(0),
        (TensorChunkSpec(1), [TensorChunkSpec(2)]),
    )
    assert TensorChunkSpec.from_dict({"a": {"b": 1}}) == {"a": {"b": TensorChunkSpec(1)}}


@pytest.mark.parametrize(
    ("args", "chunks"), [((torch.ones(4),), 2.5), ((torch.ones(4),), "2"), (torch.ones(4), 2)]
)
def test_arguments_of_other_kinds(args: Any, chunks: Any) -> None:
    with pytest.raises(ValueError, match=r"at least 1 microbatch|args is a Tensor"):
        split_args_kwargs_into_chunks(args, None, chunks)
