"""The roofline model: seconds of an operator from its floating-point operations and bytes.

The roofline model (Williams, Waterman, Patterson, "Roofline: an insightful visual performance model
for multicore architectures", CACM 2009): an operator takes as long as its arithmetic at the peak
rate of the device, or as its operands and results take from and to memory, whichever is longer.
Here a fixed time is added for starting it, which is what small operators cost.

Peak rates are those of the vendors' data sheets, dense. What of them a kernel reaches depends on
its shapes; `efficiency` stands for all of them together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from graphopt import _compat
from graphopt.cost.errors import CostTableError
from graphopt.graph_utils import is_operator, tensors_in
from graphopt.ir.inplace import inplace_form
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import is_fused_optimizer, operator_of

TERA = 1e12
GIGA = 1e9

_FREE = ("aten::_unsafe_view", "aten::detach", "aten::alias")
"""Further operators that only make a view, although their schema does not say so."""

_LONGEST_UPDATE = 16
"""The most operators between a state and its new value."""


@dataclass(frozen=True)
class Device:
    """The peak rates of a device.

    Attributes:
        name: for messages.
        flops: operations per second by dtype; a dtype that is missing counts as float32.
        bytes_per_second: of memory.
        launch_seconds: added to each operator that does something.
        efficiency: share of the peak rates that operators reach.

    >>> from graphopt.cost import DEVICES, Device
    >>> all(isinstance(device, Device) for device in DEVICES.values())
    True
    """

    name: str
    flops: Mapping[torch.dtype, float]
    bytes_per_second: float
    launch_seconds: float = 0.0
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        rates = [*self.flops.values(), self.bytes_per_second, self.efficiency]
        if torch.float32 not in self.flops or not all(0 < rate < float("inf") for rate in rates):
            raise CostTableError(
                f"device {self.name!r}: give rates above 0, that of torch.float32 among them"
            )
        if not 0 <= self.launch_seconds < float("inf"):
            raise CostTableError(f"device {self.name!r}: launch_seconds is not less than 0")

    def flops_of(self, dtype: torch.dtype) -> float:
        """Returns floating-point operations per second for a dtype."""
        return self.flops.get(dtype, self.flops[torch.float32])


def _gpu(name: str, fp32: float, tf32: float, half: float, bandwidth: float) -> Device:
    rates = {torch.float64: fp32 / 2, torch.float32: tf32}
    rates |= {torch.float16: half, torch.bfloat16: half}
    return Device(name, rates, bandwidth, launch_seconds=2e-6, efficiency=0.7)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("h100", 67 * TERA, 495 * TERA, 989 * TERA, 3350 * GIGA),
        _gpu("h200", 67 * TERA, 495 * TERA, 989 * TERA, 4800 * GIGA),
        _gpu("a100", 19.5 * TERA, 156 * TERA, 312 * TERA, 2039 * GIGA),
        # One core with AVX2 and a share of the memory's rate.
        Device(
            "cpu",
            {torch.float32: 0.06 * TERA, torch.float64: 0.03 * TERA, torch.bfloat16: 0.03 * TERA},
            8 * GIGA,
            launch_seconds=3e-6,
        ),
    )
}


Sizes: TypeAlias = dict[fx.Node, tuple[Any, int]]
"""For each node, its value and the value's bytes."""


@dataclass
class RooflineCost:
    """The roofline seconds of nodes on one device, cached by node; 0 for inputs, views, Python
    numbers, launches and waits.

    Attributes:
        device: what computes.

    >>> from graphopt.cost import DEVICES, RooflineCost
    >>> (total,) = graphopt.graph_utils.get_outputs(gm.graph).results
    >>> RooflineCost(DEVICES["cpu"])(total) > 0
    True
    """

    device: Device
    _known: dict[fx.Node, tuple[object, float]] = field(default_factory=dict, repr=False)
    _sizes: Sizes = field(default_factory=dict, repr=False, compare=False)
    _operations: dict[object, float] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, node: fx.Node) -> float:
        if is_free(node):
            return 0.0
        described = (node.target, node.args)
        found = self._known.get(node)
        if found is None or found[0] != described:
            found = self._known[node] = described, self._seconds(node)
        return found[1]

    def _seconds(self, node: fx.Node) -> float:
        device, sizes = self.device, self._sizes
        moved = sum([_bytes_of(held, sizes) for held in (*_compat.inputs_of(node), node)])
        moving = moved / (device.bytes_per_second * device.efficiency)
        computing = 0.0
        if _compat.flop_formula(node.target) is not None:
            rate = device.flops_of(_dtype(node)) * device.efficiency
            computing = self._flops(node) / rate
        return device.launch_seconds + max(computing, moving)

    def _flops(self, node: fx.Node) -> float:
        """Returns `flops_of` a node, cached across equal calls."""
        call = _call_of(node)
        if call is None:
            return flops_of(node)
        found = self._operations.get(call)
        if found is None:
            found = self._operations[call] = flops_of(node)
        return found


