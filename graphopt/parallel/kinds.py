"""Base classes of all kinds of parallelism: `Parallel`, and `OverRanks` for those that
communicate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from graphopt import _compat
from graphopt.ir.placement import Placement

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import fx


class Parallel(ABC):
    """A kind of parallelism: decides what the communication markers of a captured graph become.

    Attributes:
        meaning: the name of the markers' definition in
            `graphopt.verify.sharding.marker_meaning.MEANINGS`, against which its collectives are
            proven; without one, nothing is proven.
    """

    meaning: ClassVar[str] = ""

    @property
    def axes(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups of this rank along the axes of the mesh; values are sharded along the
        last one. None where the ranks share nothing."""
        return ()

    @abstractmethod
    def expand(self, graph: fx.Graph) -> int:
        """Replaces all markers (`graphopt.parallel.markers`) by communication.

        Args:
            graph: of a step as it was captured; edited in place. What replaces a marker has its
                shape, dtype and strides, and stands where the marker stood: the stage moves each
                launch to the value that it sends afterwards, and leaves its wait.

        Returns:
            How many markers there were.
        """


@dataclass(frozen=True)
class Manual(Parallel):
    """A step that does its own communication; the capture adds none.

    >>> import graphopt, torch
    >>> step = graphopt.compile(lambda m, x: m(x), parallel=graphopt.Manual())
    >>> step(torch.nn.ReLU(), torch.ones(2))
    tensor([1., 1.])
    """

    def expand(self, graph: fx.Graph) -> int:
        """Does nothing: a manual step has no markers."""
        return 0


@dataclass(frozen=True)
class OverRanks(Parallel):
    """Base of the kinds in which a group's ranks run one step together, with markers in captures.

    Attributes:
        group: the process group; None is the default group.
        broadcast: before the first step, copy parameters and buffers from the group's rank 0.
        broadcast_buffers: mark the buffers of a module before each of its forwards.
        timeout: seconds to wait for the other ranks when they agree on a capture.
    """

    group: dist.ProcessGroup | None = None
    broadcast: bool = True
    broadcast_buffers: bool = True
    timeout: float = 120.0

    @property
    def axes(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups of this rank along the axes of the mesh."""
        return (_compat.group_or_default(self.group),)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The process group of all ranks that run the step together and agree on it."""
        return _compat.group_or_default(self.group)

    def placement_of_parameter(self, parameter: torch.Tensor) -> Placement:
        """The placement of a parameter, given with its whole shape."""
        return Placement.FULL

    def placement_of_state(self, state: torch.Tensor, parameter: torch.Tensor) -> Placement:
        """The placement of an optimizer state entry of a parameter; both are given with their whole
        shapes."""
        return Placement.FULL
