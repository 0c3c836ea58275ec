"""The modules and parameters that all ranks have started from the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn

from graphopt.parallel import OverRanks
from graphopt.parallel.sharding import is_dtensor
from graphopt.ranks.failed_runs import sending_explained
from graphopt.runtime.agreement.joint_names import is_trained
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.collecting import bare_tensors


class JoinedModules:
    """The joined modules in the calls of one step function."""

    def __init__(self) -> None:
        self._joined: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def _has(self, each: Any) -> bool:
        return self._joined.get(id(each)) is each

    def has_all(self, call: Call) -> bool:
        """True if all modules and parameters of a call have been joined."""
        return all(map(self._has, [*_roots(call), *_bare_parameters(call)]))

    def has_trained(self, call: Call) -> bool:
        """True if everything that a call trains has been joined."""
        trained = filter(is_trained, _roots(call))
        return all(map(self._has, [*trained, *_bare_parameters(call)]))

    def of_all(self, call: Call, *, uneven: bool) -> list[nn.Module]:
        """The modules of a call that all ranks have.

        Args:
            uneven: as of `join`.
        """
        return [r for r in _roots(call) if is_trained(r) or (not uneven and self._has(r))]

    def join(self, call: Call, parallel: OverRanks, *, uneven: bool) -> None:
        """Broadcasts rank 0's values as DDP's constructor does, for modules not joined before.

        Args:
            uneven: ranks have other modules besides those that are trained, which keep their
                values.
        """
        if self.has_all(call):
            return
        group, roots, bare = parallel.everyone, _roots(call), _bare_parameters(call)
        if parallel.broadcast:
            shared = [root for root in roots if is_trained(root) or not uneven]
            given = [each for root in shared for each in (*root.parameters(), *root.buffers())]
            with sending_explained(group, 1, "broadcast", "what all ranks start from"):
                broadcast_from_first([*given, *bare], group)
        self._joined.update({id(each): each for each in (*roots, *bare)})


def _roots(call: Call) -> list[nn.Module]:
    return [root for _, root in call.named_roots()]


def _bare_parameters(call: Call) -> list[torch.Tensor]:
    """The trained parameters that belong to no module."""
    owned = {id(p) for _, root in call.named_roots() for p in root.parameters()}
    found = {id(t): t for _, t in bare_tensors(call) if t.requires_grad and id(t) not in owned}
    return list(found.values())


def broadcast_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Broadcasts tensors from a group's first rank, except those that ranks hold rows of."""
    tensors = [tensor for tensor in tensors if not is_dtensor(tensor)]
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in tensors:
            flat = tensor.detach().contiguous()
            dist.broadcast(flat, source, group=group)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat)
