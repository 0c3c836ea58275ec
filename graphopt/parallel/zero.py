"""ZeRO: each rank keeps and updates its rows of what the optimizer keeps, and of parameters.

    stage 1    gradient ──scatter──▶ rows of the mean ──▶ update of rows ──gather──▶ parameter
    stage 3    parameter rows ──gather──▶ forward; once more ──▶ backward; the update stays in rows

Stage 2, gradients in rows, is stage 1: in a graph a whole gradient dies where it is scattered.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(SC 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from graphopt.errors import ParallelismError
from graphopt.ir.placement import Placement
from graphopt.parallel.kinds import OverRanks
from graphopt.parallel.sharding import OF_ROWS, shards_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import fx


@dataclass(frozen=True)
class ZeRO(OverRanks):
    """Data parallelism in which no rank keeps all of the optimizer's state.

    Attributes:
        group: the process group over whose ranks it is sharded; None is the default group.
        stage: 1: the optimizer's state is sharded. 2 is 1: in a graph a gradient dies where it is
            scattered. 3: parameters are sharded as well.
        keep_mb: with stage 3, so many MiB of the parameters that the forward reads last stay whole
            until the backward, which does not gather them again; None: none do.
        replicate_over: not there yet; anything but None is refused.
        broadcast, broadcast_buffers, timeout: as of `DataParallel`.

    >>> import graphopt
    >>> graphopt.ZeRO(stage=2).stage
    1
    """

    stage: int = 1
    keep_mb: float | None = None
    replicate_over: dist.ProcessGroup | None = None

    meaning: ClassVar[str] = "sharded"

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ParallelismError(f"stage={self.stage!r}: ZeRO has the stages 1, 2 and 3")
        if self.keep_mb is not None and not _is_size(self.keep_mb):
            raise ParallelismError(f"keep_mb={self.keep_mb!r}: give a number of MiB, from 0")
        if self.replicate_over is not None:
            raise ParallelismError("ZeRO(replicate_over=...) is not there yet: leave it out")
        if self.stage == 2:
            object.__setattr__(self, "stage", 1)

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sharded value."""
        from graphopt import _compat

        return _compat.group_or_default(self.group).size()

    def placement_of_state(self, state: torch.Tensor, parameter: torch.Tensor) -> Placement:
        """How the ranks hold an entry of the optimizer's state: as its parameter is cut, if it has
        an element for each of that."""
        same = state.shape == parameter.shape and shards_of(parameter, self.ranks) is not None
        return OF_ROWS if same and state.layout is parameter.layout else Placement.FULL

    def placement_of_parameter(self, parameter: torch.Tensor) -> Placement:
        """The placement of a parameter."""
        sharded = self.stage == 3 and shards_of(parameter, self.ranks) is not None
        return OF_ROWS if sharded else Placement.FULL

    def expand(self, graph: fx.Graph) -> int:
        """Scatter the marked gradients, let each rank update its rows, and gather parameters."""
        from graphopt import _compat
        from graphopt.parallel.markers import Group
        from graphopt.parallel.shard_expansion import Expansion

        group = _compat.group_or_default(self.group)
        keep = (self.keep_mb or 0.0) * 2**20
        return Expansion(graph, Group(group.group_name, group.size()), keep).run()


def _is_size(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and number >= 0
