"""Which parts of a graph are recorded as CUDA graphs, and how a recording reads its inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from cudagraphs_sketch import CUDA, CudaSketch, outside
from graphopt._compat import cuda
from graphopt.errors import LoweringError
from graphopt.ir.inplace import uninitialised_like
from graphopt.lowering.cudagraphs.pieces import InputTransfer
from graphopt.lowering.cudagraphs.replay import PieceInput, PieceInputs, copy_of

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


def inputs_of(**ways: InputTransfer) -> PieceInputs:
    return PieceInputs([PieceInput(name, way) for name, way in ways.items()], CPU)


def test_a_static_input_is_read_where_it_is_and_others_from_a_buffer() -> None:
    inputs = inputs_of(w=InputTransfer.STATIC, x=InputTransfer.COPIED, number=InputTransfer.NUMBER)
    w, x = torch.ones(2), torch.ones(2)
    bound = inputs.bind([w, x, 3])
    assert bound[0] is w and bound[2] == 3
    assert bound[1] is not x and torch.equal(bound[1], x)
    other = torch.full((2,), 5.0)
    assert inputs.changed([w, other, 3]) == []
    inputs.load([w, other, 3])
    assert torch.equal(bound[1], other)


def test_what_changed_is_named() -> None:
    inputs = inputs_of(w=InputTransfer.STATIC, v=InputTransfer.STATIC, number=InputTransfer.NUMBER)
    w, v = torch.ones(2), torch.ones(2)
    inputs.bind([w, v, 3])
    assert inputs.changed([w, torch.ones(2), 3]) == ["v"]
    inputs.bind([w, v, 3])
    assert inputs.changed([w, v, 4]) == ["number"]


def test_data_of_a_parameter_that_is_replaced_is_seen() -> None:
    """The parameter is the same object, at another address."""
    inputs = inputs_of(w=InputTransfer.STATIC)
    w = torch.nn.Parameter(torch.ones(2))
    inputs.bind([w])
    w.data = torch.zeros(2)
    assert inputs.changed([w]) == ["w"]


def test_a_learning_rate_is_written_as_it_is_when_it_is_loaded() -> None:
    """Float64 on the CPU, as the user sets it; float32 where the kernel reads it."""
    inputs = inputs_of(lr=InputTransfer.SCALAR)
    lr = torch.tensor(0.1, dtype=torch.float64)
    (buffer,) = inputs.bind([lr])
    assert buffer.dtype is torch.float32 and float(buffer) == float(torch.tensor(0.1))
    lr.fill_(0.25)
    assert inputs.changed([lr]) == [] and float(buffer) == float(torch.tensor(0.1))
    inputs.load([lr])
    assert float(buffer) == 0.25
    assert inputs.bind([lr])[0] is buffer


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(3.0).expand(4, 3),
        torch.arange(4.0).view(4, 1).expand(4, 5),
        torch.arange(24.0).view(2, 3, 4)[:, ::2, 1:3],
        torch.ones(()).expand(2, 2),
        torch.empty(0, 3),
        torch.arange(8.0)[4:],
    ],
    ids=["transposed", "rows", "columns", "gaps", "scalar", "empty", "offset"],
)
def test_a_buffer_has_the_strides_that_compiled_code_was_made_for(value: Tensor) -> None:
    inputs = inputs_of(x=InputTransfer.COPIED)
    (buffer,) = inputs.bind([value])
    assert buffer.stride() == value.stride() and torch.equal(buffer, value)
    other = copy_of(value)
    other.as_strided((other.untyped_storage().nbytes() // 4,), (1,)).add_(1)
    assert inputs.changed([other]) == []
    inputs.load([other])
    assert torch.equal(buffer, value + 1)
    assert torch.equal(copy_of(value), value) and copy_of(value).stride() == value.stride()


def test_the_buffer_of_an_input_whose_strides_change_stays() -> None:
    inputs = inputs_of(x=InputTransfer.COPIED)
    (buffer,) = inputs.bind([torch.ones(3, 3)])
    assert inputs.bind([torch.arange(9.0).view(3, 3).t()])[0] is buffer
    assert torch.equal(buffer, torch.arange(9.0).view(3, 3).t())
    assert inputs.bind([torch.ones(4)])[0].shape == (4,)


def test_a_buffer_of_one_element_does_not_take_several() -> None:
    inputs = inputs_of(x=InputTransfer.COPIED)
    inputs.bind([torch.ones(1).expand(4)])
    assert inputs.changed([torch.arange(4.0)]) == ["x"]
    assert torch.equal(inputs.bind([torch.arange(4.0)])[0], torch.arange(4.0))


def test_a_tensor_whose_elements_share_memory_is_refused() -> None:
    windows = torch.arange(6.0).unfold(0, 3, 1)
    with pytest.raises(LoweringError, match=r"elements of %x share memory"):
        inputs_of(x=InputTransfer.COPIED).bind([windows])


@pytest.mark.parametrize("way", [InputTransfer.STATIC, InputTransfer.COPIED])
def test_a_tensor_on_another_device_is_refused(way: InputTransfer) -> None:
    with pytest.raises(LoweringError, match=r"%x is on meta, not on cpu"):
        inputs_of(x=way).bind([torch.ones(2, device="meta")])


def test_only_what_is_not_updated_is_copied_once_its_address_changed_twice() -> None:
    inputs = PieceInputs(
        [
            PieceInput("w", InputTransfer.STATIC, written=True),
            PieceInput("x", InputTransfer.STATIC),
        ],
        CPU,
    )
    kept = [[torch.ones(2), torch.ones(2)] for _ in range(4)]
    inputs.bind(kept[0])
    assert inputs.changed(kept[1]) == ["w", "x"]
    inputs.bind(kept[1])
    assert inputs.changed(kept[2]) == ["w", "x"]
    bound = inputs.bind(kept[2])
    assert bound[0] is kept[2][0] and bound[1] is not kept[2][1]
    assert inputs.changed(kept[3]) == ["w"]


def test_what_lies_in_a_buffer_is_known() -> None:
    inputs = inputs_of(x=InputTransfer.COPIED, w=InputTransfer.STATIC)
    x, w = inputs.bind([torch.ones(3), torch.ones(3)])
    assert inputs.is_buffer(x[1:]) and not inputs.is_buffer(w)


def test_addresses_are_compared_at_the_given_places_alone() -> None:
    a, b = torch.ones(1), torch.ones(1)
    addresses = [a.data_ptr(), None, b.data_ptr()]
    assert cuda.same_addresses([a, 5, b], addresses, [0, 2])
    assert cuda.same_addresses([b, 5, b], addresses, [2])
    assert not cuda.same_addresses([b, 5, b], addresses, [0, 2])


def test_a_tensor_of_the_same_layout_takes_no_more_memory_than_it_needs() -> None:
    made = uninitialised_like(torch.ones(1000)[:10])
    assert made.untyped_storage().nbytes() == 40
