"""Which parts of a graph are recorded, on graphs of fake CUDA tensors: no device is needed."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from cudagraphs_sketch import CUDA, CudaSketch, outside
from graphopt.lowering.cudagraphs.pieces import InputTransfer

aten = torch.ops.aten

CPU = torch.device("cpu")


def test_a_chain_on_one_device_is_one_piece() -> None:
    s = CudaSketch()
    w, x = s.input("w", 4, 4, kind="parameter"), s.input("x", 4, 4)
    last = s.chain(s.call(aten.mm.default, x, w), 6)
    found = s.found([last])
    (piece,) = found.pieces
    assert found.reasons == {}
    assert len(piece.nodes) == 7 and piece.device == CUDA and piece.group is None
    assert piece.inputs == {x: InputTransfer.COPIED, w: InputTransfer.STATIC}
    assert last in piece.leaving and piece.nodes[0] not in piece.leaving


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("parameter", InputTransfer.STATIC),
        ("buffer", InputTransfer.STATIC),
        ("optimizer_state", InputTransfer.STATIC),
        ("gradient", InputTransfer.COPIED),
        ("hyperparameter", InputTransfer.COPIED),
        ("user_input", InputTransfer.COPIED),
        ("carried", InputTransfer.COPIED),
    ],
)
def test_what_lives_between_calls_is_read_in_place(kind: str, way: InputTransfer) -> None:
    s = CudaSketch()
    x = s.input("x", 4, kind=kind)
    (piece,) = s.found([s.chain(x)]).pieces
    assert piece.inputs == {x: way}


Ending = Callable[[CudaSketch, fx.Node], fx.Node]


def _on_cpu(s: CudaSketch, x: fx.Node) -> fx.Node:
    copied = s.call(aten._to_copy.default, x, device=CPU)
    return s.call(aten._to_copy.default, s.call(aten.neg.default, copied), device=CUDA)


def _number(s: CudaSketch, x: fx.Node) -> fx.Node:
    number = s.call(aten._local_scalar_dense.default, s.call(aten.sum.default, x))
    return s.call(aten.mul.Tensor, x, s.call(operator.neg, number))


def _mask(s: CudaSketch, x: fx.Node) -> fx.Node:
    mask = s.call(aten.gt.Scalar, x, 0)
    return s.call(aten.index_put.default, x, [mask], s.call(aten.zeros.default, [], device=CUDA))


def _generator(s: CudaSketch, x: fx.Node) -> fx.Node:
    generator = s.graph.get_attr("generator")
    generator.meta["val"] = None
    return s.raw(aten.rand_like.generator, (x,), x.meta["val"], generator=generator)


def _cpu_number(s: CudaSketch, x: fx.Node) -> fx.Node:
    """Its value would become part of the kernel's arguments."""
    scale = s.call(aten.full.default, [], 2.0, device=CPU)
    return s.call(aten.mul.Tensor, x, scale)


