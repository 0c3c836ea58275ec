"""Attributes (`p.lr_scale`, `p.hess`) and gradient hooks that a program sets on tensors.

    parameter.hess += h * z      a tensor there is an input; what a step sets there, every call sets

Stand-ins of parameters get them when a step is traced, and what they have then is compared with
what they have when it is over. Hooks that a step leaves, and attributes that it sets on its tensor
arguments, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.outside.places import MISSING
from graphopt.tracing.rollback.contents import containers_kept
from graphopt.tracing.rollback.substitute import StandIns


class AttributeChange(NamedTuple):
    """An attribute that a step has set: its table, its name there and in messages, former and
    new value, and if the new one is a recipe of `written_value`."""

    table: dict[str, Any]
    key: str
    name: str
    before: Any
    after: Any
    is_told: bool = False


def marks_kept(inputs: Inputs) -> AbstractContextManager[None]:
    """Restores the attributes of parameters and buffers afterwards."""
    tensors = [entry.tensor for entry in inputs.module_tensors]
    tables = [vars(tensor) for tensor in tensors if not _compat.is_fake(tensor)]
    return containers_kept(filter(None, tables))


class StandInAttributes:
    """The attributes and hooks of the stand-ins of tensors in one trace."""

    def __init__(self, leaves: Sequence[Any], inputs: Inputs, traced: StandIns) -> None:
        pairs = [(entry, traced.by_id[id(entry.tensor)]) for entry in inputs.module_tensors]
        given = [(inputs.names[p], traced.by_id[id(leaves[p])]) for p in inputs.user]
        self._arguments = [(name, stand_in, dict(vars(stand_in))) for name, stand_in in given]
        named: list[tuple[str, torch.Tensor]] = [(e.fqn, stand_in) for e, stand_in in pairs]
        self._hooks = [(name, each, _compat.hooks_of(each)) for name, each in (*named, *given)]
        self._before = [
            (entry, stand_in, _compat.copy_attributes(entry.tensor, stand_in))
            for entry, stand_in in pairs
        ]

    def changes(self) -> Iterator[AttributeChange]:
        """The attributes that the step has set on tensors.

        Raises:
            CaptureError: it has deleted one, or has left what no call repeats.
        """
        self._refuse_what_stays()
        for entry, stand_in, before in self._before:
            table = vars(entry.tensor)
            gone = next((key for key in table if key not in vars(stand_in)), None)
            if gone is not None:
                raise CaptureError(
                    f"it deletes the attribute {gone} of {entry.fqn}, which would happen at capture"
                    " only",
                    hint="set it to None",
                )
            for key, value in _compat.attributes_changed(stand_in, before).items():
                name = f"{entry.fqn}.{key}"
                yield AttributeChange(table, key, name, before.get(key, MISSING), value)

    def _refuse_what_stays(self) -> None:
        """Refuses hooks that the step leaves, and attributes that it sets on arguments."""
        for name, stand_in, hooks in self._hooks:
            if _compat.hooks_of(stand_in) != hooks:
                raise CaptureError(
                    f"it leaves other gradient hooks on {name} than it has found",
                    hint="register hooks outside the step, or remove them in it: handle.remove()",
                )
        for name, stand_in, before in self._arguments:
            for key in _compat.attributes_changed(stand_in, before):
                raise CaptureError(
                    f"it sets the attribute {key} of its argument {name}",
                    hint="return the value, or keep it in a dictionary",
                )

    def put_back(self) -> None:
        """Removes the attributes from the stand-ins, some of which live on in reference cycles."""
        for entry, stand_in, before in self._before:
            if not _compat.is_fake(entry.tensor):
                for key in {**vars(entry.tensor), **_compat.attributes_changed(stand_in, before)}:
                    vars(stand_in).pop(key, None)
