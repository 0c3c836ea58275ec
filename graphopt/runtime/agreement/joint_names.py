"""The common names of a step's tensors on all ranks.

One rank may have modules besides those that are trained, such as an average of the weights. With
two modules, names begin with that of the module; with one they do not.

    rank 0   model.0.weight, model.0.bias, average.0.weight, average.0.bias
    rank 1   0.weight, 0.bias
    told     0.weight, 0.bias           and besides, on rank 0: average.0.weight, average.0.bias
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import ModuleTensor


class JointNames:
    """The translation between one rank's tensor names and the common ones, for one call.

    Args:
        entries: all tensors of the call's modules.

    Attributes:
        tensors: what all ranks have to have alike, one line each. Tensors besides modules that
            nobody trains may be there on one rank alone.
        besides: the same of modules of which nothing is trained. Where all ranks have these alike,
            they begin with the same values.
    """

    def __init__(self, call: Call, entries: Sequence[ModuleTensor]) -> None:
        roots = list(call.named_roots())
        trained = [(name, root) for name, root in roots if is_trained(root)]
        prefix = f"{trained[0][0]}." if len(trained) == 1 and trained[0][0] else ""
        told = {entry.fqn.removeprefix(prefix): entry.fqn for entry in entries}
        self._prefix = prefix if len(told) == len(entries) else ""
        self._own = told if self._prefix else {}
        of_trained = {id(tensor) for _, root in trained for tensor in _tensors(root)}
        frozen = {id(tensor) for _, root in roots for tensor in _tensors(root)} - of_trained
        shared = [e for e in entries if e.tensor.requires_grad or not e.bare]
        self.tensors = [self._line(e) for e in shared if id(e.tensor) not in frozen]
        self.besides = [self._line(e) for e in shared if id(e.tensor) in frozen]

    def told(self, names: Iterable[str]) -> list[str]:
        """The common names for names of this rank."""
        return [name.removeprefix(self._prefix) for name in names]

    def own(self, names: Iterable[str]) -> list[str]:
        """This rank's names for common names, as far as it has such tensors."""
        return [self._own.get(name, name) for name in names]

    def _line(self, entry: ModuleTensor) -> str:
        (name,) = self.told([entry.fqn])
        return (
            f"{entry.kind} {name} {entry.tensor.dtype} {list(entry.tensor.shape)}"
            f"{'' if entry.tensor.requires_grad else ' without gradient'}"
        )


def is_trained(module: nn.Module) -> bool:
    """True if a module has parameters that require a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