ENDINGS: dict[str, tuple[Ending, str, str]] = {
    "work of the CPU": (_on_cpu, "neg", "on another device than cuda"),
    "a CPU tensor": (_cpu_number, "mul", "on another device than cuda"),
    "a value read back": (_number, "_local_scalar_dense", "waits for the device"),
    "a Python number": (_number, "mul", "a number that is computed in the graph"),
    "a Python operator": (_number, "<built-in function neg>", "Python numbers"),
    "a mask": (_mask, "index_put", "waits for the device"),
    "a generator": (_generator, "rand_like", "a generator of its own"),
    "a shape that depends on data": (
        lambda s, x: s.call(aten.sum.default, s.call(aten.nonzero.default, x)),
        "nonzero",
        "waits for the device",
    ),
    "a draw on the CPU": (
        lambda s, x: s.call(aten.add.Tensor, x, s.call(aten.randperm.default, 4, device=CUDA)),
        "randperm",
        "waits for the device",
    ),
    "checked linear algebra": (
        lambda s, x: s.call(aten.linalg_vector_norm.default, x),
        "linalg_vector_norm",
        "waits for the device",
    ),
    "a generator's state": (
        lambda s, x: (
            s.raw(torch.ops.graphopt.get_rng_state.default, (CUDA,), torch.empty(1)),
            s.call(aten.neg.default, x),
        )[1],
        "graphopt",
        "operators of graphopt",
    ),
    "an update of an argument": (
        lambda s, x: s.call(aten.add_.Tensor, next(iter(s.graph.nodes)), x),
        "add_",
        "no fixed address",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_node_that_cannot_be_recorded_ends_a_piece(name: str) -> None:
    end, operator_name, reason = ENDINGS[name]
    s = CudaSketch()
    first = s.chain(s.input("x", 4))
    between = end(s, first)
    found = s.found([s.chain(s.call(aten.add.Tensor, first, between))])
    assert reason in outside(found)[operator_name]
    assert len(found.pieces) == 2
    assert first in found.pieces[0].nodes and first not in found.pieces[0].leaving
    assert found.pieces[1].inputs[first] is InputTransfer.STATIC, (
        "it stays where the recording has put it"
    )


def test_indices_that_are_no_mask_end_nothing() -> None:
    s = CudaSketch()
    x, index = s.input("x", 4), s.input("index", 3, dtype=torch.int64)
    taken = s.call(aten.index.Tensor, s.chain(x), [index])
    put = s.call(aten.index_put.default, s.chain(x), [index], taken, True)
    found = s.found([put])
    assert len(found.pieces) == 1 and found.reasons == {}


def test_random_operators_of_the_default_generator_are_recorded() -> None:
    s = CudaSketch()
    x = s.chain(s.input("x", 4))
    mask = s.call(aten.bernoulli.p, x, 0.9)
    dropped = s.call(aten.native_dropout.default, s.call(aten.mul.Tensor, x, mask), 0.1, True)
    found = s.found([s.call(operator.getitem, dropped, 0), s.call(operator.getitem, dropped, 1)])
    assert len(found.pieces) == 1 and found.reasons == {}


def test_numbers_that_shapes_determine_are_part_of_a_recording() -> None:
    """As attention passes lengths of its inputs from forward to backward."""
    s = CudaSketch()
    x = s.chain(s.input("x", 4))
    pair = s.raw(aten._scaled_dot_product_flash_attention.default, (x, x, x), (x.meta["val"], 8))
    value, length = s.call(operator.getitem, pair, 0), s.call(operator.getitem, pair, 1)
    found = s.found([s.call(aten.mul.Tensor, s.chain(value), length)])
    assert len(found.pieces) == 1 and found.reasons == {}


def test_operators_of_other_libraries_are_not_recorded() -> None:
    s = CudaSketch()
    x = s.chain(s.input("x", 4))
    unknown = s.raw(torch.ops.inductor.resize_storage_bytes_.default, (x, 0), None)
    s.chain(x)
    found = s.found([x])
    assert "operators of inductor do besides" in found.reasons[unknown]


def test_a_piece_runs_on_one_device() -> None:
    s = CudaSketch()
    x, y = s.input("x", 4), s.input("y", 4, device=torch.device("cuda:1"))
    found = s.found([s.chain(x), s.chain(y)])
    assert [piece.device.index for piece in found.pieces] == [0, 1]


# ---------------------------------------------------------------------------- sizes and updates


@pytest.mark.parametrize(("operators", "recorded"), [(4, False), (5, True)])
def test_a_piece_is_worth_its_copies(operators: int, recorded: bool) -> None:
    """One input is copied, so that four operators are not enough."""
    s = CudaSketch()
    found = s.found([s.chain(s.input("x", 4), operators)])
    assert len(found.pieces) == recorded
    assert recorded or "too few operators" in outside(found)["sin"]


def test_much_is_not_copied_for_little() -> None:
    """A reduced bucket is not copied in order to record the optimizer that reads it."""
    for size, recorded in ((2**10, True), (2**23, False)):
        s = CudaSketch()
        found = s.found([s.chain(s.input("x", size))])
        assert len(found.pieces) == recorded


def test_results_of_parts_that_are_too_small_are_copied() -> None:
    s = CudaSketch()
    x = s.input("x", 4)
    small = s.chain(x, 2)
    read = s.call(aten._local_scalar_dense.default, s.call(aten.sum.default, small))
    found = s.found([s.chain(small)])
    (piece,) = found.pieces
    assert read in found.reasons and piece.inputs == {small: InputTransfer.COPIED}


def test_views_alone_are_no_piece_and_end_none() -> None:
    s = CudaSketch()
    x = s.input("x", 4, 4)
    views = x
    for _ in range(20):
        views = s.call(aten.t.default, views)
    found = s.found([s.chain(views, 3)])
    assert found.pieces == []


@pytest.mark.parametrize("kind", ["parameter", "buffer", "optimizer_state"])
def test_state_is_updated_in_a_recording(kind: str) -> None:
    s = CudaSketch()
    state, x = s.input("state", 4, kind=kind), s.input("x", 4)
    updated = s.call(aten.add_.Tensor, state, s.chain(x))
    (piece,) = s.found([], updates=[updated]).pieces
    assert piece.written == {state} and updated in piece.nodes


def test_a_value_of_an_earlier_piece_may_be_updated_unless_it_leaves() -> None:
    for leaves in (False, True):
        s = CudaSketch()
        value = s.chain(s.input("x", 4))
        s.call(aten._local_scalar_dense.default, s.call(aten.sum.default, value))
        updated = s.call(aten.mul_.Tensor, s.chain(s.input("y", 4)), 2)
        inplace = s.call(aten.add_.Tensor, value, updated)
        found = s.found([s.chain(updated), *([value] if leaves else [])])
        assert (inplace in found.reasons) is leaves
        for piece in found.pieces:
            assert (inplace in piece.nodes) <= (not leaves)
