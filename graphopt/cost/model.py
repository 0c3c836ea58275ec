"""`CostModel`: the seconds by which schedules are decided."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import fx

from graphopt.cost.collectives import (
    NETWORKS,
    Collective,
    CollectiveTable,
    Network,
    Transfer,
    collective_of,
)
from graphopt.cost.errors import CostTableError
from graphopt.cost.hosts import spans_hosts
from graphopt.cost.operators import OperatorTable
from graphopt.cost.roofline import DEVICES, RooflineCost
from graphopt.graph_utils import is_collective, tensors_in
from graphopt.ir.metadata import known_value
from graphopt.ir.user_files import place, read_text, write

_FORMAT = "graphopt costs"
_VERSION = 5


@dataclass(frozen=True)
class CostModel:
    """The seconds of operators and of collectives.

    Attributes:
        compute: seconds that a node computes, such as a `RooflineCost`, an `OperatorTable`, or a
            function of one's own.
        communication: what a collective asks for, such as a `Network`, a `CollectiveTable`, or a
            function from `Collective` to `Transfer`.
        slowdown: share by which compute takes longer while a collective is under way.

    >>> from graphopt.cost import NETWORKS, CostModel
    >>> model = CostModel(compute=lambda node: 1e-6, communication=NETWORKS["infiniband"])
    >>> graphopt.simulate(gm, model).compute_seconds > 1e-6
    True
    """

    compute: Callable[[fx.Node], float]
    communication: Callable[[Collective], Transfer]
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.slowdown < float("inf"):
            raise CostTableError(f"slowdown={self.slowdown!r}: a share of compute, from 0")

    def compute_seconds(self, node: fx.Node) -> float:
        """Returns the device seconds of a node."""
        return _checked(self.compute(node), f"%{node.name}")

    def transfer(self, node: fx.Node, world_size: int | None = None) -> Transfer:
        """Returns the transfer that a launch starts.

        Args:
            world_size: ranks of its group, where the group is not there to be asked.
        """
        return self._asked(collective_of(node, world_size), f"%{node.name}")

    def transfer_of(self, collective: Collective) -> Transfer:
        """Returns the transfer of a planned collective.

        >>> from graphopt.cost import Collective, CostModel
        >>> CostModel.preset().transfer_of(Collective("all_reduce", 1 << 20, 2, "0")).seconds > 0
        True
        """
        return self._asked(collective, f"{collective.kind} of {collective.nbytes} bytes")

    def _asked(self, collective: Collective, name: str) -> Transfer:
        found = self.communication(collective)
        for seconds in (found.latency, found.transfer, found.overhead):
            _checked(seconds, name)
        return found

    @classmethod
    def preset(cls, device: str = "cpu", network: str = "ethernet") -> CostModel:
        """Returns a roofline from `DEVICES` with a network from `NETWORKS`, by name.

        Raises:
            CostTableError: there is none of that name.
        """
        for name, known in ((device, DEVICES), (network, NETWORKS)):
            if name not in known:
                raise CostTableError(f"there is no {name!r}: choose one of {', '.join(known)}")
        return cls(RooflineCost(DEVICES[device]), NETWORKS[network])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the costs to a JSON file, which `CostModel.load` reads.

        Raises:
            CostTableError: a part is a function of one's own.
            FileError: the file cannot be written.
        """
        write(place(path), self.to_text())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> CostModel:
        """Reads a file that `save` wrote.

        Raises:
            FileError: the file cannot be read.
            CostTableError: it does not hold costs.
        """
        try:
            return cls.from_text(read_text(place(path)))
        except CostTableError as error:
            raise CostTableError(f"{path}: {error}") from error

    def to_text(self) -> str:
        """Returns the costs as JSON."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "compute": _encode_compute(self.compute),
            "communication": _encode_communication(self.communication),
            "slowdown": self.slowdown,
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str) -> CostModel:
        """Parses the text of `to_text`."""
        try:
            content = json.loads(text)
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise CostTableError("costs in another format: calibrate again")
            compute = _decode_compute(content["compute"])
            communication = _decode_communication(content["communication"])
            return cls(compute, communication, content["slowdown"])
        except CostTableError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CostTableError(
                f"no costs, or damaged ({error}): costs are written by CostModel.save"
            ) from error


def default_cost_model(graph: fx.Graph) -> CostModel:
    """Returns presets that fit a graph and its launcher, equal on every rank and in every run.

    GPUs of a data sheet where its tensors are on CUDA, else one core; and a network by whether the
    ranks of its largest group share a machine (`graphopt.cost.hosts`).

    >>> from graphopt.cost import default_cost_model
    >>> costs = default_cost_model(gm.graph)
    >>> graphopt.simulate(gm, costs, world_size=2).step_seconds > 0
    True
    """
    devices = {
        tensor.device.type
        for node in graph.nodes
        if is_collective(node) or node.op == "placeholder"
        for tensor in tensors_in(known_value(node))
    }
    launches = [node for node in graph.nodes if is_collective(node)]
    ranks = max((collective_of(node).ranks for node in launches), default=1)
    if "cuda" not in devices:
        return CostModel.preset("cpu", "ethernet" if spans_hosts(ranks) else "loopback")
    return CostModel.preset("h100", "infiniband" if spans_hosts(ranks) else "nvlink")


def _checked(seconds: float, name: str) -> float:
    if not 0 <= seconds < float("inf"):
        raise CostTableError(
            f"the cost of {name} is {seconds!r}: seconds are finite, and not less than 0"
        )
    return seconds


def _encode_compute(compute: Callable[[fx.Node], float]) -> dict[str, Any]:
    if isinstance(compute, RooflineCost) and DEVICES.get(compute.device.name) == compute.device:
        return {"device": compute.device.name}
    if isinstance(compute, OperatorTable):
        return {
            "machine": compute.machine,
            "seconds": compute.seconds,
            "device": compute.fallback.name,
            "scales": compute.scales,
        }
    raise CostTableError(f"{compute!r} cannot be saved: only presets and measured tables can")


def _decode_compute(content: dict[str, Any]) -> RooflineCost | OperatorTable:
    device = DEVICES[content["device"]]
    if "seconds" not in content:
        return RooflineCost(device)
    seconds, scales = (
        {str(key): float(value) for key, value in content[table].items()}
        for table in ("seconds", "scales")
    )
    return OperatorTable(seconds, str(content["machine"]), device, scales)


def _encode_communication(communication: Callable[[Collective], Transfer]) -> dict[str, Any]:
    if isinstance(communication, Network):
        return {"network": _network(communication)}
    if isinstance(communication, CollectiveTable):
        points = [[kind, ranks, list(p)] for (kind, ranks), p in communication.points.items()]
        fallback = _network(communication.fallback)
        return {"points": points, "network": fallback, "overhead": communication.overhead}
    raise CostTableError(f"{communication!r} cannot be saved: only networks and tables can")


def _network(network: Network) -> list[Any]:
    rates = (network.alpha, network.bytes_per_second, network.start)
    return [network.name, *rates, network.overhead, network.scatters_singly, network.at_once]


def _decode_communication(content: dict[str, Any]) -> Network | CollectiveTable:
    name, *rates, singly, at_once = content["network"]
    alpha, rate, start, overhead = map(float, rates)
    network = Network(str(name), alpha, rate, start, overhead, singly is True, at_once=int(at_once))
    if "points" not in content:
        return network
    points = {
        (str(kind), int(ranks)): tuple((int(size), float(seconds)) for size, seconds in measured)
        for kind, ranks, measured in content["points"]
    }
    return CollectiveTable(points, network, float(content["overhead"]))
