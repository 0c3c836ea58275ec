"""Ways in which a program holds parameters and optimizer state, and what it does with them.

A case is a holder and an action. The holder takes what it wants from the eager and the captured
twin before the steps; the action uses that between two steps, when an update is in flight, and
gives what it has read. `VIEWS` hold memory in ways that nobody sees being used, so that updates
must stay in their own step while they live.
"""

from __future__ import annotations

import collections
import copy
import functools
import io
import itertools
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import to_dlpack

from twins import World

Tensors = list[Tensor]
Holder = Callable[[World], Any]
Action = Callable[[Any], Any]

# ---------------------------------------------------------------- what is done with held tensors


def no_grad(action: Action) -> Action:
    def without_history(held: Any) -> Any:
        with torch.no_grad():
            return action(held)

    return without_history


def copies(tensors: Any) -> Tensors:
    return [tensor.detach().clone() for tensor in tensors]


class Average:
    """An exponential average, made of what it is first given."""

    def __init__(self, tensors: Tensors) -> None:
        self.values = [torch.zeros(t.shape) for t in tensors]

    def update(self, tensors: Tensors) -> Tensors:
        torch._foreach_lerp_(self.values, list(tensors), 0.1)
        return self.values


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Tracing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Logged(Tensor):
    """A subclass of the user's own that looks at what it is computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def within(mode: Callable[[], Any], action: Action) -> Action:
    def inside(held: Any) -> Any:
        with mode():
            return action(held)

    return inside


def in_thread(action: Action) -> Action:
    def threaded(held: Any) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(action(held)))
        thread.start()
        thread.join()
        return found[0]

    return threaded


def round_trip(held: Tensors) -> Any:
    file = io.BytesIO()
    torch.save(list(held), file)
    file.seek(0)
    return copies(torch.load(file))


def backward_through(held: Tensors) -> Tensors:
    return list(torch.autograd.grad(sum((p * p).sum() for p in held), held))  # type: ignore[arg-type]


def backward_of_function(held: Tensors) -> Tensors:
    return list(torch.autograd.grad(sum(Double.apply(p).sum() for p in held), held))


def new_optimizer(held: Tensors) -> None:
    optimizer = torch.optim.SGD(held, lr=0.5, momentum=0.9)
    for p in held:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def clip(held: Tensors) -> Any:
    for p in held:
        p.grad = p.detach().clone()
    norm = nn.utils.clip_grad_norm_(held, 0.1)
    found = [norm, *(p.grad.clone() for p in held if p.grad is not None)]
    for p in held:
        p.grad = None
    return found


def summed_over_ranks(held: Tensors) -> None:
    for p in held:
        dist.all_reduce(p)
        p /= 2


def given_out(held: Tensors) -> Any:
    return [torch.add(p, 1, out=torch.empty_like(p)) for p in held]


def written_out(held: Tensors) -> None:
    for p in held:
        torch.mul(torch.ones_like(p), 0.1, out=p)


def vector(held: Tensors) -> Any:
    return nn.utils.parameters_to_vector(held).detach()


def vector_back(held: Tensors) -> None:
    nn.utils.vector_to_parameters(torch.linspace(-0.1, 0.1, sum(p.numel() for p in held)), held)


def _scripted(x: Tensor) -> Tensor:
    return x * 3


def _scripted_list(xs: list[Tensor]) -> Tensor:
    return xs[0].sum() + xs[1].sum()


def scripted(held: Tensors) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function, of_list = torch.jit.script(_scripted), torch.jit.script(_scripted_list)
    return [function(held[0]), function(held[-1]), of_list(list(held)[:2])]


def texts(held: Tensors) -> Any:
    return [repr(held[0]), str(held[1]), f"{held[0].sum()}"]


def each(function: Callable[[Any], Any]) -> Action:
    return lambda held: [function(p) for p in held]


def every(function: Callable[[Any], Any]) -> Action:
    """An action that changes each tensor, and gives nothing."""

    def change(held: Any) -> None:
        for p in held:
            function(p)

    return no_grad(change)


def assigned(p: Tensor) -> None:
    p.data = p.data * 0.5


READERS: dict[str, Action] = {
    "clone": copies,
    "arithmetic": no_grad(each(lambda p: 1 + p * 2 - p / 3)),
    "reflected": no_grad(each(lambda p: 2.0**p)),
    "foreach norm": no_grad(lambda h: list(torch._foreach_norm(list(h)))),
    "numpy": each(lambda p: p.detach().numpy().tolist()),
    "tolist": each(lambda p: p.tolist()),
    "item": each(lambda p: p.detach().flatten()[0].item()),
    "float": each(lambda p: float(p.detach().sum())),
    "indexed": no_grad(each(lambda p: p[0] * 1)),
    "iterated": no_grad(each(lambda p: [row.clone() for row in p])),
    "repr": texts,
    "equal": each(lambda p: torch.equal(p, torch.zeros_like(p))),
    "compared": no_grad(each(lambda p: p > 0.1)),
    "contains": each(lambda p: 0.0 in p),
    "deepcopy": lambda h: copies(copy.deepcopy(list(h))),
    "copy": lambda h: copies(map(copy.copy, h)),
    "pickle": lambda h: copies(pickle.loads(pickle.dumps(list(h)))),
    "save": round_trip,
    "out of": no_grad(given_out),
    "unbound method": each(lambda p: torch.Tensor.clone(p).detach()),
    "operator": no_grad(each(lambda p: torch.ops.aten.mul.Tensor(p, p))),
    "scripted": no_grad(scripted),
    "dlpack": each(lambda p: torch.from_dlpack(p.detach()).clone()),
    "array": each(lambda p: np.asarray(p.detach()).copy().tolist()),
    "tree_map": no_grad(lambda h: _pytree.tree_map(lambda p: p * 2, list(h))),
    "stacked": no_grad(lambda h: torch.cat([p.flatten() for p in h])),
    "vmap": no_grad(each(torch.vmap(lambda x: x * 2))),
    "norm": no_grad(each(torch.linalg.vector_norm)),
    "as_tensor": no_grad(each(lambda p: torch.as_tensor(p, dtype=torch.float64))),
    "to": no_grad(each(lambda p: p.to(torch.float64))),
    "function mode": within(Tracing, no_grad(each(lambda p: p * 2))),
    "dispatch mode": within(Counting, no_grad(each(lambda p: p * 2))),
    "no torch function": within(
        torch._C.DisableTorchFunctionSubclass, no_grad(each(lambda p: torch.mul(p, 2)))
    ),
    "inference mode": within(torch.inference_mode, each(lambda p: (p * 2).tolist())),
    "default device": within(lambda: torch.device("cpu"), no_grad(each(lambda p: p * 2))),
    "own subclass": no_grad(
        each(lambda p: (torch.ones_like(p).as_subclass(Logged) * p).as_subclass(Tensor))
    ),
    "lerp": lambda h: Average(h).update([t.detach() for t in h]),
    "lerp of itself": no_grad(lambda h: Average(h).update(h)),
    "thread": in_thread(copies),
    "thread in no_grad": in_thread(no_grad(each(lambda p: p.sum()))),
    "where": no_grad(each(lambda p: torch.where(p > 0, p, 0.0))),
    "einsum": no_grad(each(lambda p: torch.einsum("i...->i", p))),
    "histogram": each(lambda p: torch.histc(p.detach(), 4)),
    "checkpointed": no_grad(
        each(lambda p: torch.utils.checkpoint.checkpoint(lambda x: x * 2, p, use_reentrant=False))
    ),
    "version": each(lambda p: p._version * 0),
    "broadcast": no_grad(each(lambda p: torch.broadcast_tensors(p, p)[0].clone())),
    "sorted": each(lambda p: sorted(p.detach().flatten().tolist())),
    "any": each(lambda p: bool((p != p).any())),
    "bytes": each(lambda p: bytes(p.detach().untyped_storage())),
    "__class__": each(lambda p: [p.__class__(p.detach() * 2).detach(), p.__class__.__name__]),
    "type": each(lambda p: [type(p)(p.detach() * 2).detach()]),
    "isinstance": each(lambda p: [isinstance(p, Tensor), type(p).__name__, p.detach() * 1]),
    "metadata": each(lambda p: [str(p.shape), p.numel(), str(p.dtype), p.is_leaf, len(p), p.dim()]),
    "pools": lambda h: [t.clone() for t in itertools.chain(h)] and copies(h),
}

WRITERS: dict[str, Action] = {
    "clamp_": every(lambda p: p.clamp_(-0.05, 0.05)),
    "data clamp_": every(lambda p: p.data.clamp_(-0.05, 0.05)),
    "detach mul_": every(lambda p: p.detach().mul_(0.5)),
    "copy_": every(lambda p: p.copy_(torch.full_like(p, 0.01))),
    "item assignment": every(lambda p: p.__setitem__(0, 0.02)),
    "augmented": every(lambda p: p.__imul__(0.5)),
    "foreach mul_": no_grad(lambda h: torch._foreach_mul_(list(h), 0.5)),
    "data =": every(assigned),
    "out=": no_grad(written_out),
    "init": every(nn.init.zeros_),
    "fill_ unbound": every(lambda p: torch.Tensor.fill_(p, 0.03)),
    "operator": every(lambda p: torch.ops.aten.mul_.Scalar(p, 0.5)),
    "numpy": every(lambda p: np.multiply(p.numpy(), 0.5, out=p.numpy())),
    "dlpack": every(lambda p: torch.from_dlpack(p.detach()).mul_(0.5)),
    "all_reduce": no_grad(summed_over_ranks),
    "broadcast": every(lambda p: dist.broadcast(p, 0)),
    "functional": every(lambda p: nn.functional.relu_(p)),
    "thread": in_thread(every(lambda p: p.mul_(0.5))),
    "dispatch mode": within(Counting, every(lambda p: p.mul_(0.5))),
    "function mode": within(Tracing, every(lambda p: p.mul_(0.5))),
    "no torch function": within(
        torch._C.DisableTorchFunctionSubclass, every(lambda p: p.mul_(0.5))
    ),
    "inference mode": within(torch.inference_mode, every(lambda p: p.mul_(0.5))),
}

# Only for parameters, or tensors that take part in autograd.
OF_PARAMETERS: dict[str, Action] = {
    "autograd": backward_through,
    "autograd function": backward_of_function,
    "new optimizer": new_optimizer,
    "clip_grad_norm_": clip,
    "parameters_to_vector": vector,
    "vector_to_parameters": vector_back,
    "functional.linear": no_grad(lambda h: [nn.functional.linear(torch.ones(1, 8), h[0])]),
    "functional_call": no_grad(
        lambda h: [
            torch.func.functional_call(
                nn.Linear(8, 16), {"weight": h[0], "bias": h[1]}, (torch.ones(1, 8),)
            )
        ]
    ),
    "grad transform": lambda h: [torch.func.grad(lambda x: (x * x).sum())(h[0])],
    "requires_grad_": lambda h: [p.requires_grad_(True).detach() * 1 for p in h],
    "registered": lambda h: copies(nn.ParameterList(h).parameters()),
    "assigned to a module": lambda h: copies([vars(_with_weight(h[0]))["_parameters"]["weight"]]),
    "gradient read": each(lambda p: p.grad),
    "gradient zeroed": lambda h: torch.optim.SGD(h, lr=1.0).zero_grad(),
}


def _with_weight(p: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = p
    return layer


# ---------------------------------------------------------------- how tensors are held


def parameters(w: World) -> Tensors:
    return list(w.model.parameters())


def states(w: World) -> Tensors:
    """All moments: optimizer state of some dimensions."""
    leaves = [t for entries in w.optimizer.state.values() for t in entries.values()]
    return [t for t in leaves if t.dim()]


class Plain(nn.Module):
    """Computes with parameters that it keeps in a plain list."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.plain = tensors

    def forward(self) -> Tensors:
        return [p * 2 for p in self.plain]


