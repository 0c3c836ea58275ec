"""Steps that give tensors another shape in place, against eager: what they compute, and what the
program finds in its tensors afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt

CALLS = 4

# What a step does with its argument, and of which shape that is.
USES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "unsqueeze": (lambda x: x.unsqueeze_(-1).sum(-1), (3, 4)),
    "squeeze": (lambda x: x.squeeze_(), (3, 1, 4)),
    "squeeze one of them": (lambda x: x.squeeze_(0).squeeze_(0), (1, 3, 4)),
    "transposed": (lambda x: x.t_(), (4, 3)),
    "several, one behind the other": (lambda x: x.transpose_(0, 1).unsqueeze_(0)[0], (4, 3)),
    "other names": (lambda x: x.swapaxes_(0, 1).swapdims_(0, 1), (3, 4)),
    "strided": (lambda x: x.as_strided_((3, 2), (4, 2)).repeat(1, 2), (3, 4)),
    "shrunk": (lambda x: x.resize_(2, 4), (3, 4)),
    "shrunk like another one": (lambda x: x.resize_as_(torch.zeros(1, 4)), (3, 4)),
    "written to afterwards": (lambda x: x.t_().mul_(2), (4, 3)),
    "written to before": (lambda x: x.add_(1).unsqueeze_(0)[0], (3, 4)),
    "seen through a view made before": (lambda x: _through(x[1:], x.t_()), (4, 3)),
    "and back": (lambda x: x.unsqueeze_(0).mul_(2).squeeze_(0), (3, 4)),
    "returned": (lambda x: [x.t_()], (4, 3)),
    "part of it returned": (lambda x: [x.t_()[:2]], (4, 3)),
}


def _through(view: Tensor, x: Tensor) -> Tensor:
    view.zero_()
    return x


def trained(use: Callable[[Tensor], Any], shape: tuple[int, ...], compiled: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, Any]) -> Any:
        used = use(batch["parts"][0])
        value = used[0] if isinstance(used, list) else used
        loss = model(F.pad(value, (0, 4 - value.shape[-1]))).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, used

    run: Any = graphopt.compile(step) if compiled else step
    batches = [{"parts": [torch.randn(shape)]} for _ in range(CALLS)]
    found = [run(batch) for batch in batches]
    arguments = [batch["parts"][0] for batch in batches]
    strides = [(x.shape, x.stride(), x.untyped_storage().nbytes()) for x in arguments]
    returned = [used[0] for _, used in found if isinstance(used, list)]
    identical = [a.data_ptr() == b.data_ptr() for a, b in zip(returned, arguments, strict=False)]
    left = [*arguments, *(loss for loss, _ in found), *returned, model.weight.detach()]
    return left, (strides, identical), len(run.captures) if compiled else 1


@pytest.mark.parametrize("name", USES)
def test_arguments_are_those_of_eager(name: str) -> None:
    use, shape = USES[name]
    expected, kinds, _ = trained(use, shape, compiled=False)
    found, same_kinds, captures = trained(use, shape, compiled=True)
    assert all(map(torch.equal, found, expected))
    assert same_kinds == kinds
    assert captures == 1


def test_the_same_tensor_again_is_another_shape() -> None:
    def run(compiled: bool) -> tuple[list[Tensor], Tensor, int]:
        torch.manual_seed(0)
        model, x = nn.Linear(3, 3), torch.randn(3, 3)

        def step(x: Tensor) -> Tensor:
            x.t_().mul_(1.5)
            return model(x).sum()  # type: ignore[no-any-return]

        called: Any = graphopt.compile(step) if compiled else step
        results = [called(x).detach() for _ in range(5)]
        return [*results, x], x, len(called.captures) if compiled else 2

    (expected, x, _), (found, y, captures) = run(False), run(True)
    assert all(map(torch.equal, found, expected))
    assert x.stride() == y.stride()
    assert captures == 2


def test_a_tensor_from_outside_is_put_back_by_the_step_itself() -> None:
    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, noise = nn.Linear(4, 4), torch.randn(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            noise.unsqueeze_(0)
            with torch.no_grad():
                y = x + noise
            noise.squeeze_(0).mul_(0.5)
            loss = model(y).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        called: Any = graphopt.compile(step) if compiled else step
        return [*(called(torch.randn(3, 4)).detach() for _ in range(3)), noise, model.weight]

    assert all(map(torch.equal, run(True), run(False)))


def test_a_tensor_of_the_model_that_stays_so_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.ones(4))

    def step(model: Any, x: Tensor) -> Tensor:
        model.scale.unsqueeze_(0)
        return model(x) * model.scale  # type: ignore[no-any-return]

    with pytest.raises(graphopt.CaptureError, match="a tensor of the model") as caught:
        graphopt.compile(step)(model, torch.randn(3, 4))
    assert __file__ in str(caught.value.location)
    assert model.scale.shape == (4,)


def test_a_refused_step_leaves_the_shape() -> None:
    def step(model: Any, x: Tensor) -> Tensor:
        x.t_()
        max([x.sum()], key=float)
        return model(x)  # type: ignore[no-any-return]

    x = torch.randn(4, 3)
    with pytest.raises(graphopt.CaptureError):
        graphopt.compile(step)(nn.Linear(4, 4), x)
    assert x.shape == (4, 3)
