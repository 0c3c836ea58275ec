"""Refusal of steps that register or remove submodules, parameters or buffers."""

from __future__ import annotations

from torch import nn

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.outside.record import OutsideRecord


class RegisteredTensors:
    """A snapshot of a module's registered submodules, parameters and buffers.

    Args:
        name: of the module; empty for the model.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._names = _names_of_tensors(module)
        self._modules = dict(_compat.own_modules(module))

    def refuse_changed(self, record: OutsideRecord) -> None:
        """Refuses a step that has changed what is registered, except new buffers.

        Args:
            record: knows the lines that write to the module.

        Raises:
            CaptureError: it has.
        """
        now = _compat.own_modules(self._module)
        for key in {**self._modules, **now}:
            if now.get(key) is not self._modules.get(key):
                raise self._refused(f"it puts another submodule into {key!r} of", record)
        parameters, buffers = _names_of_tensors(self._module)
        if self._names[0] != parameters or self._names[1] != buffers[: len(self._names[1])]:
            raise self._refused("it registers parameters, or removes something, of", record)

    def _refused(self, what: str, record: OutsideRecord) -> CaptureError:
        written = record.unrepeated.written_at(vars(self._module))
        return CaptureError(
            f"{what} {self._name or 'the model'}",
            location=written and written[1],
            hint="do that outside the step; a module that is made for one call may be a variable",
        )


def _names_of_tensors(module: nn.Module) -> tuple[list[str], list[str]]:
    return list(_compat.own_parameters(module)), list(_compat.own_buffers(module))