def _call_of(node: fx.Node) -> object | None:
    """Returns a hashable key of a call (target, tensor shapes, plain values), or None if it has
    other arguments."""
    given: list[object] = [node.target]
    if node.kwargs:
        return None
    for argument in node.args:
        if isinstance(argument, fx.Node):
            value = known_value(argument)
            if not isinstance(value, torch.Tensor) or _compat.has_symbolic_shape(value):
                return None
            given.append(tuple(value.shape))
        elif argument is None or isinstance(argument, (bool, int, float)):
            given.append((type(argument), argument))
        else:
            return None
    return tuple(given)


def is_free(node: fx.Node) -> bool:
    """True if a node takes no device time: it moves no data, or another node accounts for it."""
    if node.op not in ("call_function", "call_module", "call_method"):
        return True
    known = operator_of(node)
    if known.collective or known.wait or known.item:
        return True
    if known.may_alias:
        if is_operator(node.target, "aten::copy_"):
            return bool(updates_in_place(node))  # finalizing computes the update in place
        return not known.writes
    if is_operator(node.target, *_FREE):
        return True
    value = known_value(node)
    if isinstance(value, torch.Tensor):
        return False
    return not any(True for _ in tensors_in(value)) and not known.writes


def updates_in_place(copy: fx.Node) -> list[fx.Node]:
    """Returns the operators between a `copy_`'s destination and its value that finalizing makes
    in-place; empty if the value does not start from the destination."""
    destination: Any = copy.args[0]
    value: Any = copy.args[1]
    found: list[fx.Node] = []
    for _ in range(_LONGEST_UPDATE):
        if value is destination:
            return found
        if isinstance(value, fx.Node):
            found.append(value)
        value = _overwritten_by(value)
    return []


def _overwritten_by(value: Any) -> Any:
    """Returns the argument that the in-place form of `value`'s operator overwrites, or None."""
    if not isinstance(value, fx.Node):
        return None
    path: list[Any] = []
    while value.target is operator.getitem:
        value, index = value.args
        path.insert(0, index)
    source: Any
    if is_fused_optimizer(value):
        source = value.args
    elif inplace_form(value.target, known_value(value)) is not None:
        source = value.args[0] if value.args else None
    else:
        return None
    for index in path:
        source = source[index]
    return source


def flops_of(node: fx.Node) -> float:
    """Returns a node's floating-point operations by the formulas of torch's flop counter. 0
    without a formula, where time is bytes moved, and for symbolic sizes, which counting would
    specialize."""
    formula = _compat.flop_formula(node.target)
    if formula is None or _has_symbolic_shape(node):
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: known_value(source))
    try:
        return float(formula(*args, **kwargs, out_val=known_value(node)))
    except (AttributeError, IndexError, TypeError, ValueError):  # other arguments than expected
        return 0.0


def _has_symbolic_shape(node: fx.Node) -> bool:
    values = (known_value(each) for each in (node, *node.all_input_nodes))
    return any(map(_compat.has_symbolic_shape, tensors_in(list(values))))


def _dtype(node: fx.Node) -> torch.dtype:
    for value in (known_value(node), *(known_value(n) for n in node.all_input_nodes)):
        for tensor in tensors_in(value):
            return tensor.dtype
    return torch.float32


def _bytes_of(node: fx.Node, sizes: Sizes) -> int:
    """Returns the bytes of a node's tensors, cached because most are read several times."""
    value = known_value(node)
    found = sizes.get(node)
    if found is None or found[0] is not value:
        single = isinstance(value, torch.Tensor)
        nbytes = _bytes(value) if single else sum(map(_bytes, tensors_in(value)))
        found = sizes[node] = value, nbytes
    return found[1]


def _bytes(tensor: torch.Tensor) -> int:
    if _compat.has_symbolic_shape(tensor) or tensor.layout is not torch.strided:
        return 0
    if tensor.is_contiguous():
        return tensor.nbytes
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride or not size) * tensor.element_size()
