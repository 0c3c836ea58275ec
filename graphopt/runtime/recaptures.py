"""Why a step is captured again: the message in the log, and the budget of captured graphs.

A graph holds for shapes, arguments and settings; a step whose batches come in many lengths needs
many. Where one cause would go on for ever, an error says so before time and memory are gone. Graphs
of other modes (train and eval, `no_sync`, other settings) are few and come back: of these, those
not used for longest are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphopt.errors import CaptureError

if TYPE_CHECKING:
    from graphopt.guards.guards import Guards
    from graphopt.tracing.call import Call


MODE = "mode"
SHAPE = "shape"
VALUE = "value"
BRANCH = "branch"
COUNT = "count"

WITHOUT_BRANCHES = (
    "use tensor operations (torch.where, torch.clamp, …) in place of Python's if and while"
)

_CURES = {
    SHAPE: "pad the batch, or sort it into buckets of a few lengths",
    COUNT: "keep the size (torch.where(mask, x, 0), or a mean as (x * mask).sum() / mask.sum()), or"
    " pad what is chosen to one of a few lengths",
    BRANCH: f"{WITHOUT_BRANCHES}, or decide outside the step",
    VALUE: "pass it as a tensor, or as a number of Python's, float(value), that the step only"
    " computes with; decide outside the step what depends on it",
}


_EACH = {SHAPE: "shape", VALUE: "value", BRANCH: "outcome", COUNT: "size"}


@dataclass(frozen=True)
class RecaptureCause:
    """The reason why a step was captured again.

    Attributes:
        kind: `MODE`, `SHAPE`, `VALUE`, `BRANCH` or `COUNT`.
        name: the name of the argument or branch that changed; empty for a mode.
        said: the reason in full.
    """

    kind: str
    name: str
    said: str

    @classmethod
    def of_call(cls, call: Call, mode: tuple[Any, ...], guards: Guards) -> Iterator[RecaptureCause]:
        """Yields the reasons why a graph does not hold for a call.

        Args:
            mode: the call's mode of communication.
        """
        reason = None
        for reason in guards.structure_mismatches(call, mode):
            yield cls(MODE, "", reason)
        if reason is None:
            found = (SHAPE, guards.shape_mismatch(call)), (VALUE, guards.local_mismatch(call))
            for kind, said in found:
                if said is not None:
                    yield cls(kind, said.partition(" became ")[0].partition(": ")[0], said)

    @classmethod
    def of_branch(cls, place: str, found: object) -> RecaptureCause:
        if isinstance(found, tuple):
            return cls(COUNT, f"what is chosen by value at {place}", f"it is {list(found)} now")
        return cls(BRANCH, f"the decision at {place}", f"it is {found!r} now")

    @property
    def key(self) -> tuple[str, str]:
        return (self.kind, self.name)


def dropped(
    causes: Sequence[RecaptureCause | None], new: RecaptureCause | None, limit: int, step: str
) -> int | None:
    """The graph to drop before another one is made, or None if the budget has room.

    Args:
        causes: the causes of the existing graphs, most recently used first; None for the first
            capture.
        new: the reason why another one is needed.
        limit: the largest number of graphs.
        step: its name.

    Raises:
        CaptureError: shapes or values have used up the limit.
    """
    if len(causes) < limit:
        return None
    modes = [i for i, cause in enumerate(causes) if cause is None or cause.kind == MODE]
    often = Counter(cause.key for cause in (*causes, new) if cause is not None)
    (kind, name), count = often.most_common(1)[0] if often else ((MODE, ""), 0)
    if kind == MODE or (modes and count < limit // 2):
        return modes[-1] if modes else len(causes) - 1
    said = next(c.said for c in (new, *causes) if c is not None and c.key == (kind, name))
    raise CaptureError(
        f"{step} needs a graph for each {_EACH[kind]} of"
        f" {name}: {count} of at most {limit} (the last change: {said})",
        hint=f"{_CURES[kind]}; or allow more: graphopt.compile(max_graphs={2 * limit})",
    )
