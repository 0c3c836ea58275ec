"""What one training step communicates: number of collectives, and bytes a rank puts into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.distributed.tensor.debug import CommDebugMode

from graphopt.graph_utils import is_collective
from graphopt.ir.metadata import fake_value


@dataclass(frozen=True)
class Traffic:
    """Collectives launched by one step of one rank, and the bytes of the tensors given to them."""

    collectives: int
    payload_bytes: int


def traffic_of_graph(graph_module: fx.GraphModule) -> Traffic:
    """Counted on the graph: its functional collectives, whose inputs' metadata has their sizes."""
    nodes = [node for node in graph_module.graph.nodes if is_collective(node)]
    return Traffic(len(nodes), sum(_bytes(node.args[0]) for node in nodes))


def traffic_of_call(call: Callable[[], object]) -> Traffic:
    """Observed while `call` runs: what DistributedDataParallel hands to the process group."""
    with _Observer() as observer:
        call()
    return Traffic(observer.collectives, observer.payload_bytes)


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    tensor = fake_value(value) if isinstance(value, fx.Node) else value
    return int(tensor.numel() * tensor.element_size())


class _Observer(CommDebugMode):
    def __init__(self) -> None:
        CommDebugMode.__init__(self)
        self.collectives = 0
        self.payload_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d" and "barrier" not in func.name():
            self.collectives += 1
            self.payload_bytes += _bytes(args[0])
        return CommDebugMode.__torch_dispatch__(self, func, types, args, kwargs)