def _begun(w: World) -> Any:
    generator = w.model.parameters()
    return itertools.chain([next(generator)], generator)


def _list_of(held: Any) -> Tensors:
    return list(held)


HOLDERS: dict[str, tuple[Holder, Callable[[Any], Tensors]]] = {
    "list": (parameters, _list_of),
    "tuple": (lambda w: tuple(parameters(w)), _list_of),
    "deque": (lambda w: collections.deque(parameters(w)), _list_of),
    "dict": (lambda w: dict(w.model.named_parameters()), lambda h: list(h.values())),
    "keys": (lambda w: dict.fromkeys(parameters(w)), _list_of),
    "weak": (lambda w: list(map(weakref.ref, parameters(w))), lambda h: [r() for r in h]),
    "begun generator": (_begun, _list_of),
    "closure": (lambda w: functools.partial(_list_of, parameters(w)), lambda h: h()),
    "plain list of a module": (lambda w: Plain(parameters(w)), lambda h: h.plain),
    "other module": (lambda w: nn.ParameterList(parameters(w)), lambda h: list(h.parameters())),
    "table": (lambda w: w.model.head._parameters, lambda h: list(h.values())),
    "vars": (lambda w: vars(w.model.head), lambda h: list(h["_parameters"].values())),
    "copied module": (lambda w: copy.copy(w.model), lambda h: list(h.parameters())),
    "other optimizer": (
        lambda w: torch.optim.SGD(parameters(w), lr=0.1),
        lambda h: list(h.param_groups[0]["params"]),
    ),
    "members": (lambda w: w.optimizer.param_groups[0]["params"], _list_of),
    "leaves of groups": (
        lambda w: w.optimizer,
        lambda h: [t for t in _pytree.tree_leaves(h.param_groups) if isinstance(t, Tensor)],
    ),
    "state dict with variables": (
        lambda w: w.model.state_dict(keep_vars=True),
        lambda h: list(h.values()),
    ),
    "layer": (lambda w: w.model.head, lambda h: [h.weight, h.bias]),
    "bound method": (lambda w: w.model.head.forward, lambda h: [h.__self__.weight]),
    "nested": (lambda w: {"a": [tuple(parameters(w))]}, _pytree.tree_leaves),
    "array of objects": (
        lambda w: collections.ChainMap(dict(w.model.named_parameters())),
        lambda h: list(h.values()),
    ),
}

