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
    """A kind of parallelism: what becomes of the markers in a captured graph.

    Attributes:
        meaning: the name of the markers' definition in
            `graphopt.verify.sharding.marker_meaning.MEANINGS`, against which its collectives are
            proven; without one, nothing is proven.
    """

    meaning: ClassVar[str] = ""

    @property
    def axes(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of this rank along the axes of the mesh of ranks; values are cut along the
        last one. None where the ranks share nothing."""
        return ()

    @abstractmethod
    def expand(self, graph: fx.Graph) -> int:
        """Replace all markers (`graphopt.parallel.markers`) by what this kind does.

        Args:
            graph: of a step as it was captured; edited in place. What replaces a marker has its
                shape, dtype and strides, and stands where the marker stood: the stage moves each
                launch to the value that it sends afterwards, and leaves its wait.

        Returns:
            How many markers there were.
        """


@dataclass(frozen=True)
class Manual(Parallel):
    """The step does its own communication; the capture adds none.

    >>> import graphopt, torch
    >>> step = graphopt.compile(lambda m, x: m(x), parallel=graphopt.Manual())
    >>> step(torch.nn.ReLU(), torch.ones(2))
    tensor([1., 1.])
    """

    def expand(self, graph: fx.Graph) -> int:
        """There are no markers."""
        return 0


@dataclass(frozen=True)
class OverRanks(Parallel):
    """Base of the kinds in which the ranks of a group work on one step: the capture writes markers,
    and the ranks agree on what they run.

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
        """The groups of this rank along the axes of the mesh of ranks."""
        return (_compat.group_or_default(self.group),)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The ranks that run the step alike and agree on it."""
        return _compat.group_or_default(self.group)

    def placement_of_parameter(self, parameter: torch.Tensor) -> Placement:
        """The placement of a parameter, given with its whole shape."""
        return Placement.FULL

    def placement_of_state(self, state: torch.Tensor, parameter: torch.Tensor) -> Placement:
        """How the ranks hold an entry of the optimizer's state that belongs to a parameter; both
        are given with their whole shapes."""
        return Placement.FULL
