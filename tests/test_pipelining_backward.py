"""The backward of one stage, called by itself."""

from __future__ import annotations

import pytest
import torch

from graphopt.pipelining import stage_backward
from graphopt.pipelining.pipe.backward import add_gradients, cut


def test_gradients_of_inputs_are_returned_and_those_of_parameters_accumulate() -> None:
    x, w = torch.randn(3, requires_grad=True), torch.ones(3, requires_grad=True)
    w.grad = torch.ones(3)
    (gradient,) = stage_backward(x * w, torch.full((3,), 2.0), [x])
    assert torch.equal(gradient, torch.full((3,), 2.0))
    assert torch.equal(w.grad, 2 * x + 1)
    assert x.grad is None


def test_only_the_named_outputs_start_the_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    outputs = [x * 2, x * 3, 5]
    grads = [torch.ones(3), None, None]
    (gradient,) = stage_backward(outputs, grads, [x], outputs_with_grads_idxs=[0])
    assert torch.equal(gradient, torch.full((3,), 2.0))


def test_a_loss_needs_no_gradient() -> None:
    x = torch.randn(3, requires_grad=True)
    (gradient,) = stage_backward(x.sum(), None, [x])
    assert torch.equal(gradient, torch.ones(3))


def test_inputs_that_are_no_leaves_or_no_tensors() -> None:
    leaf = torch.randn(3, requires_grad=True)
    x, mask = leaf * 2, torch.ones(3, dtype=torch.bool)
    gradients = stage_backward((x * mask,), (torch.ones(3),), [x, mask, 4, torch.ones(3)])
    assert torch.equal(gradients[0], torch.ones(3))
    assert gradients[1:] == (None, None, None)


def test_outputs_without_gradient_are_left_out() -> None:
    x = torch.randn(3, requires_grad=True)
    assert stage_backward([torch.ones(3), x * 2], [torch.ones(3), None], [x]) == (None,)
    with torch.no_grad():
        assert stage_backward(x.sum(), None, [x]) == (None,)


def test_received_values_are_leaves_of_their_stage() -> None:
    x = torch.randn(3, requires_grad=True) * 2
    received = cut(x)
    assert received.is_leaf
    assert received.requires_grad
    assert received.data_ptr() == x.data_ptr()
    assert not cut(torch.ones(3)).requires_grad
    assert cut("text") == "text"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(None, None, None), (1.0, None, 1.0), (None, 2.0, 2.0), (1.0, 2.0, 3.0)],
)
def test_no_gradient_is_nothing_to_add(
    one: float | None, other: float | None, expected: float | None
) -> None:
    total = add_gradients(*(None if v is None else torch.tensor(v) for v in (one, other)))
    assert (None if total is None else total.item()) == expected
