"""Seconds of operators as measured on a device, by operator and by what it is called with."""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from graphopt.cost.roofline import DEVICES, Device, RooflineCost, is_free
from graphopt.graph_utils import is_collective, is_wait
from graphopt.host import is_host_call
from graphopt.ir.metadata import known_value
from graphopt.readable.rows import argument, describe

_LONGEST_KEY = 160


def operator_key(node: fx.Node) -> str:
    """What the time of a call depends on, as text: operator, dtypes, shapes, strides, options.

    >>> from graphopt.cost import operator_key
    >>> (total,) = graphopt.graph_utils.get_outputs(gm.graph).results
    >>> operator_key(total)
    'aten.sum.default(f32[3, 2])'
    """

    def described(value: Any) -> str:
        if isinstance(value, fx.Node):
            return _described(known_value(value))
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(described, value)) + "]"
        return argument(value, shorten=False)

    options = [f"{name}={described(value)}" for name, value in node.kwargs.items()]
    text = f"{node.target}({', '.join([*map(described, node.args), *options])})"
    if len(text) <= _LONGEST_KEY:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[: _LONGEST_KEY - 20]}… {digest}"


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return describe(value)
    dense = value.layout is torch.strided and not value.is_contiguous()
    return describe(value) + (f"/{tuple(value.stride())}" if dense else "")


@dataclass
class OperatorTable:
    """Measured seconds of operators; a roofline for what was not measured.

    Attributes:
        seconds: by `operator_key`.
        machine: where they were measured (`machine_name`).
        fallback: device of the roofline.

    >>> from graphopt.cost import OperatorTable
    >>> OperatorTable({}, machine="this one").lacks(gm.graph)
    True
    """

    seconds: dict[str, float]
    machine: str
    fallback: Device = DEVICES["cpu"]
    _roofline: RooflineCost = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._roofline = RooflineCost(self.fallback)

    def __call__(self, node: fx.Node) -> float:
        if is_free(node):
            return 0.0
        known = self.seconds.get(operator_key(node))
        return self._roofline(node) if known is None else known

    def lacks(self, graph: fx.Graph) -> bool:
        """Whether a call in a graph was not measured."""
        return any(not is_free(n) and operator_key(n) not in self.seconds for n in graph.nodes)


def measure_operators(
    graph_module: fx.GraphModule, inputs: Sequence[Any], rounds: int = 5
) -> dict[str, float]:
    """Run a graph node by node and take the median seconds of each kind of call.

    Collectives run too, so that all ranks of their groups have to do this together. Tensors among
    the inputs are copied, random numbers are as before afterwards, and functions of the program's
    (`graphopt.callback`) are not called.

    Args:
        inputs: one for each placeholder.
        rounds: runs that count; one more goes before them.
    """
    timed = _Timing(graph_module)
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.no_grad(), torch.random.fork_rng(cuda):
        for number in range(rounds + 1):
            if number == 1:
                timed.found.clear()  # the first round loads code and fills caches
            timed.run(*(v.clone() if isinstance(v, torch.Tensor) else v for v in inputs))
    return {key: statistics.median(seconds) for key, seconds in timed.found.items()}


class _Timing(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.found: dict[str, list[float]] = {}
        self._keys: dict[fx.Node, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        if is_host_call(n):
            return None  # of the program's: it is not to see what is measured with
        if is_free(n) or is_collective(n) or is_wait(n):
            return super().run_node(n)
        if n not in self._keys:
            self._keys[n] = operator_key(n)
        _synchronize(n)
        start = time.perf_counter()
        result = super().run_node(n)
        _synchronize(n)
        self.found.setdefault(self._keys[n], []).append(time.perf_counter() - start)
        return result


def _synchronize(node: fx.Node) -> None:
    value = known_value(node)
    if isinstance(value, torch.Tensor) and value.device.type == "cuda":
        torch.cuda.synchronize(value.device)


def machine_name(device: torch.device) -> str:
    """What measurements hold for: processor or GPU, threads, release of torch."""
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no GPU"
    else:
        kind = f"{_processor()}, {torch.get_num_threads()} threads"
    return f"{kind}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
