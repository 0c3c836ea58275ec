"""Saves graphs to files and loads them; loading runs no code of the file."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.user_files import place, read_bytes, write
from graphopt.iter_graph import IterGraph, IterGraphModule
from graphopt.saved.arguments import decode, encode
from graphopt.saved.errors import SavedGraphError
from graphopt.saved.group_sizes import KEY as GROUPS
from graphopt.saved.group_sizes import sizes_now
from graphopt.saved.json_values import DescriptionDecoder, ValueDecoder, ValueEncoder
from graphopt.saved.nodes import decode_graph, encode_graph
from graphopt.verify.checks.group_checks import group_problems

FORMAT, VERSION = "graphopt graph", 1
"""What a file says that it is."""
APPLIED = "graphopt_passes"
"""Key of `GraphModule.meta` under which the records of applied passes are kept."""


def save_graph(graph_module: fx.GraphModule, path: str | Path) -> None:
    """Saves a graph with all metadata that passes read; `load_graph` loads it.

    Kept are nodes, their order and names, what they compute (shapes, dtypes, devices, which of
    them share storage), phases, source lines with their text, module paths, provenance, late nodes,
    applied passes, and constants with their values. The model's parameters are not part of a
    graph.

    Args:
        graph_module: a `torch.fx.GraphModule` or an `IterGraphModule`, such as
            `train_step.graph_module`.
        path: the path of the file; missing folders are made, and ``~`` is the home folder.

    Raises:
        FileError: the file cannot be written.
        SavedGraphError: a node calls what is not an operator, or holds what cannot be described.

    >>> graphopt.saved.save_graph(gm, "step.pt")
    """
    if not isinstance(graph_module, fx.GraphModule):
        raise SavedGraphError(
            f"a {type(graph_module).__name__} is not a graph: save `train_step.graph_module`, or"
            " `graphopt.capture(...).graph_module`"
        )
    content, tensors = _encode(graph_module)
    saved = {
        "format": FORMAT,
        "version": VERSION,
        "content": json.dumps(content, separators=(",", ":")),
        "tensors": tensors,
    }
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    write(place(path), buffer.getvalue())


def load_graph(path: str | Path) -> fx.GraphModule:
    """Loads a graph that `save_graph` saved, as an `IterGraphModule` if it was one.

    The program that the graph comes from is not needed. Custom operators are: import the module
    that defines them first. Tensors are fakes of a new `FakeTensorMode`; random generators are new.
    Constants of a GPU stand on the CPU where there is none.

    Raises:
        FileError: the file cannot be read; `FileNotFoundError` as well where there is none.
        SavedGraphError: the file holds no graph, is damaged, is of a later version of graphopt, or
            needs an operator that is not known here.

    >>> graphopt.saved.save_graph(gm, "step.pt")
    >>> loaded = graphopt.saved.load_graph("step.pt")
    >>> len(loaded.graph.nodes) == len(gm.graph.nodes)
    True
    """
    return _load(path, ValueDecoder)


def load_description(path: str | Path) -> fx.GraphModule:
    """Loads a graph quickly, only to look at: its tensors cannot be computed with, so that it
    cannot be rewritten or run.

    >>> from graphopt.readable import graph_text
    >>> graphopt.saved.save_graph(gm, "step.pt")
    >>> graph_text(graphopt.saved.load_description("step.pt")) == graph_text(gm)
    True
    """
    return _load(path, DescriptionDecoder)


def _load(path: str | Path, decoder: type[ValueDecoder]) -> fx.GraphModule:
    path = place(path)
    saved = _read(path)
    try:
        content = json.loads(saved["content"])
        return _decode(content, saved["tensors"], decoder)
    except SavedGraphError as error:
        raise SavedGraphError(f"{path}: {error}") from None
    except Exception as error:  # what other content than `save_graph` writes leads to
        raise SavedGraphError(f"{path} is damaged ({error}): save the graph again") from error


def _read(path: Path) -> dict[str, Any]:
    device = None if torch.cuda.is_available() else "cpu"
    content = io.BytesIO(read_bytes(path))
    try:
        saved = torch.load(content, map_location=device, weights_only=True)
    except Exception:  # what unpickling raises for a file of another kind is not limited
        saved = None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise SavedGraphError(
            f"{path} does not hold a graph, or is damaged: graphs are saved by"
            " graphopt.saved.save_graph(train_step.graph_module, path)"
        )
    if saved.get("version") != VERSION:
        version = f"version {saved['version']}" if "version" in saved else "no version"
        raise SavedGraphError(
            f"{path} is in {version} of the format, and this graphopt reads version {VERSION}:"
            " load it with the graphopt that saved it, or save it again"
        )
    return saved


def _encode(graph_module: fx.GraphModule) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    values = ValueEncoder()
    described: dict[str, Any] = {}
    for target, value in _constants(graph_module):
        if isinstance(value, torch.Tensor) and not _compat.is_fake(value):
            tensors[target] = value.detach()
        else:
            try:
                described[target] = values.encode(value)
            except SavedGraphError as error:
                raise SavedGraphError(f"the constant {target} cannot be saved: {error}") from None
    records = [_fields(record) for record in graph_module.meta.get(APPLIED, [])]
    content = {
        "graph": encode_graph(graph_module.graph),
        "iterations": isinstance(graph_module, IterGraphModule),
        "constants": described,
        "storages": values.storages,
        "applied": [encode(fields, repr) for fields in records],
        "groups": sizes_now(graph_module),
        "torch": torch.__version__,
    }
    return content, tensors


def _decode(
    content: dict[str, Any], tensors: dict[str, torch.Tensor], decoder: type[ValueDecoder]
) -> fx.GraphModule:
    values = decoder(content["storages"])
    described = {name: values.decode(value) for name, value in content["constants"].items()}
    constants = {**tensors, **described}
    graph = IterGraph() if content["iterations"] else fx.Graph()
    decode_graph(content["graph"], graph, constants, decoder(content["graph"]["storages"]))
    graph.lint()
    for problem in group_problems(graph):
        raise SavedGraphError(problem.message)
    loaded = fx.GraphModule(constants, graph)
    if content.get("groups"):
        loaded.meta[GROUPS] = content["groups"]
    if content["applied"]:
        loaded.meta[APPLIED] = [
            SimpleNamespace(**decode(fields, _unknown)) for fields in content["applied"]
        ]
    # Not final, even where it was when it was saved: passes may be tried on it.
    return IterGraphModule(loaded) if content["iterations"] else loaded


def _unknown(kind: str, content: Any) -> Any:
    raise ValueError(f"a pass record holds a {kind}")


def _fields(record: Any) -> dict[str, Any]:
    return dict(record.__getstate__() if is_dataclass(type(record)) else vars(record))


def _constants(graph_module: fx.GraphModule) -> Iterator[tuple[str, Any]]:
    targets = dict.fromkeys(str(n.target) for n in graph_module.graph.nodes if n.op == "get_attr")
    for target in targets:
        yield target, attrgetter(target)(graph_module)
