"""Values that share storage, are kept, or change hands between calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from zoo import MLP, MODELS, train_step

Step = Callable[..., Any]


class Average(nn.Module):
    """Keeps a moving average in a buffer and its last output in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("average", torch.zeros(()))
        self.last = torch.zeros(())
        self.activation: Callable[[Tensor], Tensor] = torch.tanh
        self.scale = [1.0]


def both(step: Step, make: Callable[[], list[Any]], calls: list[tuple[Any, ...]]) -> None:
    """What eager and captured calls return, kept to the end and compared then."""
    kept = []
    for run in (step, graphopt.compile(step)):
        torch.manual_seed(0)
        objects = make()
        results = [run(*objects, *arguments) for arguments in calls]
        kept.append(([r.detach() for r in results], [p.detach() for p in objects[0].parameters()]))
    for eager, captured in zip(*kept, strict=True):
        assert all(torch.equal(e, c) for e, c in zip(eager, captured, strict=True))


def batches(count: int) -> list[tuple[Tensor]]:
    return [(MODELS["mlp"].batch(i)[0],) for i in range(count)]


def test_returned_value_that_a_buffer_is_updated_to() -> None:
    def step(model: Average, x: Tensor) -> Tensor:
        new = 0.9 * model.average + 0.1 * model.layer(x).mean().detach()
        model.average.copy_(new)
        return new

    both(step, lambda: [Average()], batches(4))


def test_a_buffer_that_a_value_of_another_shape_is_copied_to() -> None:
    """The proof follows a `copy_` in place of a `copy` that repeats its source."""

    class Filled(Average):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("filled", torch.zeros(3, 1))

    def step(model: Filled, x: Tensor) -> Tensor:
        new = model.layer(x).mean().detach()
        model.filled.copy_(new)
        model.average.copy_(model.filled.sum())
        return model.average * model.filled

    both(step, lambda: [Filled()], batches(3))


@pytest.mark.parametrize("updated", ["whole", "same", "turned", "first", "inner", "every_second"])
def test_one_of_several_tensors_over_a_storage_is_updated(updated: str) -> None:
    class Several(Average):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.arange(4.0)
            views = {
                "whole": whole,
                "same": whole.detach(),
                "turned": whole.view(2, 2).t(),
                "first": whole[:2],
                "inner": whole[1:3],
                "every_second": whole[::2],
            }
            for name, view in views.items():
                self.register_buffer(name, view)

    def step(model: Several, x: Tensor) -> Tensor:
        getattr(model, updated).add_(model.layer(x).mean().detach())
        return torch.cat([each.flatten() for _, each in model.named_buffers()])

    both(step, lambda: [Several()], batches(3))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x.expand(3, 4),
    "a dimension before": lambda x: x.expand(1, 1, 3, 4)[0],
    "turned": lambda x: x.t().expand(4, 3),
    "as another": lambda x: x.expand_as(x),
    "a part": lambda x: x.narrow(0, 1, 1).expand(1, 4),
    "of a part": lambda x: x.expand(3, 4)[1:],
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_an_expand_that_repeats_nothing(name: str, shared: bool) -> None:
    """torch's functionalization adds a difference there, which rounds."""

    def step(model: Average, state: list[Tensor], x: Tensor) -> Tensor:
        with torch.no_grad():
            VIEWS[name](state[0]).mul_(1.1)
        return model.layer(x).mean() + state[0].sum()

    def make() -> list[Any]:
        state = torch.randn(3, 4)
        return [Average(), [state, state.view(-1)[:5] if shared else torch.zeros(1)]]

    kept = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, state = make()
        held = SimpleNamespace(state=state)

        def closed(x: Tensor, model: Any = model, held: Any = held) -> Tensor:
            return step(model, held.state, x)

        run = graphopt.compile(closed) if compiled else closed
        kept.append([[run(*each).item(), state[0].tolist()] for each in batches(3)])
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    "write", [lambda x: x.unfold(0, 2, 2).mul_(1.1), lambda x: x.unfold(0, 2, 3)[0].add_(1)]
)
def test_a_write_through_unfold_is_refused(write: Callable[[Tensor], Any]) -> None:
    def step(model: Average, x: Tensor) -> Tensor:
        write(model.scales)
        return model.layer(x).mean()

    model = Average()
    model.register_buffer("scales", torch.ones(5))
    with pytest.raises(graphopt.CaptureError, match="unfold"):
        graphopt.compile(step)(model, *batches(1)[0])
    assert torch.equal(model.get_buffer("scales"), torch.ones(5))


