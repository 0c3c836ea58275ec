"""Collectives that a step calls itself (`graphopt.Manual`), traced as functional ones.

`torch.distributed.all_reduce(t)` changes `t` behind the back of a tracer. While a step is traced it
launches the functional collective instead, and writes what that gives into `t`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location
from graphopt.tracing.interception.replaced_functions import replaced
from graphopt.tracing.ranks.collective_forms import FORMS

_OBJECTS = (
    "sends Python objects, which are pickled when the step is captured",
    "send tensors: all_gather(list_of_tensors, torch.stack([loss, count])); or return the values"
    " from the step and send objects outside it",
)
_POINT_TO_POINT = (
    "sends from one rank to another, which has no functional form",
    "call it outside the step; stages of a pipeline are made by graphopt.pipelining",
)
_REFUSED = {
    **dict.fromkeys(
        ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
        _OBJECTS,
    ),
    **dict.fromkeys(("send", "recv", "isend", "irecv", "batch_isend_irecv"), _POINT_TO_POINT),
    "monitored_barrier": (
        "waits for all ranks on the host",
        "call it outside the step, or leave it out: collectives wait for all ranks",
    ),
}
"""By the name of a function of `torch.distributed`: what it does, and what to write instead."""


def functional_collectives() -> AbstractContextManager[None]:
    """While active, `torch.distributed`'s collectives are traced as functional ones, or refused
    without such a form."""
    return replaced(*((dist, name, function) for name, function in _STAND_INS.items()))


def _refusal(name: str, reason: str, hint: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"it calls torch.distributed.{name}, which {reason}",
            location=current_location(),
            hint=hint,
        )

    return refuse


_STAND_INS: dict[str, Callable[..., Any]] = {
    **FORMS,
    **{name: _refusal(name, *words) for name, words in _REFUSED.items()},
}
