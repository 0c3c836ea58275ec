"""A test if the ranks of a process group share one machine."""

from __future__ import annotations

import os

import torch.distributed as dist

RANKS_OF_A_HOST = 8
"""The assumed number of ranks per machine, if no launcher says it."""


def spans_hosts(ranks: int) -> bool:
    """True if collectives of a group with so many ranks cross machines.

    A launcher says in `LOCAL_WORLD_SIZE`, as torchrun does, how many ranks it has started on this
    machine. Fewer than all: then groups of all ranks span machines. It is the same on all ranks, be
    the machines of different sizes. Of other groups, and where nothing is said, those of up to
    eight ranks are taken to share a machine.

    >>> from graphopt.cost.hosts import spans_hosts
    >>> spans_hosts(2), spans_hosts(16)
    (False, True)
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    there = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if there else None
    if said.isdecimal() and world and ranks >= world:
        return int(said) < world
    return ranks > RANKS_OF_A_HOST
