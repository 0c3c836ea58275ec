"""Seconds of collectives: the alpha-beta model, presets, and measured tables.

A message of `n` bytes takes ``alpha + n * beta`` between two ranks (Hockney, "The communication
challenge for MPP", Parallel Computing 1994). What a collective of `p` ranks takes follows from its
algorithm (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 2005). With `n` bytes in all:

    all-gather, reduce-scatter, all-to-all    ring    (p - 1) (alpha + n / p * beta)
    all-reduce                                ring    2 (p - 1) (alpha + n / p * beta)
    all-reduce                                tree    2 log2(p) alpha + 2 (p - 1) / p * n * beta
    broadcast                                 tree    log2(p) alpha + n * beta

The tree is the double binary tree, which keeps the full rate (Sanders, Speck, Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009); of the two
the faster one counts.

Several tensors in one call start once. Not so a reduce-scatter of gloo's, which is an all-reduce
for each tensor.

Start-up time takes a communicator, but not its link; time of transfer takes the link, which
communicators share. Whoever computes loses the *overhead* of a collective, as in the LogP model
(Culler et al., "LogP: towards a realistic model of parallel computation", PPoPP 1993): a launch, or
the threads of a backend that share its cores.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from graphopt import _compat
from graphopt.comm import argument, kind_of
from graphopt.cost.errors import CostTableError
from graphopt.graph_utils.tensor_metadata import bytes_in
from graphopt.ir.metadata import known_value

Point = tuple[int, float]
"""(bytes, seconds) of a collective."""

_SEVERAL = "_coalesced"
"""The name suffix of collectives that send several tensors."""

SHARED_LINK = "network"
"""The link of `Network` and `CollectiveTable`, which all groups share."""


class Collective(NamedTuple):
    """The properties of a collective that its time depends on.

    Attributes:
        kind: such as ``"all_reduce"``.
        nbytes: of the whole tensor: what each rank has before a reduce-scatter or after an
            all-gather, not one rank's share.
        ranks: in its group.
        group: name of the group.
        tensors: that are sent in one call.

    >>> from graphopt.cost import Collective
    >>> Collective("all_reduce", 1 << 20, 2, "0").ranks
    2
    """

    kind: str
    nbytes: int
    ranks: int
    group: str
    tensors: int = 1


class Transfer(NamedTuple):
    """The seconds of a collective, and its use of links.

    Attributes:
        latency: seconds before anything is on the link.
        transfer: seconds that it keeps its links busy, alone on them.
        links: names of what it shares with other groups.
        overhead: seconds that it takes away from compute.
        at_once: how many collectives of its group the backend runs at the same time.

    >>> from graphopt.cost import collective_of, default_cost_model
    >>> launch = graphopt.comm.get_all_comm_blocks(gm)[0].comm_node
    >>> default_cost_model(gm.graph).transfer(launch, 2).seconds > 0
    True
    """

    latency: float
    transfer: float
    links: tuple[str, ...] = (SHARED_LINK,)
    overhead: float = 0.0
    at_once: int = 1

    @property
    def seconds(self) -> float:
        """The seconds from start to end without contention."""
        return self.latency + self.transfer


def collective_of(node: fx.Node, ranks: int | None = None) -> Collective:
    """Returns the properties of the collective that a launch starts; a call with a list of tensors
    counts as one.

    Args:
        ranks: of its group, where the group itself is not there to be asked (a saved graph).

    >>> from graphopt.cost import collective_of
    >>> collective_of(graphopt.comm.get_all_comm_blocks(gm)[0].comm_node, 2).kind
    'all_reduce'
    """
    sent = bytes_in([known_value(source) for source in node.all_input_nodes])
    received = bytes_in(known_value(node))
    group = str(argument(node, "group_name"))
    size = ranks or argument(node, "group_size") or _size_of(group)
    kind = kind_of(node).removesuffix(_SEVERAL)
    sent_at_once = argument(node, "inputs")
    tensors = len(sent_at_once) if isinstance(sent_at_once, (list, tuple)) else 1
    return Collective(kind, max(sent, received), int(size), group, tensors)


def in_one_call(collectives: Sequence[Collective]) -> Collective:
    """Combines collectives of one kind and group into one that sends all their tensors.

    >>> from graphopt.cost import Collective
    >>> from graphopt.cost.collectives import in_one_call
    >>> in_one_call(2 * [Collective("reduce_scatter_tensor", 1024, 8, "0")])[1:]
    (2048, 8, '0', 2)
    """
    return collectives[0]._replace(
        nbytes=sum(collective.nbytes for collective in collectives),
        tensors=sum(collective.tensors for collective in collectives),
    )


def _size_of(group: str) -> int:
    found = _compat.group_named(group)
    return 2 if found is None else found.size()


@dataclass(frozen=True)
class Network:
    """The seconds of collectives by the alpha-beta model.

    Attributes:
        name: of the preset.
        alpha: seconds from the start of a message to its first byte.
        bytes_per_second: that one rank sends while it receives as much.
        start: seconds that each collective takes on top, whatever its size and ranks.
        overhead: seconds that each collective takes away from compute, whatever its size.
        scatters_singly: whether tensors that are scattered in one call go one after another, as
            with gloo, and start as often.
        at_once: how many collectives of a group share the link, as two do with gloo.

    >>> from graphopt.cost import NETWORKS, Network
    >>> all(isinstance(network, Network) for network in NETWORKS.values())
    True
    """

    name: str
    alpha: float
    bytes_per_second: float
    start: float = 0.0
    overhead: float = 0.0
    scatters_singly: bool = False
    at_once: int = 1

    def __post_init__(self) -> None:
        least = min(self.alpha, self.start, self.overhead)
        if not (least >= 0 and self.bytes_per_second > 0):
            raise CostTableError(
                f"network {self.name!r}: alpha, start and overhead are seconds from 0,"
                " bytes_per_second is above 0"
            )

    def __call__(self, collective: Collective) -> Transfer:
        steps, passes = _steps_and_passes(collective)
        seconds = passes * collective.nbytes / self.bytes_per_second
        singly = self.scatters_singly and collective.kind.startswith("reduce_scatter")
        starts = collective.tensors if singly else 1
        latency = starts * (self.start + steps * self.alpha)
        return Transfer(latency, seconds, overhead=starts * self.overhead, at_once=self.at_once)


def _steps_and_passes(collective: Collective) -> tuple[float, float]:
    """Returns the number of sequential messages, and how often all bytes pass a rank's link."""
    kind, ranks = collective.kind, collective.ranks
    if ranks < 2:
        return 0.0, 0.0
    share = (ranks - 1) / ranks
    depth = math.ceil(math.log2(ranks))
    if kind.startswith("all_reduce"):
        return min(2.0 * (ranks - 1), 2.0 * depth), 2 * share
    if kind.startswith("broadcast"):
        return depth, 1.0
    return ranks - 1, share


