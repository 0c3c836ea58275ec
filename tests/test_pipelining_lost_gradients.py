"""Gradients that export would lose: refused with the line; custom operators keep theirs."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from graphopt.pipelining import LostGradientError, pipe_split, pipeline, reduce_replicated_gradients

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(path), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Sign(Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return g[0]


def sign(x: Tensor) -> Tensor:
    return Sign.apply(x)


BOUND = Sign.apply


class Reversed(Function):
    """A view of its argument; the context is set up apart."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return -g[0] * ctx.factor, None


@torch.library.custom_op("graphopt_test::sevenfold", mutates_args=())
def sevenfold(x: Tensor) -> Tensor:
    return x.sin()


sevenfold.register_fake(torch.empty_like)
sevenfold.register_autograd(lambda ctx, g: g * 7)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return sevenfold(x @ self.weight)


class Model(nn.Module):
    """`change` stands between two layers, before the boundary."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.inner = nn.Linear(4, 4), nn.Linear(4, 4), Inner()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.change(self, self.first(x))
        pipe_split()
        return self.second(y) + y


@torch.compiler.allow_in_graph
def allowed(y: Tensor) -> Tensor:
    return Sign.apply(y) * 2


def no_grad_region(m: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = y.sign() - y
    return y + z


def autocast_region(m: Any, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (m.second(y) * sevenfold(y)).float()


def gradient(m: Any, y: Tensor) -> Tensor:
    return torch.autograd.grad((y**3).sum(), y)[0] + y


def gradient_with_graph(m: Any, y: Tensor) -> Tensor:
    return torch.autograd.grad((sevenfold(y) * y**3).sum(), [y], create_graph=True)[0] + y


def saved_on_cpu(m: Any, y: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return y.exp()


def inference(m: Any, y: Tensor) -> Tensor:
    with torch.inference_mode():
        z = y.sign()
    return y + z


EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "parameter, nested module": lambda m, y: m.inner(y),
    "no_grad": no_grad_region,
    "autocast": autocast_region,
    "checkpoint": lambda m, y: checkpoint(m.inner, y, use_reentrant=False),
    "custom operator": lambda m, y: sevenfold(y),
    "autograd.grad": gradient,
    "autograd.grad with graph": gradient_with_graph,
    "detach": lambda m, y: y + (y.sign() - y).detach(),
    "data": lambda m, y: y + (y.sign() - y).data,
    "inference mode": inference,
    "save_on_cpu": saved_on_cpu,
    "grad_fn looked at": lambda m, y: y * (2 if y.grad_fn is not None else 3),
    "retain_grad": lambda m, y: (y.retain_grad(), y * 2)[1],
}


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def backward(output: Tensor, target: Any = None) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_those_of_the_model(name: str) -> None:
    model = Model(EXACT[name])
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = twin(X)
    backward(expected).backward()
    pipe = pipeline(model, (X,))
    torch.manual_seed(1)
    result = pipe(X)
    backward(result).backward()
    assert torch.equal(result, expected)
    gradients = {n: p.grad for n, p in twin.named_parameters()}
    assert all(same(p.grad, gradients[n]) for n, p in model.named_parameters())
    for compiled in (False, True):
        model.zero_grad()
        stages = [pipe.build_stage(index, "cpu") for index in range(2)]
        for stage in stages if compiled else ():
            stage.compile()
        torch.manual_seed(1)
        schedule = ScheduleInterleaved1F1B(stages, 1, loss_fn=backward, scale_grads=False)
        schedule.step(X, target=X)
        reduce_replicated_gradients(*stages)
        for stage in stages:
            for n, p in stage.submod.named_parameters():
                assert same(p.grad, gradients[n]), (n, compiled)


def test_other_threads_are_left_alone() -> None:
    """A function that another thread applies while this one exports."""
    results: list[Any] = []

    def change(m: Any, y: Tensor) -> Tensor:
        def run() -> None:
            x = torch.ones(2, requires_grad=True)
            sign(x).sum().backward()
            results.append(x.grad)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return y.sign()

    pipeline(Model(change), (X,))
    assert torch.equal(results[0], torch.ones(2))


# ---------------------------------------------------------------------------- refused


def swallowed(m: Any, y: Tensor) -> Tensor:
    try:
        y.register_hook(lambda g: g * 2)
    except Exception:
        return y * 1
    return y * 1


def swallowed_function(m: Any, y: Tensor) -> Tensor:
    try:
        return sign(y)
    except Exception:
        return y * 1


def hooked_saves(m: Any, y: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return y.exp()


def in_cond(m: Any, y: Tensor) -> Tensor:
    return torch.cond(y.sum() > 0, lambda x: Sign.apply(x), lambda x: x.cos(), (y,))


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "function": (lambda m, y: sign(y), "the backward of an autograd.Function Sign"),
    "context set up apart": (lambda m, y: Reversed.apply(y, 2.0), "autograd.Function Reversed"),
    "swallowed function": (swallowed_function, "autograd.Function Sign"),
    "allow_in_graph": (lambda m, y: allowed(y), "autograd.Function Sign"),
    "bound before": (lambda m, y: BOUND(y), "autograd.Function Sign"),
    "function in a checkpoint": (
        lambda m, y: checkpoint(sign, y, use_reentrant=False),
        "autograd.Function Sign",
    ),
    "hook": (lambda m, y: (y.register_hook(lambda g: g * 2), y * 1)[1], "a hook on a tensor"),
    "parameter hook": (
        lambda m, y: (m.first.weight.register_hook(lambda g: g * 2), y)[1],
        "a hook on a tensor",
    ),
    "node hook": (
        lambda m, y: (y.grad_fn.register_prehook(lambda g: None), y * 1)[1],
        "a hook on a node of autograd",
    ),
    "several hooks": (
        lambda m, y: (torch.autograd.graph.register_multi_grad_hook((y,), lambda g: None), y)[1],
        "a hook on",
    ),
    "swallowed": (swallowed, "a hook on a tensor"),
    "saved tensors": (hooked_saves, "hooks on saved tensors"),
    "backward": (
        lambda m, y: (y.sum().backward(retain_graph=True), y * 1)[1],
        "a backward inside of forward",
    ),
    "checkpoint": (lambda m, y: checkpoint(m.inner, y, use_reentrant=True), "use_reentrant=True"),
    "frozen": (lambda m, y: (m.second.weight.requires_grad_(False), y)[1], "frozen or unfrozen"),
    "cond": (in_cond, "the backward of an autograd.Function would be lost"),
}


# Of Dynamo, which captures the branches of a cond.
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused(name: str) -> None:
    change, message = REFUSED[name]
    model = Model(change)
    before = {n: (p, p.requires_grad) for n, p in model.named_parameters()}
    with pytest.raises(LostGradientError, match=message) as caught:
        pipeline(model, (X,))
    assert {n: (p, p.requires_grad) for n, p in model.named_parameters()} == before
    assert caught.value.hint
    if name != "cond":  # its branches are compiled
        assert str(inspect.getsourcefile(type(model))) in str(caught.value.location)
    # Nothing stays behind.
    assert torch.equal(sign(X), X.sign())
    pipeline(Model(EXACT["custom operator"]), (X,))


@pytest.mark.parametrize(
    "method", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_of_modules_are_refused(method: str) -> None:
    model = Model(EXACT["custom operator"])
    handle = getattr(model.second, method)(lambda *args: None)
    with pytest.raises(LostGradientError, match=r"module 'second' \(Linear\) has a backward hook"):
        pipeline(model, (X,))
    handle.remove()
    assert pipeline(model, (X,)).num_stages == 2
