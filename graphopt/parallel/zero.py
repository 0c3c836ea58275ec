"""ZeRO: each rank keeps and updates only its rows of optimizer state, and of parameters in stage 3.

    stage 1    gradient ──scatter──▶ rows of the mean ──▶ update of rows ──gather──▶ parameter
    stage 3    parameter rows ──gather──▶ forward; once more ──▶ backward; the update stays in rows

Stage 2, gradients in rows, is stage 1: in a graph a whole gradient dies where it is scattered.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(SC 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist

from graphopt.errors import ParallelismError
from graphopt.ir.placement import Placement, Replicate, Rows
from graphopt.parallel.hybrid import group_of_mesh, mesh_of_ranks
from graphopt.parallel.kinds import OverRanks
from graphopt.parallel.sharding import shards_of

if TYPE_CHECKING:
    import torch
    from torch import fx


@dataclass(frozen=True)
class ZeRO(OverRanks):
    """Data parallelism in which no rank keeps all of the optimizer's state.

    Attributes:
        group: the process group over whose ranks it is sharded; None is the default group.
        stage: 1: the optimizer's state is sharded. 2 is 1: in a graph a gradient dies where it is
            scattered. 3: parameters are sharded as well.
        keep_mb: with stage 3, so many MiB of the parameters that the forward reads last stay whole
            until the backward, which does not gather them again; None: the last one, where the
            backward begins with it.
        replicate_over: a second process group, for hybrid sharding: each of its ranks has the same
            rows, and `group` is one row of a mesh of which this group is a column. Gradients are
            scattered over `group`, and summed over both (`graphopt.parallel.hybrid`).
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
        if self.stage == 2:
            object.__setattr__(self, "stage", 1)

    @property
    def axes(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups of this rank on the mesh's axes; values are sharded along the last."""
        shards = super().axes
        return shards if self.replicate_over is None else (self.replicate_over, *shards)

    @property
    def mesh(self) -> tuple[tuple[int, ...], ...]:
        """The mesh of ranks: each row shards a value, each column holds replicas.

        Raises:
            ParallelismError: the groups span no mesh.
        """
        if self.replicate_over is not None:
            return mesh_of_ranks(self.axes[-1], self.replicate_over)
        return (tuple(dist.get_process_group_ranks(self.axes[-1])),)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The process group of the whole mesh, whose ranks run the step together."""
        return super().everyone if self.replicate_over is None else group_of_mesh(self.mesh)

    @property
    def ranks(self) -> int:
        """The number of ranks over which a value is sharded."""
        return self.axes[-1].size()

    def placement_of_state(self, state: torch.Tensor, parameter: torch.Tensor) -> Placement:
        """The placement of an optimizer state entry: sharded like its parameter if of the same
        shape."""
        same = state.shape == parameter.shape and shards_of(parameter, self.ranks) is not None
        return self._of_rows() if same and state.layout is parameter.layout else Placement.FULL

    def placement_of_parameter(self, parameter: torch.Tensor) -> Placement:
        """The placement of a parameter: sharded in stage 3 only."""
        sharded = self.stage == 3 and shards_of(parameter, self.ranks) is not None
        return self._of_rows() if sharded else Placement.FULL

    def _of_rows(self) -> Placement:
        return Placement((*[Replicate()] * (len(self.axes) - 1), Rows(0)))

    def expand(self, graph: fx.Graph) -> int:
        """Scatters marked gradients, updates this rank's rows, and gathers parameters."""
        from graphopt.parallel.markers import Group
        from graphopt.parallel.shard_expansion import Expansion

        *replicas, group = (Group(axis.group_name, axis.size()) for axis in self.axes)
        keep = None if self.keep_mb is None else self.keep_mb * 2**20
        return Expansion(graph, group, keep, *replicas).run()


def _is_size(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and number >= 0
