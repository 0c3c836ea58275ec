"""The number of collectives in which a step's gradients are sent.

Many small ones can be sent early, and little is left when the backward ends; but each takes time of
its own. With `n` of them, of `o` seconds each, on a link that needs as long as the compute, `C`:

    what they take      n * o
    what is exposed     about C / n       the link waits for the first, compute for the last

On a link that is much faster nothing is exposed, and only the first line counts. Not knowing which
it is, only `EXPOSED` of the second line is weighed, and ``n = sqrt(EXPOSED * C / o)`` is least.
Near that the sum is flat: half as many or twice as many cost a quarter more. Nothing about the rate
of the link has to be known, and no time of today is: `C` and `o` come from a table, and all ranks
have the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from graphopt.cost import CostModel

EXPOSED = 0.6
"""Measured with a GPT on two ranks that share two cores: more collectives make it slower than
DistributedDataParallel where they share the machine as well, fewer hide less of a slow link."""

MOST = 64
"""The largest number of collectives; larger models have their buckets limited by bytes."""


def collectives_by_cost(
    graph: fx.Graph, launches: Sequence[fx.Node], cost_model: CostModel, ranks: int | None = None
) -> int:
    """Returns the number of collectives, at least 1, that sends the values of `launches` fastest.

    Args:
        graph: of one step.
        launches: collectives that may become fewer.
        ranks: of their groups, where these are not there to be asked.

    Raises:
        CostTableError: a cost is negative or not finite.

    >>> from graphopt.cost import default_cost_model
    >>> from graphopt.graph_utils import find_nodes, is_collective
    >>> from graphopt.schedule import collectives_by_cost
    >>> launches = find_nodes(gm.graph, is_collective)
    >>> collectives_by_cost(gm.graph, launches, default_cost_model(gm.graph), ranks=2)
    1
    """
    if not launches:
        return 1
    compute = sum(cost_model.compute_seconds(node) for node in graph.nodes)
    transfers = [cost_model.transfer(launch, ranks) for launch in launches]
    each = max(transfer.overhead + transfer.latency for transfer in transfers)
    if not each:
        return MOST
    return min(MOST, max(1, round(math.sqrt(EXPOSED * compute / each))))