def test_tensor_attribute_that_the_user_keeps() -> None:
    def step(model: Average, x: Tensor) -> Tensor:
        model.last = model.layer(x).mean().detach() + model.last
        return model.last

    compiled, eager, captured = graphopt.compile(step), Average(), Average()
    captured.load_state_dict(eager.state_dict())
    kept: list[list[Tensor]] = [[], []]
    for (x,) in batches(4):
        step(eager, x)
        compiled(captured, x)
        kept[0].append(eager.last)
        kept[1].append(captured.last)
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert len(compiled.captures) == 1


def test_one_gradient_twice_in_a_list() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def step(model: Sum, x: Tensor) -> Tensor:
        loss = (model.w + model.v).square().mul(x[0, :3]).sum()
        gradients = torch.autograd.grad(loss, [model.w, model.v])
        with torch.no_grad():
            torch._foreach_add_([model.w, model.v], torch._foreach_mul(gradients, 0.5))
        return loss

    both(step, lambda: [Sum()], batches(3))


def test_operand_that_is_also_the_source() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x) + 1
        return hidden.index_add(0, torch.tensor([0, 1, 2, 3]), hidden)

    both(step, lambda: [MLP()], batches(2))


def test_replaced_storage() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        for parameter in model.parameters():
            parameter.data = parameter.data - 0.01 * parameter.grad
        return loss

    both(step, lambda: [MLP()], batches(3))


def test_the_same_object_in_another_place() -> None:
    def step(first: nn.Module, second: nn.Module, which: nn.Module, x: Tensor) -> Tensor:
        return which(x).sum() + 0 * first(x).sum() + 0 * second(x).sum()

    compiled = graphopt.compile(step)
    a, b = MLP(), MLP()
    (x,) = batches(1)[0]
    for which in (a, b, a):
        assert torch.equal(compiled(a, b, which, x), step(a, b, which, x).detach())


def test_state_that_is_none_at_first() -> None:
    def make() -> list[Any]:
        model = MLP()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = None
        return [model, optimizer]

    both(train_step, make, [MODELS["mlp"].batch(i) for i in range(4)])


class Clipped(torch.optim.SGD):
    """SGD with a setting that looks like a scheduler's."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            with torch.no_grad():
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.clamp(-group["max_norm"], group["max_norm"]))


def test_setting_with_a_name_like_a_schedulers() -> None:
    results = []
    for run in (train_step, graphopt.compile(train_step)):
        torch.manual_seed(0)
        model = MLP()
        optimizer = Clipped([{"params": list(model.parameters()), "max_norm": 1.0}], lr=0.1)
        for i in range(4):
            if i == 2:
                optimizer.param_groups[0]["max_norm"] = 1e-3
            run(model, optimizer, *MODELS["mlp"].batch(i))
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_function_and_list_attributes() -> None:
    def step(model: Average, x: Tensor) -> Tensor:
        return model.activation(model.layer(x)).sum() * model.scale[0]

    compiled, model = graphopt.compile(step), Average()
    (x,) = batches(1)[0]
    assert torch.equal(compiled(model, x), step(model, x).detach())
    model.activation = torch.sigmoid
    assert torch.equal(compiled(model, x), step(model, x).detach())
    model.scale[0] = 2.0
    assert torch.equal(compiled(model, x), step(model, x).detach())
    assert len(compiled.captures) == 3


def test_attention_backend_is_guarded() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x).reshape(1, 1, 4, -1)
        return F.scaled_dot_product_attention(hidden, hidden, hidden)

    compiled, model = graphopt.compile(step), nn.Linear(8, 16)
    (x,) = batches(1)[0]
    compiled(model, x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.equal(compiled(model, x), step(model, x).detach())
    assert len(compiled.captures) == 2


def test_argument_over_shared_storage_that_the_step_updates() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return model(y).sum()

    both_ways = torch.zeros(4, 9)
    with pytest.raises(graphopt.CaptureError, match="shares storage"):
        graphopt.compile(step)(MLP(), both_ways[:, :8], both_ways[:, 1:])


def test_views_that_part() -> None:
    """Two parameters over one storage at capture, each with its own later."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.arange(6.0)
            self.a, self.b = nn.Parameter(whole[:3]), nn.Parameter(whole[3:])

    def step(model: Two, x: Tensor) -> Tensor:
        return (model.a * x[0, :3]).sum() - (model.b * x[1, :3]).sum()

    compiled, model = graphopt.compile(step), Two()
    (x,) = batches(1)[0]
    assert torch.equal(compiled(model, x), step(model, x).detach())
    model.b.data = model.b.data.clone() * 2
    assert torch.equal(compiled(model, x), step(model, x).detach())
