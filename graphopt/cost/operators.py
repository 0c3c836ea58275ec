"""Measured seconds of operators on a device, by operator and arguments."""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from graphopt.cost.roofline import DEVICES, Device, RooflineCost, is_free, updates_in_place
from graphopt.graph_utils import is_collective, is_wait, tensors_in
from graphopt.host import is_host_call
from graphopt.ir.inplace import inplace_form
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument as operator_argument
from graphopt.ir.operators import fused_in_place, fused_optimizer, updated_lists
from graphopt.readable.rows import argument, describe

_LONGEST_KEY = 160


def operator_key(node: fx.Node) -> str:
    """Returns the properties that a call's time depends on, as text: operator, dtypes, shapes,
    strides, options.

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
    """Measured seconds of operators, with a roofline for calls that were not measured.

    A pass may divide a measured call, such as an optimizer's, into calls of other shapes: the
    roofline of these is scaled by what other calls of the operator take.

    Attributes:
        seconds: by `operator_key`.
        machine: where they were measured (`machine_name`).
        fallback: device of the roofline.
        scales: measured seconds over those of the roofline, by operator.

    >>> from graphopt.cost import OperatorTable
    >>> OperatorTable({}, machine="this one").lacks(gm.graph)
    True
    """

    seconds: dict[str, float]
    machine: str
    fallback: Device = DEVICES["cpu"]
    scales: dict[str, float] = field(default_factory=dict)
    _roofline: RooflineCost = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._roofline = RooflineCost(self.fallback)

    def __call__(self, node: fx.Node) -> float:
        if is_free(node):
            return 0.0
        known = self.seconds.get(operator_key(node))
        if known is not None:
            return known
        return self._roofline(node) * self.scales.get(str(node.target), 1.0)

    def lacks(self, graph: fx.Graph) -> bool:
        """True if some call of a graph was not measured."""
        return any(not is_free(n) and operator_key(n) not in self.seconds for n in graph.nodes)


class Measurement:
    """Timed runs of a graph, node by node.

    Collectives run in the first one, which waits for each at once, so that all ranks of their
    groups have to begin together; later ones take what came of them, and measure compute that
    nothing is sent beside. Tensors among the inputs are copied, random numbers are as before
    afterwards, and functions of the program's (`graphopt.callback`) are not called.

    Args:
        inputs: one for each placeholder.

    >>> from graphopt.cost.operators import Measurement
    >>> captured = graphopt.capture(torch.tanh, torch.ones(2))
    >>> measurement = Measurement(captured.graph_module, [torch.ones(2)])
    >>> measurement.run() > 0, list(measurement.medians())
    (True, ['aten.tanh.default(f32[2])'])
    """

    def __init__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._timing, self._inputs = _Timing(graph_module), inputs
        devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
        self._cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
        self.run()
        self._timing.found.clear()  # the first run loads code and fills caches

    def run(self) -> float:
        """Runs all nodes once more and returns their total seconds."""
        before = self._timing.total
        with torch.no_grad(), torch.random.fork_rng(self._cuda):
            copies = (v.clone() if isinstance(v, torch.Tensor) else v for v in self._inputs)
            self._timing.run(*copies)
        return self._timing.total - before

    def medians(self) -> dict[str, float]:
        """Returns the median seconds of each kind of call."""
        return {key: statistics.median(seconds) for key, seconds in self._timing.found.items()}

    def scales(self, device: Device) -> dict[str, float]:
        """Returns the seconds of each operator over those of the device's roofline."""
        roofline = RooflineCost(device)
        measured: defaultdict[str, float] = defaultdict(float)
        predicted: defaultdict[str, float] = defaultdict(float)
        for key, seconds in self.medians().items():
            node = self._timing.nodes[key]
            measured[str(node.target)] += seconds
            predicted[str(node.target)] += roofline(node)
        return {name: measured[name] / predicted[name] for name in measured if predicted[name]}


class _Timing(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.found: dict[str, list[float]] = {}
        self.total = 0.0
        self.nodes: dict[str, fx.Node] = {}
        self._keys: dict[fx.Node, str] = {}
        self._received: dict[fx.Node, Any] = {}
        copies = graph_module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.copy_.default
        )
        self._in_place = {node for copy in copies for node in updates_in_place(copy)}

    def run_node(self, n: fx.Node) -> Any:
        if is_host_call(n):
            return None  # of the program's: it is not to see what is measured with
        if is_collective(n):
            if n not in self._received:
                self._received[n] = _waited(super().run_node(n))
            return self._received[n]
        if is_free(n) or is_wait(n):
            return super().run_node(n)
        if n not in self._keys:
            self._keys[n] = operator_key(n)
            self.nodes[self._keys[n]] = n
        call, result = self._prepared(n)
        _synchronize(n)
        start = time.perf_counter()
        returned = call()
        _synchronize(n)
        passed = time.perf_counter() - start
        self.total += passed
        self.found.setdefault(self._keys[n], []).append(passed)
        return returned if result is None else result

    def _prepared(self, n: fx.Node) -> tuple[Callable[[], Any], Any]:
        """Returns the function to time, and its result if it returns none; updates are timed in
        place, as they run in the executable dialect."""
        name = fused_optimizer(n.target)
        results = known_value(n)
        if n in self._in_place and (written := inplace_form(n.target, results)) is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if isinstance(args[0], torch.Tensor):
                return partial(written, args[0].clone(), *args[1:], **kwargs), None
        if name is None or not isinstance(results, (list, tuple)):
            return partial(super().run_node, n), None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        given = list(args)
        updated = updated_lists(name, operator_argument(n, "grad_scale"))
        for position in updated:
            given[position] = [tensor.clone() for tensor in given[position]]
        call = partial(fused_in_place(n.target), *given, **kwargs)
        return call, tuple(given[: len(results)])


def _waited(launched: Any) -> Any:
    for tensor in tensors_in(launched):
        torch.ops._c10d_functional.wait_tensor(tensor)
    return launched


def _synchronize(node: fx.Node) -> None:
    value = known_value(node)
    if isinstance(value, torch.Tensor) and value.device.type == "cuda":
        torch.cuda.synchronize(value.device)


def machine_name(device: torch.device) -> str:
    """Names the machine that measurements hold for: processor or GPU, threads, release of torch."""
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
