"""A separate process group for the broadcast of buffers from rank 0.

Collectives of a group wait for one another. Buffers are received when a forward begins, and read by
its first layers; in the gradients' group they would stand behind all gradients that the step before
has sent last, which may take until the next backward:

    gradients' group    g3 g2 g1 ......... | b .......        the forward waits for g3, g2 and g1
    own group           b                  |                  it waits for b

Between the machines of a job it takes one more group of the same ranks, with connections of its own
to each; on one machine nothing is under way long enough to be waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from graphopt import _compat
from graphopt.cost.hosts import spans_hosts
from graphopt.parallel.markers import Group
from graphopt.ranks.meeting import Meeting

_made: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""By the group of the gradients, the same on all its ranks."""


def group_of_buffers(group: dist.ProcessGroup) -> Group:
    """The process group that broadcasts buffers in a training over `group`."""
    return Group(_made.get(group, group).group_name, group.size())


def make_group_of_buffers(
    group: dist.ProcessGroup, roots: Iterable[nn.Module], meeting: Meeting
) -> None:
    """Makes a process group for buffers if any rank has some and the ranks are on several
    machines. All ranks of `group` call it, in a meeting."""
    if group in _made:
        return
    spans = group.size() == dist.get_world_size() and spans_hosts(group.size())
    has = any(buffer.numel() for root in roots for buffer in root.buffers())
    everyone = meeting.exchange({"has buffers": has, "spans hosts": spans})
    if all(theirs["spans hosts"] for theirs in everyone) and any(
        theirs["has buffers"] for theirs in everyone
    ):
        _made[group] = _compat.companion_group(group, "buffers")