NETWORKS: Mapping[str, Network] = {
    network.name: network
    for network in (
        Network("nvlink", 1e-6, 360e9, start=6e-6, overhead=10e-6),
        Network("infiniband", 3e-6, 45e9, start=10e-6, overhead=10e-6),
        Network("ethernet", 30e-6, 1.1e9, start=100e-6, overhead=2e-4, scatters_singly=True),
        Network("loopback", 20e-6, 2e9, start=150e-6, overhead=1e-3, scatters_singly=True),
    )
}
"""NVLink 4 and 400 Gbit/s InfiniBand between GPUs with NCCL; 10 Gbit/s Ethernet and one machine
with gloo. Rates are about nine tenths of the vendors'; a collective of gloo wakes a dozen threads,
on cores that compute, and within one machine those of all its ranks."""


@dataclass(frozen=True)
class CollectiveTable:
    """Measured or published seconds of collectives, linear between two sizes of one kind and group
    size.

    Below the smallest size its time counts, and above the largest the rate of the last two goes on.

    Attributes:
        points: by kind and number of ranks, in order of bytes.
        fallback: for kinds and numbers of ranks without points.
        overhead: seconds that a collective takes away from compute.

    >>> from graphopt.cost import Collective, CollectiveTable, NETWORKS
    >>> callable(CollectiveTable)
    True
    """

    points: Mapping[tuple[str, int], tuple[Point, ...]]
    fallback: Network = NETWORKS["ethernet"]
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for (kind, ranks), points in self.points.items():
            sizes = [size for size, _ in points]
            if not points or sizes != sorted(set(sizes)) or any(s < 0 for _, s in points):
                raise CostTableError(
                    f"the table of {kind} on {ranks} ranks needs points in order of bytes, each"
                    " size once, with seconds from 0"
                )

    def __call__(self, collective: Collective) -> Transfer:
        points = self.points.get((collective.kind, collective.ranks))
        if points is None:
            return self.fallback(collective)
        seconds = interpolated(points, collective.nbytes)
        latency = min(points[0][1], seconds)
        return Transfer(latency, seconds - latency, overhead=self.overhead)


def interpolated(points: Sequence[Point], nbytes: int) -> float:
    """Returns the seconds for `nbytes`, between or beyond the points of a table."""
    index = bisect_left(points, (nbytes, -1.0))
    if index == 0:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * nbytes / points[0][0] if points[0][0] else points[0][1]
    (size, low), (next_size, high) = (
        points[index - 1 : index + 1] if index < len(points) else points[-2:]
    )
    slope = max(0.0, (high - low) / (next_size - size))
    return low + slope * (nbytes - size)


def fitted(samples: Iterable[Point]) -> tuple[float, float]:
    """Fits start-up seconds and seconds per byte to samples by least relative error.

    Least squares with weights; neither is below 0.
    """
    points = [(nbytes, seconds) for nbytes, seconds in samples if seconds > 0]
    if not points:
        raise CostTableError("nothing was measured")
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_x) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    if not spread:
        return mean_y, 0.0
    both = sum(w * (n - mean_x) * (s - mean_y) for w, (n, s) in zip(weights, points, strict=True))
    beta = max(0.0, both / spread)
    return max(0.0, mean_y - beta * mean_x), beta
