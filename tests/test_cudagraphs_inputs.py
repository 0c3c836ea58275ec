"""How a recording reads its inputs, at addresses that stay the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphopt._compat import cuda
from graphopt.errors import LoweringError
from graphopt.ir.inplace import uninitialised_like
from graphopt.lowering.cudagraphs.pieces import InputTransfer
from graphopt.lowering.cudagraphs.replay import Input, PieceInputs, copy_of

CPU = torch.device("cpu")


def inputs_of(**ways: InputTransfer) -> PieceInputs:
    return PieceInputs([Input(name, way) for name, way in ways.items()], CPU)


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
        [Input("w", InputTransfer.STATIC, written=True), Input("x", InputTransfer.STATIC)], CPU
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
