"""State of a graph module outside its nodes that a pass must not change: constants, submodules,
callbacks, hooks, lists in metadata, and code generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from graphopt import _compat
from graphopt._compat.identity import ByIdentity
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
from graphopt.verify.checks.module_constants import attribute
from graphopt.verify.inlining import graph_of_part

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""The tables of a module's forward hooks."""

_CAPTURE_KEYS = (KIND, NAME, PLACEMENT, HELD, HELD_SOMEWHERE, RETURNED, WRITES)
"""Metadata of inputs and submodule calls that only the capture may set: who holds or writes
them."""

_KINDS = {"get_attr": "constant", "call_module": "part"}


class ModuleState:
    """A snapshot of a module's state outside the nodes, for comparison and restoring."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self._graph = gm, gm.graph
        held = ((node, known_value(node)) for node in gm.graph.nodes)
        self._lists = {n: (value, _entries(value)) for n, value in held if type(value) in _LISTS}
        self._code_maker = _compat.code_maker(gm.graph)
        self._constants = {str(n.target): _content_of(gm, n) for n in _attributes_read(gm)}
        inputs = _inputs_and_parts(gm.graph)
        self._capture_facts = {_name_of(node): _capture_facts(node) for node in inputs if node.meta}
        self._parts = {part: copy_graph(part.graph)[0] for part in _parts(gm)}
        self._host_calls = [(n, n.target, dict(vars(n.target))) for n in host_calls(gm.graph)]
        self._hooks = _hooks(gm)

    def problems(self) -> list[Problem]:
        """Returns a problem for each changed constant, host call, metadata list, input, or hook."""
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
        if not self._generates_same_code():
            hint = "a pass may change nodes only"
            problems.append(Problem("it changed how the code of the graph is written", hint=hint))
        hooks = _hooks(self._gm)
        if any(held != self._hooks.get(module, _NO_HOOKS) for module, held in hooks.items()):
            hint = "a pass may change the graph only"
            problems.append(Problem("it added or removed a hook of the module", hint=hint))
        return problems

    def changed_constants(self) -> list[Problem]:
        """Returns a problem for each constant or submodule that was replaced or changed."""
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
        """Returns a problem for each input or submodule call whose metadata from the capture
        (`_CAPTURE_KEYS`) changed."""
        hint = "only the capture sets this metadata"
        return [
            Problem(f"it changed meta[{name!r}] of an input or a part", (node,), hint)
            for node in _inputs_and_parts(self._gm.graph)
            if (now := _capture_facts(node))
            != (known := self._capture_facts.get(_name_of(node), now))
            for name, held, was in zip(_CAPTURE_KEYS, now, known, strict=True)
            if held != was
        ]

    def _generates_same_code(self) -> bool:
        """True if the graph still generates code as before; a new graph object must use a generator
        of the same class."""
        (maker, then), (was, had) = _compat.code_maker(self._gm.graph), self._code_maker
        same = maker is was or (self._gm.graph is not self._graph and type(maker) is type(was))
        return same and then is had

    def restore(self) -> None:
        """Restores the state, except the attributes of modules."""
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


def _capture_facts(node: fx.Node) -> tuple[Any, ...]:
    """Returns the metadata of a node that only the capture may set (`_CAPTURE_KEYS`)."""
    return tuple(map(node.meta.get, _CAPTURE_KEYS))


def _name_of(node: fx.Node) -> object:
    """Returns the key of an input or call: the name for inputs, which other graphs share."""
    return str(node.target) if node.op == "placeholder" else node


_LISTS = (list, tuple)


def _entries(value: Any) -> tuple[Any, ...]:
    """Returns a list's entries as a tuple, nested lists included."""
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
    """Returns the nodes that read a module's constants or call its submodules."""
    constants = gm.graph.find_nodes(op="get_attr")
    return [*constants, *gm.graph.find_nodes(op="call_module")]


def _parts(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Returns all graph modules that a graph calls, directly or indirectly."""
    found = []
    for node in _attributes_read(gm):
        part = graph_of_part(attribute(gm, node))
        if part is not None:
            found += [part, *_parts(part)]
    return found


def _hooks(gm: nn.Module) -> dict[nn.Module, list[Any]]:
    """Returns the forward functions and hooks of a module and its submodules."""
    held = ((module, vars(module)) for module in gm.modules())
    return {m: [v.get("forward"), *(list(v[table].items()) for table in HOOKS)] for m, v in held}


_NO_HOOKS: list[Any] = [None, *([] for _ in HOOKS)]


def _content_of(gm: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    """Returns what identifies an attribute's content: the object and, for tensors, the version."""
    found = attribute(gm, node)
    if isinstance(found, torch.Tensor):
        return ByIdentity(found), _compat.version_of(found)
    part = graph_of_part(found)
    if part is None:
        return (ByIdentity(found),)
    inner = tuple(_content_of(part, n) for n in _attributes_read(part))
    return ByIdentity(found), str(part.graph), inner
