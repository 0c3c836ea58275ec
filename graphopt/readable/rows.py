"""Texts of a graph's nodes, before they are laid out in columns."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import (
    follows_output_convention,
    get_output,
    get_outputs,
    is_collective,
    is_operator,
    is_view,
    is_wait,
    tensors_in,
)
from graphopt.graph_utils.tensor_metadata import bytes_in
from graphopt.ir.metadata import (
    input_kind,
    input_name,
    known_value,
    modules_of,
    phase_of,
    provenance_of,
    source_line,
)
from graphopt.iter_graph import IterGraph
from graphopt.readable.listing import LATE, LAUNCH, UPDATE, WAIT, ListingRow, Section

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_ITEMS_SHOWN = 4


def sections(
    graph: fx.Graph, *, shorten: bool = True, phase: str | None = None
) -> Iterator[Section]:
    """The rows of a graph in order, in sections of one phase.

    Args:
        shorten: leave out most of long lists of arguments.
        phase: give the calls of this phase only.
    """
    late: Mapping[fx.Node, fx.Node] = graph.late if isinstance(graph, IterGraph) else {}
    nodes = (node for node in graph.nodes if node.op != "output")
    if phase is not None:
        nodes = (n for n in nodes if n.op != "placeholder" and title_of(n) == phase)
    for title, group in groupby(nodes, title_of):
        yield title, [row_of(node, late, shorten) for node in group]
    if phase is None:
        yield "output", list(_output(graph, shorten))


def title_of(node: fx.Node) -> str:
    """The heading that a node stands under: its phase, or the kind of input."""
    if node.op == "placeholder":
        kind = input_kind(node)
        return f"inputs: {kind}" if kind else "inputs"
    return phase_of(node) or "graph"


def row_of(node: fx.Node, late: Mapping[fx.Node, fx.Node], shorten: bool = True) -> ListingRow:
    """The listing row of one node."""
    row = ListingRow(_statement(node, shorten), shape=describe(known_value(node)))
    row.size = _size(node)
    row.place = _place(node)
    if is_collective(node):
        row.marks, row.size = LAUNCH, sent_bytes(node)
    elif is_wait(node):
        row.marks = WAIT
    elif is_operator(node.target, "aten::copy_"):
        row.marks = UPDATE
    if node in late:
        row.marks += LATE
        row.note = f"late → before %{late[node].name}"
    return row


def _statement(node: fx.Node, shorten: bool) -> str:
    if node.op == "placeholder":
        return f"%{node.name}"
    if node.op == "get_attr":
        return f"%{node.name} = self.{node.target}{_constant(node)}"
    arguments = [argument(value, shorten) for value in node.args]
    arguments += [f"{key}={argument(value, shorten)}" for key, value in node.kwargs.items()]
    return f"%{node.name} = {target_text(node)}({', '.join(arguments)})"


def target_text(node: fx.Node) -> str:
    """The operator that a node calls, or its kind, as a word."""
    if node.op in ("placeholder", "get_attr", "output"):
        return node.op
    target = node.target
    return target if isinstance(target, str) else _function_name(target)


@cache
def _function_name(target: Any) -> str:
    if isinstance(target, _compat.OpOverload):
        return str(target)
    module = str(target.__module__).removeprefix("_")
    return f"{module}.{target.__name__}"


def _constant(node: fx.Node) -> str:
    """The value of a constant if it is a single number."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    if not isinstance(value, torch.Tensor) or value.is_meta or _compat.is_fake(value):
        return ""
    return f" ({value.item():g})" if value.dim() == 0 and value.device.type == "cpu" else ""


def argument(value: Any, shorten: bool) -> str:
    """A node's argument in short form: nodes as ``%name``, types without ``torch.``."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        items = [argument(item, shorten) for item in value]
        if shorten and len(items) > _ITEMS_SHOWN + 1:
            items[_ITEMS_SHOWN:] = [f"… {len(items) - _ITEMS_SHOWN} more"]
        text = ", ".join(items)
        if isinstance(value, list):
            return f"[{text}]"
        return f"({text},)" if len(items) == 1 else f"({text})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {argument(v, shorten)}" for k, v in value.items()) + "}"
    if isinstance(value, torch.dtype):
        return _SHORT.get(value) or str(value).removeprefix("torch.")
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    return repr(value)


def describe(value: Any) -> str:
    """A node's `meta["val"]` as text: ``f32[64, 128]``, ``float``, or a list."""
    if isinstance(value, torch.Tensor):
        kind = _SHORT.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        device = "" if value.device.type == "cpu" else f"@{value.device}"
        return f"{kind}{device}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        items = [describe(item) for item in value[:_ITEMS_SHOWN]]
        if len(value) > _ITEMS_SHOWN:
            items.append(f"… {len(value) - _ITEMS_SHOWN} more")
        return f"({', '.join(items)})"
    if isinstance(value, (torch.SymFloat, float)):
        return "float"
    if isinstance(value, (torch.SymInt, int)):
        return "int"
    return "" if value is None else type(value).__name__


def _size(node: fx.Node) -> int | None:
    """The bytes of a node's value, or None if it is an alias of another node's."""
    if node.target is operator.getitem or (node.op == "call_function" and is_view(node)):
        return None
    value = known_value(node)
    return bytes_in(value) if any(True for _ in tensors_in(value)) else None


def sent_bytes(node: fx.Node) -> int:
    """The bytes of the tensors that a collective sends.

    >>> from graphopt.graph_utils import find_nodes, is_collective
    >>> from graphopt.readable import sent_bytes
    >>> [sent_bytes(node) for node in find_nodes(gm.graph, is_collective)]
    [8, 32]
    """
    return bytes_in([known_value(source) for source in node.all_input_nodes])


def _place(node: fx.Node) -> str:
    parts = []
    modules = modules_of(node)
    if node.op == "placeholder":
        parts.append(input_name(node) or "")
    elif modules:
        parts.append(list(modules.values())[-1][0])
    source = source_line(node)
    if source is not None:
        parts.append(f"{PurePath(source.file).name}:{source.line}")
    origin = provenance_of(node)[-1:]
    if origin and origin[0] != "capture":
        parts.append(f"by {origin[0]}")
    return "  ".join(part for part in parts if part)


def _output(graph: fx.Graph, shorten: bool) -> Iterator[ListingRow]:
    if not follows_output_convention(graph):
        yield ListingRow(argument(get_output(graph).args[0], shorten))
        return
    outputs = get_outputs(graph)
    yield ListingRow(f"results: {argument(outputs.results, shorten)}")
    yield ListingRow(f"updates: {argument(outputs.updates, shorten)}")
    yield ListingRow(f"carried: {argument(outputs.carried, shorten)}")
