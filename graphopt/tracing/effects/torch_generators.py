"""Random generator states in a traced step: read and restored by operators of the graph.

Activation checkpointing replays dropout by restoring the generator before it recomputes. While a
step is traced, `torch.get_rng_state` and `torch.set_rng_state` (and their CUDA forms) are replaced
by the two operators below, so that the graph does the same on every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any, NoReturn

import torch
from torch import fx
from torch.fx.node import has_side_effect

from graphopt._compat.checkpoints import selecting_as_in_eager
from graphopt.errors import CaptureError
from graphopt.ir.generators import generator_of
from graphopt.ir.operators import draws
from graphopt.ir.user_frames import current_location, own_location
from graphopt.tracing.interception.replaced_functions import replaced

_library = torch.library.Library("graphopt", "DEF")
_library.define("get_rng_state(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("set_rng_state(Tensor state, Device device) -> ()")


def _get(device: torch.device) -> torch.Tensor:
    # Not by `torch.cuda.get_rng_state`: while a step is traced, that is the operator itself.
    return generator_of(device).get_state()


def _set(state: torch.Tensor, device: torch.device) -> None:
    generator_of(device).set_state(state)


_library.impl("get_rng_state", _get, "CompositeExplicitAutograd")
_library.impl("set_rng_state", _set, "CompositeExplicitAutograd")


def _get_fake(device: torch.device) -> torch.Tensor:
    return torch.empty(_get(device).numel(), dtype=torch.uint8, device="cpu")


def _set_fake(state: torch.Tensor, device: torch.device) -> None:
    return None


torch.library.register_fake("graphopt::get_rng_state", _get_fake, lib=_library)
torch.library.register_fake("graphopt::set_rng_state", _set_fake, lib=_library)

_OPERATORS = (torch.ops.graphopt.get_rng_state.default, torch.ops.graphopt.set_rng_state.default)

has_side_effect(torch.ops.graphopt.set_rng_state.default)


def drop_idle_restores(graph: fx.Graph) -> None:
    """Erases all restores of generators from the graph of a step in which nothing draws: the
    state that each puts back is the one that is there.

    Beside other threads that draw, a restore would repeat their numbers.
    """
    read, restore = _OPERATORS
    calls = [node for node in graph.nodes if node.op == "call_function"]
    restores = [node for node in calls if node.target is restore]
    if any(_may_draw(node) for node in calls if node.target not in _OPERATORS):
        return
    if all(_is_read_by(node.args[0], read, node.args[1]) for node in restores):
        for node in restores:
            graph.erase_node(node)


def _is_read_by(state: Any, read: Any, device: Any) -> bool:
    return isinstance(state, fx.Node) and state.target is read and state.args[0] == device


def _may_draw(node: fx.Node) -> bool:
    """True for operators that draw, and for all that are not torch's own."""
    if isinstance(node.target, BuiltinFunctionType):  # arithmetic of numbers
        return False
    namespace = getattr(node.target, "namespace", None)
    return namespace not in ("aten", "prims", "profiler", "_c10d_functional") or draws(node)


_STATE = frozenset(
    {"manual_seed", "seed", "set_state", "get_state", "clone_state", "graphsafe_set_state",
     "graphsafe_get_state"}
)  # fmt: skip


def refuse_seeding(callee: Any, args: Sequence[Any]) -> None:
    """Refuses calls that create or seed a generator, or access its state: a graph draws from
    generators as they are.

    Raises:
        CaptureError: it does.
    """
    owner = getattr(callee, "__self__", args[0] if args else None)
    name = getattr(callee, "__name__", "")
    if isinstance(callee, type) and issubclass(callee, torch.Generator):
        raise CaptureError(
            "it makes a generator of random numbers, which would happen at capture only",
            location=own_location(),
            hint="make it outside the step, and pass it: step(model, batch, generator); to draw the"
            " same numbers in each call, seed it before each call, generator.manual_seed(0)",
        )
    if isinstance(owner, torch.Generator) and name in _STATE:
        raise CaptureError(
            f"it calls {name}() of a generator, which would happen at capture only",
            location=own_location(),
            hint=f"call it before the step: generator.{name}(…); step(model, batch, generator)",
        )


def _refuse_manual_seed(*args: Any, **kwargs: Any) -> NoReturn:
    raise _seeded()


def _refuse_seed(*args: Any, **kwargs: Any) -> NoReturn:
    """Replaces `torch.seed`, as a function of its own: torch's compiler keys them by identity."""
    raise _seeded()


def _seeded() -> CaptureError:
    return CaptureError(
        "the random number generator is seeded inside the step",
        location=current_location(),
        hint="call torch.manual_seed outside the step",
    )


@contextmanager
def traced_generators() -> Iterator[None]:
    """While active, generator states are read and restored by operators of the graph."""

    changes: list[tuple[Any, str, Any]] = []
    for module in (torch, torch.random):
        changes += _of_states(module, "cpu")
        changes.append((module, "manual_seed", _refuse_manual_seed))
        changes.append((module, "seed", _refuse_seed))
    if torch.cuda.is_available():
        changes += _of_states(torch.cuda, "cuda")
    with replaced(*changes, *selecting_as_in_eager(_OPERATORS)):
        yield


def _of_states(module: Any, kind: str) -> Iterator[tuple[Any, str, Any]]:
    """A module's functions of generator states, with what stands for them."""

    def get(device: Any = kind) -> torch.Tensor:
        return torch.ops.graphopt.get_rng_state(torch.device(device))  # type: ignore[no-any-return]

    def put(state: torch.Tensor, device: Any = kind) -> None:
        torch.ops.graphopt.set_rng_state(state, torch.device(device))

    yield module, "get_rng_state", get
    yield module, "set_rng_state", put
