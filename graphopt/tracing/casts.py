"""Autocast regions that several calls of steps share.

Autocast caches the casts of weights until its outermost region is left, so that eager goes on with
the weights of before an update: a program error, which no graph of one step can repeat. The cache
is the process's, whichever step or model it was filled by; so is what is known about it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import nn

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.call import Call
from graphopt.tracing.failures import definition_of


class _Region:
    """What steps have done in the present autocast region.

    Autocast does not tell when a region ends. But a weight of its own that was cast in it, and then
    changed, is given as it was before as long as the cache lasts.

    Attributes:
        cast: modules whose weights were cast.
        stale: those of them that were updated afterwards.
    """

    def __init__(self) -> None:
        self._mark: torch.Tensor | None = None
        self.cast: WeakSet[nn.Module] = WeakSet()
        self.stale: WeakSet[nn.Module] = WeakSet()

    def forget_others(self) -> None:
        """Forget what was done in regions that have been left."""
        if self.mark():
            self.cast.clear()
            self.stale.clear()

    def mark(self) -> bool:
        """Have the mark cast in autocast's cache. Returns whether it was not there."""
        with torch.inference_mode(False), torch.no_grad():
            if self._mark is None:
                self._mark = torch.zeros(1, 1, device="cpu", dtype=torch.float32)
                self._mark.requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                cast = torch.mm(torch.ones(1, 1, device="cpu"), self._mark)
            new = bool(cast.item() == self._mark.item())
            if new:
                self._mark.copy_(1 - self._mark)
        return new


_region = _Region()


def check_casts(call: Call) -> None:
    """Before a call.

    Raises:
        CaptureError: a call in the autocast region of this one has cast weights of its modules, and
            then they were updated.
    """
    if _depth() == 0:
        return
    _region.forget_others()
    if _region.stale.isdisjoint(_owners(call)):
        return
    raise CaptureError(
        "it is called after a step has updated the model in the same autocast region: autocast"
        " keeps the casts of the weights as they were before",
        location=str(definition_of(call)),
        hint="enter autocast in the step, or around each call; or give it cache_enabled=False",
    )


def note_casts(call: Call, casts: bool, steps: bool) -> None:
    """After a call, which has cast weights or not, and then has updated weights or not."""
    if _depth() == 0:
        return
    _region.mark()  # to capture has emptied the cache
    owners = list(_owners(call))
    if casts:
        _region.cast.update(owners)
    if steps:
        updated = _updated(call)
        changed = (
            m for m in owners if not updated.isdisjoint(map(id, _compat.own_parameters(m).values()))
        )
        _region.stale.update(_region.cast & set(changed))


def _owners(call: Call) -> Iterator[nn.Module]:
    """Modules among the arguments that have parameters of their own."""
    return (module for _, module in call.named_submodules() if _compat.own_parameters(module))


def _updated(call: Call) -> set[int]:
    """Identities of the parameters that the call's optimizers have."""
    groups = [group for each in call.optimizer_objects() for group in each.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _depth() -> int:
    """How many autocast regions are entered."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


@contextmanager
def cached_casts(enabled: bool) -> Iterator[None]:
    """While active, autocast has its weight cache, which `make_fx` turns off, as it was: with it,
    eager casts a weight once, and sums its gradients before the cast. Emptied on leaving, so that
    no traced tensor stays in it."""
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
