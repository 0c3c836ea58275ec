"""State of a graph module outside its nodes that a pass must keep: constants, submodules,
callbacks, hooks, lists in metadata, and code generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from graphopt import _compat
from graphopt._compat.identity import Itself
from graphopt.host import host_calls
from graphopt.ir.metadata import (
    HELD,
    HELD_SOMEWHERE,
    KIND,
    NAME,
    PLACEMENT,
    RETURNED,
    WRITES,
    known_value,
)
from graphopt.iter_graph import copy_graph
from graphopt.verify import Problem
from graphopt.verify.inlining import graph_of_part
from graphopt.verify.module_constants import attribute

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""The tables of a module with what runs when it is called, besides its graph."""

_TOLD = (KIND, NAME, PLACEMENT, HELD, HELD_SOMEWHERE, RETURNED, WRITES)
"""Metadata of inputs, and of calls of modules, which says who holds them or writes to them."""

_KINDS = {"get_attr": "constant", "call_module": "part"}


class BesidesNodes:
    """All of it, when this is made. A pass changes none of it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self._graph = gm, gm.graph
        held = ((node, known_value(node)) for node in gm.graph.nodes)
        self._lists = {n: (value, _entries(value)) for n, value in held if type(value) in _LISTS}
        self._code_maker = _compat.code_maker(gm.graph)
        self._constants = {str(n.target): _content_of(gm, n) for n in _attributes_read(gm)}
        inputs = _inputs_and_parts(gm.graph)
        self._told = {_name_of(node): _told(node) for node in inputs if node.meta}
        self._parts = {part: copy_graph(part.graph)[0] for part in _parts(gm)}
        self._host_calls = [(n, n.target, dict(vars(n.target))) for n in host_calls(gm.graph)]
        self._hooks = _hooks(gm)

    def problems(self) -> list[Problem]:
        """What a pass has changed that is no part of the graph, but decides what it does: constants
        of the module, calls of the program's functions, hooks."""
        problems = self.changed_constants()
        for node, call, was in self._host_calls:
            now = vars(call)
            if any(now.get(name) is not held for name, held in was.items()):
                hint = "graphopt.host.insert_callback puts in a call of another function"
                problems.append(Problem("it changed what a callback calls, or when", (node,), hint))
        for node, (value, entries) in self._lists.items():
            if not _same_entries(value, entries):
                hint = "put other metadata in its place, as node.meta['val'] = [...]"
                problems.append(Problem("it changed a list of metadata itself", (node,), hint))
        problems += self._changed_inputs()
        if not self._has_its_code():
            hint = "what a pass changes are nodes"
            problems.append(Problem("it changed how the code of the graph is written", hint=hint))
        hooks = _hooks(self._gm)
        if any(held != self._hooks.get(module, _NO_HOOKS) for module, held in hooks.items()):
            hint = "what a pass changes is the graph"
            problems.append(Problem("it added or removed a hook of the module", hint=hint))
        return problems

    def changed_constants(self) -> list[Problem]:
        """Constants of the module, and parts of it, that stand behind their names no longer."""
        return [
            Problem(
                f"the {_KINDS[node.op]} {node.target} of the module is another one, or was changed",
                (node,),
                hint="give a new one a name of its own",
            )
            for node in _attributes_read(self._gm)
            if str(node.target) in self._constants
            and _content_of(self._gm, node) != self._constants[str(node.target)]
        ]

    def _changed_inputs(self) -> list[Problem]:
        """Inputs of which metadata says something else than before that decides what may be done
        with them, and calls of modules of which it does so."""
        hint = "what the program does with a tensor, the capture has found out"
        return [
            Problem(f"it changed meta[{name!r}] of an input or a part", (node,), hint)
            for node in _inputs_and_parts(self._gm.graph)
            if (now := _told(node)) != (known := self._told.get(_name_of(node), now))
            for name, held, was in zip(_TOLD, now, known, strict=True)
            if held != was
        ]

    def _has_its_code(self) -> bool:
        """True if the graph becomes code as it did: for a graph that was put in place of it, by
        what does so for all graphs."""
        (maker, then), (was, had) = _compat.code_maker(self._gm.graph), self._code_maker
        same = maker is was or (self._gm.graph is not self._graph and type(maker) is type(was))
        return same and then is had

    def restore(self) -> None:
        """Make all of it what it was, but for the attributes of modules."""
        for value, entries in self._lists.values():
            _put_back(value, entries)
        for _, call, held in self._host_calls:
            vars(call).update(held)
        for part, graph in self._parts.items():
            if str(part.graph) != str(graph):
                part.graph = graph


def _inputs_and_parts(graph: fx.Graph) -> list[fx.Node]:
    inputs = graph.find_nodes(op="placeholder")
    return [*inputs, *graph.find_nodes(op="call_module")]


def _told(node: fx.Node) -> tuple[Any, ...]:
    """What `_TOLD` names of a node."""
    return tuple(map(node.meta.get, _TOLD))


def _name_of(node: fx.Node) -> object:
    """By which an input is known, also in another graph, or a call in this one."""
    return str(node.target) if node.op == "placeholder" else node


_LISTS = (list, tuple)


def _entries(value: Any) -> tuple[Any, ...]:
    """The entries of a list, those of lists in it included."""
    return tuple([_entries(entry) if type(entry) in _LISTS else entry for entry in value])


def _same_entries(value: Any, entries: tuple[Any, ...]) -> bool:
    if len(value) != len(entries):
        return False
    return all(
        _same_entries(now, was) if type(was) is tuple and type(now) in _LISTS else now is was
        for now, was in zip(value, entries, strict=True)
    )


def _put_back(value: Any, entries: tuple[Any, ...]) -> None:
    if type(value) is list:
        value[:] = [list(entry) if type(entry) is tuple else entry for entry in entries]
        return
    for inner, entry in zip(value, entries, strict=True):
        if type(inner) is list:
            inner[:] = entry


def _attributes_read(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that give constants of a module, or call modules within it."""
    constants = gm.graph.find_nodes(op="get_attr")
    return [*constants, *gm.graph.find_nodes(op="call_module")]


def _parts(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph modules that a graph calls, or gives to what calls them, and those within them."""
    found = []
    for node in _attributes_read(gm):
        part = graph_of_part(attribute(gm, node))
        if part is not None:
            found += [part, *_parts(part)]
    return found


def _hooks(gm: nn.Module) -> dict[nn.Module, list[Any]]:
    """What runs when a module or one of its submodules is called, besides its graph."""
    return {module: _hooks_of(vars(module)) for module in gm.modules()}


def _hooks_of(held: dict[str, Any]) -> list[Any]:
    return [held.get("forward"), *(list(held[table].items()) for table in HOOKS)]


_NO_HOOKS: list[Any] = [None, *([] for _ in HOOKS)]


def _content_of(gm: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    """What tells an attribute from another one: tensors count their updates."""
    found = attribute(gm, node)
    if isinstance(found, torch.Tensor):
        return Itself(found), _compat.version_of(found)
    part = graph_of_part(found)
    if part is None:
        return (Itself(found),)
    inner = tuple(_content_of(part, n) for n in _attributes_read(part))
    return Itself(found), str(part.graph), inner