STATE_HOLDERS: dict[str, tuple[Holder, Callable[[Any], Tensors]]] = {
    "list of states": (states, _list_of),
    "optimizer.state": (
        lambda w: w.optimizer.state,
        lambda h: [t for entries in h.values() for t in entries.values()],
    ),
    "leaves of state": (
        lambda w: w.optimizer.state,
        lambda h: [t for t in _pytree.tree_leaves(list(h.values())) if isinstance(t, Tensor)],
    ),
    "entries": (
        lambda w: w.optimizer.state[w.model.head.weight],
        lambda h: [h["exp_avg"], h["exp_avg_sq"], h["step"]],
    ),
    "state_dict of the optimizer": (
        lambda w: w.optimizer.state_dict(),
        lambda h: [t for t in _pytree.tree_leaves(h["state"]) if isinstance(t, Tensor)],
    ),
}

# ---------------------------------------------------------------- what cannot be seen


def quiet(holder: Holder) -> Holder:
    def hold(w: World) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return holder(w)

    return hold


def graph_of(w: World) -> Any:
    """An output whose autograd graph is alive."""
    return w.model(torch.ones(1, 8))


VIEWS: dict[str, tuple[Holder, Action]] = {
    "data": (lambda w: [p.data for p in parameters(w)], copies),
    "data written": (
        lambda w: [p.data for p in parameters(w)],
        every(lambda v: v.clamp_(-0.05, 0.05)),
    ),
    "detached": (lambda w: [p.detach() for p in parameters(w)], copies),
    "flat": (lambda w: [p.data.view(-1) for p in parameters(w)], copies),
    "row": (lambda w: [w.model.head.weight.detach()[1]], copies),
    "transposed": (lambda w: [w.model.head.weight.detach().t()], copies),
    "with history": (lambda w: [p.view(-1) for p in parameters(w)], lambda h: [v.shape for v in h]),
    "state_dict": (lambda w: w.model.state_dict(), lambda h: copies(h.values())),
    "numpy": (lambda w: w.model.head.weight.detach().numpy(), lambda h: h.tolist()),
    "numpy written": (
        lambda w: w.model.head.weight.detach().numpy(),
        lambda h: np.clip(h, -0.05, 0.05, out=h) is None,
    ),
    "memoryview": (
        lambda w: memoryview(w.model.head.weight.detach().numpy()),
        lambda h: h.tolist(),
    ),
    "numpy of state": (lambda w: states(w)[0].numpy(), lambda h: h.tolist()),
    "view of state": (lambda w: [s.view(-1) for s in states(w)], copies),
    "dlpack": (
        lambda w: to_dlpack(w.model.head.weight.detach()),
        lambda h: torch.from_dlpack(h).clone(),
    ),
    "storage": (
        lambda w: w.model.head.weight.untyped_storage(),
        lambda h: torch.empty(0).set_(h).clone(),
    ),
    "parameter of the same memory": (
        lambda w: nn.Parameter(w.model.head.weight.data),
        lambda h: h.detach().clone(),
    ),
    "shallow copy": (lambda w: copy.copy(w.model.head.weight), lambda h: h.detach().clone()),
    "traced": (
        quiet(lambda w: torch.jit.trace(w.model, torch.ones(1, 8))),
        no_grad(lambda h: h(torch.ones(1, 8))),
    ),
    "scripted": (
        quiet(lambda w: torch.jit.script(w.model.head)),
        no_grad(lambda h: h(torch.ones(1, 16))),
    ),
    "made into a function": (
        quiet(lambda w: torch.jit.trace(w.model.head, torch.ones(1, 16)).forward),
        no_grad(lambda h: h(torch.ones(1, 16))),
    ),
}
