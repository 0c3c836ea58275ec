"""JSON form of graphs: nodes in order, with targets, arguments and meaningful metadata."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from graphopt.ir.metadata import MODULES, source_line
from graphopt.ir.placement import placement_of
from graphopt.ir.source import SourceLine
from graphopt.iter_graph import IterGraph
from graphopt.saved.arguments import decode, decode_target, encode, encode_target, not_saved
from graphopt.saved.errors import SavedGraphError
from graphopt.saved.json_values import ValueDecoder, ValueEncoder
from graphopt.saved.source_lines import decode_line, encode_line

_OPS = ("placeholder", "get_attr", "call_function", "output")


def encode_graph(graph: fx.Graph) -> dict[str, Any]:
    """The JSON form of a graph: its nodes in order.

    Raises:
        SavedGraphError: naming the node that cannot be saved, and why.
    """
    values = ValueEncoder()
    numbers: dict[fx.Node, int] = {}
    nodes = []
    for number, node in enumerate(graph.nodes):
        try:
            nodes.append(_encode_node(node, numbers, values))
        except SavedGraphError as error:
            raise SavedGraphError(f"%{node.name} cannot be saved: {error}{_from(node)}") from None
        numbers[node] = number
    late: Mapping[fx.Node, fx.Node] = graph.late if isinstance(graph, IterGraph) else {}
    return {
        "nodes": nodes,
        "storages": values.storages,
        "late": [[numbers[node], numbers[before]] for node, before in late.items()],
    }


def decode_graph(
    data: dict[str, Any], graph: fx.Graph, constants: Collection[str], values: ValueDecoder
) -> None:
    """Appends the nodes in `data` to an empty graph.

    Args:
        constants: names of those that there are.
        values: for the storages of `data`.
    """
    nodes: list[fx.Node] = []
    for described in data["nodes"]:
        nodes.append(_decode_node(described, graph, nodes, values))
        if nodes[-1].op == "get_attr" and nodes[-1].target not in constants:
            raise ValueError(f"the constant {nodes[-1].target} is missing")
    if isinstance(graph, IterGraph):
        # Not by moves, which are checked: a graph may be saved because something is wrong with it.
        for late, before in data["late"]:
            graph.mark_late(nodes[late], nodes[before])


def _encode_node(
    node: fx.Node, numbers: Mapping[fx.Node, int], values: ValueEncoder
) -> dict[str, Any]:
    if node.op not in _OPS:
        raise SavedGraphError(
            f"it is a {node.op}, and graphs in files call operators only; capture the module, which"
            " inlines it"
        )

    def input_number(value: Any) -> Any:
        return {"node": numbers[value]} if isinstance(value, fx.Node) else not_saved(value)

    described: dict[str, Any] = {"name": node.name, "op": node.op}
    if node.op != "output":
        called = node.op == "call_function"
        described["target"] = encode_target(node.target) if called else node.target
    if node.args:
        described["args"] = [encode(arg, input_number) for arg in node.args]
    if node.kwargs:
        described["kwargs"] = {k: encode(arg, input_number) for k, arg in node.kwargs.items()}
    described["meta"] = _encode_meta(node.meta, values)
    return described


def _decode_node(
    described: dict[str, Any], graph: fx.Graph, nodes: list[fx.Node], values: ValueDecoder
) -> fx.Node:
    def input_node(kind: str, number: int) -> fx.Node:
        if kind != "node":
            raise ValueError(f"an argument is a {kind}")
        return nodes[number]

    op, name = described["op"], described["name"]
    target = "output" if op == "output" else described["target"]
    if op not in _OPS or not _is_identifier(name):
        raise ValueError(f"{name!r} is not a node")
    if op == "call_function":
        try:
            target = decode_target(target)
        except SavedGraphError as error:
            raise SavedGraphError(f"%{name} cannot be loaded: {error}") from None
    elif not all(map(_is_identifier, target.lstrip("*").split("."))):
        raise ValueError(f"{target!r} is not a name")
    args = tuple(decode(arg, input_node) for arg in described.get("args", ()))
    kwargs = {key: decode(arg, input_node) for key, arg in described.get("kwargs", {}).items()}
    if not all(map(_is_identifier, kwargs)):
        raise ValueError(f"an argument of {name} has no proper name")
    node: fx.Node = graph.create_node(op, target, args, kwargs, name=name)
    node.meta = _decode_meta(described["meta"], values)
    if op == "placeholder":
        placement_of(node)  # raises where this version does not know it
    return node


def _is_identifier(text: object) -> bool:
    """True if a text is a Python identifier: names become part of generated code."""
    return isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)


def _encode_meta(meta: Mapping[str, Any], values: ValueEncoder) -> dict[str, Any]:
    """The JSON form of a node's metadata: keys that docs/ir.md lists, and other plain values."""
    encoded: dict[str, Any] = {}
    for key, value in meta.items():
        if key == "val":
            encoded["val"] = values.encode(value)
        elif isinstance(value, SourceLine):
            encoded.setdefault("lines", {})[key] = encode_line(value)
        elif key == MODULES:
            encoded["modules"] = [[path, *_module(entry)] for path, entry in value.items()]
        elif isinstance(value, tuple) and all(isinstance(item, str) for item in value):
            encoded.setdefault("texts", {})[key] = list(value)
        elif isinstance(value, (bool, int, float, str)):
            encoded.setdefault("plain", {})[key] = value
    return encoded


def _decode_meta(data: dict[str, Any], values: ValueDecoder) -> dict[str, Any]:
    meta: dict[str, Any] = dict(data.get("plain", {}))
    for key, line in data.get("lines", {}).items():
        meta[key] = decode_line(line)
    if "modules" in data:
        meta[MODULES] = {path: (name, kind) for path, name, kind in data["modules"]}
    meta.update({key: tuple(texts) for key, texts in data.get("texts", {}).items()})
    if "val" in data:
        meta["val"] = values.decode(data["val"])
    return meta


def _module(entry: Any) -> tuple[str, str]:
    """The qualified name of a module, with its class's name in place of the class."""
    name, kind = entry
    return name, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _from(node: fx.Node) -> str:
    source = source_line(node)
    return f"\n  from:  {source}" if source is not None else ""
