"""Resolution of the `parallel=` option to a kind of parallelism."""

from __future__ import annotations

import torch.distributed as dist

from graphopt.errors import CollectiveError
from graphopt.parallel.data_parallel import DataParallel
from graphopt.parallel.kinds import Manual, OverRanks, Parallel


def resolve(parallel: Parallel | None) -> Parallel:
    """Returns the kind for `parallel=`; None means `DataParallel` on several ranks, else `Manual`.

    Raises:
        CollectiveError: a kind needs a process group, and there is none.
        TypeError: it is no kind of parallelism.
    """
    available = dist.is_available() and dist.is_initialized()
    if parallel is None:
        return DataParallel() if available and dist.get_world_size() > 1 else Manual()
    if isinstance(parallel, OverRanks) and not available:
        raise CollectiveError(
            f"{type(parallel).__name__}() works over a process group, and there is none, or none"
            " any more",
            hint="call torch.distributed.init_process_group() first; parallel=None averages where"
            " there is a group",
        )
    if isinstance(parallel, Parallel):
        return parallel
    raise TypeError(
        f"parallel={parallel!r}: pass None, graphopt.DataParallel(...) or graphopt.Manual()"
    )
