"""The timeline that `graphopt.simulate` returns: slots of compute and collectives, exposed seconds,
and a lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike

from torch import fx

from graphopt.ir.user_files import place, write
from graphopt.schedule.pictures import chrome_trace, page
from graphopt.schedule.program import Message, Program, communication_bound


@dataclass(frozen=True)
class ComputeSlot:
    """The computation of a node, from `start` to `end` in seconds.

    >>> slot = graphopt.simulate(gm, world_size=2).compute[0]
    >>> slot.end >= slot.start
    True
    """

    node: fx.Node
    start: float
    end: float


@dataclass(frozen=True)
class CollectiveSlot:
    """A collective of one iteration, with times in seconds.

    Attributes:
        message: what is sent.
        launched: when the program launched it.
        start: when it was first in its group's queue.
        end: when it had arrived.
        exposed: how long compute stood still for it.
        distance: nodes from its launch to its wait; None if nobody waits.

    >>> [slot.message.nbytes for slot in graphopt.simulate(gm, world_size=2).collectives]
    [8, 32]
    """

    message: Message
    launched: float
    start: float
    end: float
    exposed: float
    distance: int | None


@dataclass
class Timeline:
    """The predicted timeline of a step in the steady state, returned by `graphopt.simulate`.

    Attributes:
        program: what was simulated.
        step_seconds: from the begin of one iteration to that of the next.
        begin, end: of the iteration that the slots below are of.
        compute: in order.
        collectives: of this iteration, in launch order; the last may end after it.
        peak_bytes_in_flight: launched and not waited for.
        peak_bytes: of values that are held at once, without the inputs of the step.

    >>> timeline = graphopt.simulate(gm)
    >>> timeline.step_seconds >= timeline.compute_seconds
    True
    """

    program: Program = field(repr=False)
    step_seconds: float
    begin: float
    end: float
    compute: Sequence[ComputeSlot] = field(repr=False)
    collectives: Sequence[CollectiveSlot] = field(repr=False)
    peak_bytes_in_flight: int
    peak_bytes: int

    @cached_property
    def compute_seconds(self) -> float:
        """The total seconds of all nodes, without waiting."""
        return self.program.compute_seconds

    @cached_property
    def comm_seconds(self) -> float:
        """The seconds that the busiest group or link needs."""
        return communication_bound(self.program)

    @cached_property
    def exposed_comm_seconds(self) -> float:
        """The seconds of a step in which compute waits for communication."""
        return sum(slot.exposed for slot in self.collectives)

    @property
    def bound_seconds(self) -> float:
        """The larger of compute and communication: no order of these collectives is faster."""
        return max(self.compute_seconds, self.comm_seconds)

    def __str__(self) -> str:
        return (
            f"step {1e3 * self.step_seconds:.3f} ms: compute {1e3 * self.compute_seconds:.3f} ms,"
            f" communication {1e3 * self.comm_seconds:.3f} ms, of it exposed"
            f" {1e3 * self.exposed_comm_seconds:.3f} ms; bound {1e3 * self.bound_seconds:.3f} ms"
        )

    def save_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Writes the step in the trace event format, for Perfetto or ``chrome://tracing``.

        Raises:
            FileError: the file cannot be written.
        """
        write(place(path), chrome_trace(self))

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes one self-contained page: lanes, and a table of the collectives.

        Raises:
            FileError: the file cannot be written.
        """
        write(place(path), page(self))
