"""Failures of ranks during a step: told to other ranks, and reported to the user.

Where a collective fails because another rank has gone, all that the backend says is that a
connection was closed. What the user needs is the step, the collective, and the rank that went and
why. A rank that fails leaves its reason in the store of the process group (`tell`), and whoever
then fails for it looks there (`reasons`), and for processes that have ended.

A rank that leaves a step between two collectives cannot join the next: the others are still in this
one, and what is sent would be added to something else. The group is then marked as unusable on this
rank (`mark_unusable`), until it is made anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from weakref import WeakKeyDictionary

import torch.distributed as dist

from graphopt import _compat
from graphopt.errors import CollectiveError
from graphopt.ranks.processes import ended_ranks

logger = logging.getLogger("graphopt")

# A process closes its connections before it has ended, and a rank may be about to tell.
_SECONDS_TO_LEARN = 2.0
_PAUSE = 0.02

_unusable: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def tell(group: dist.ProcessGroup, step: int, error: BaseException) -> None:
    """Tells the other ranks of a group that this rank failed, and why; does not wait.

    Args:
        step: the number of the failed call, counted from 1: the same on all ranks.
        error: the error that this rank raises.
    """
    text = str(error).strip()
    kinds = (kind for kind in type(error).__mro__ if _is_public(kind))
    kind = next(kinds, type(error)).__name__
    reason = f"{kind}: {text}" if text else kind
    try:
        store = _compat.default_store()
        store.set(_key(group, group.rank()), json.dumps({"step": step, "reason": reason}))
    except (RuntimeError, ValueError) as gone:  # of the store, or there is no group any more
        logger.debug("the other ranks could not be told of a failure: %s", gone)


def withdraw(group: dist.ProcessGroup) -> None:
    """Withdraws this rank's failure: it has recovered."""
    _compat.default_store().delete_key(_key(group, group.rank()))


def reasons(group: dist.ProcessGroup, step: int) -> dict[int, str]:
    """The failures that other ranks have told, by rank in the group.

    A rank may be one step ahead or behind: part of a step may run in the next.
    """
    found: dict[int, str] = {}
    try:
        store = _compat.default_store()
        for rank in set(range(group.size())) - {group.rank()}:
            if store.check([_key(group, rank)]):
                told = json.loads(store.get(_key(group, rank)))
                if abs(told["step"] - step) <= 1:
                    found[rank] = told["reason"]
    except (RuntimeError, ValueError) as gone:
        logger.debug("the reasons of other ranks cannot be read: %s", gone)
    return found


def learn_causes(group: dist.ProcessGroup, step: int) -> tuple[dict[int, str], list[int]]:
    """The failures of ranks and the ended processes, as soon as one is known.

    Returns:
        `reasons`, and ranks in the group. Both are empty where nothing is known within seconds.
    """
    deadline = time.monotonic() + _SECONDS_TO_LEARN
    while True:
        said, ended = reasons(group, step), ended_ranks(group)
        if said or ended or time.monotonic() > deadline:
            return said, ended
        time.sleep(_PAUSE)


def mark_unusable(group: dist.ProcessGroup, reason: str) -> None:
    """Marks a group as unusable, so that `check_usable` refuses it."""
    _unusable.setdefault(group, reason)


def check_usable(names: Collection[str]) -> None:
    """Raises `CollectiveError` if ranks of a group may be at different collectives.

    Args:
        names: of the groups that are about to be used.
    """
    if not _unusable:
        return
    for group, reason in list(_unusable.items()):
        if group.group_name in names and _compat.group_named(group.group_name) is group:
            raise CollectiveError(
                f"the ranks of process group {group.group_name!r} may no longer be at the same"
                f" collective: {reason}",
                group=group.group_name,
                hint="make the group anew on all ranks (destroy_process_group,"
                " init_process_group) and load a checkpoint",
            )


def _is_public(kind: type) -> bool:
    """True if users can know a class of errors, which is not private to a package."""
    return not kind.__module__.startswith("graphopt.") or kind.__module__ == "graphopt.errors"


def _key(group: dist.ProcessGroup, rank: int) -> str:
    return f"graphopt/{group.group_name}/failed/{rank}"
