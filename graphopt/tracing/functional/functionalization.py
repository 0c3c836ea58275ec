"""Functionalization of the raw trace: no mutation but `copy_` into placeholders.

The raw graph runs once more, under torch's functionalization, which rewrites every in-place
operator and every write through a view as new values; what an input holds in the end is then copied
into it.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.cached_tracing import remembered
from graphopt._compat.sizes import arithmetic_when_used
from graphopt.comm.waits import split_waits
from graphopt.graph_utils import (
    Outputs,
    after_placeholders,
    call_function_with_meta,
    eliminate_dead_code,
    get_output,
    get_outputs,
    is_operator,
    readers_through_views,
    remove_identities,
    set_outputs,
    without_autocast,
    written,
)
from graphopt.graph_utils.inserting import call_function_giving
from graphopt.host import note_order
from graphopt.host.decisions.assumptions import hold_updates
from graphopt.ir.metadata import (
    OF_TRACE,
    fake_value,
    has_value,
    known_value,
    phase_of,
    set_value,
    some_of,
)
from graphopt.ir.operators import may_alias
from graphopt.ir.views import is_pure_view
from graphopt.tracing.effects.decisions import SIZED
from graphopt.tracing.effects.torch_generators import drop_idle_restores
from graphopt.tracing.functional.interpreter import RawGraphRunner
from graphopt.tracing.functional.rewriting import expanded_write, is_expanded
from graphopt.tracing.functional.separate_results import keep_apart
from graphopt.tracing.functional.tagging import tagged
from graphopt.tracing.trace import RawTrace

aten = torch.ops.aten


def functionalize(raw: RawTrace) -> tuple[fx.GraphModule, list[int]]:
    """Rewrites a raw trace functionally, in the output convention of the captured dialect.

    Returns:
        A graph in the captured dialect, before its placeholders are named, and the positions of
        the placeholders that the step updates.
    """
    _drop_profiling(raw.graph_module.graph)
    drop_idle_restores(raw.graph_module.graph)
    updated: list[int] = []

    def run(*flat: torch.Tensor) -> list[Any]:
        tracer = _compat.current_tracer()
        with torch.no_grad(), _compat.functional_mode():
            interpreter = RawGraphRunner(raw.graph_module, tracer, _compat.fake_mode_of(flat))
            sized = any(SIZED in node.meta for node in raw.graph_module.graph.nodes)
            lazily = arithmetic_when_used(tracer) if sized else nullcontext()
            with remembered(), tagged(tracer, interpreter.tag), lazily:
                results = [_compat.from_functional(r) for r in interpreter.run(*flat)]
                finals = interpreter.finals()
        changed = [i for i, final in enumerate(finals) if final is not None]
        updated[:] = changed
        return results + [finals[i] for i in changed]

    inputs = [_compat.detached(fake) for fake in raw.fakes]
    with without_autocast():
        graph_module = _compat.make_fx(run)(*inputs)
    graph = graph_module.graph
    _tag_arithmetic(graph)
    split_waits(graph)
    _name_viewed_numbers(graph)
    remove_identities(graph)
    keep_apart(raw.graph_module.graph, graph)
    _write_back(graph, raw, updated)
    hold_updates(graph, [cast(fx.Node, copy.args[0]) for copy in get_outputs(graph).updates])
    eliminate_dead_code(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            set_value(node, known_value(node))
        elif node.op == "get_attr" and not has_value(node):  # a random number generator
            set_value(node, getattr(graph_module, str(node.target)))
    _place_updates(graph)
    note_order(graph, get_outputs(graph).updates)
    graph.lint()
    graph_module.recompile()
    return graph_module, updated


def _tag_arithmetic(graph: fx.Graph) -> None:
    """Tags arithmetic of sizes and integers like its operands, since it is recorded only when
    used."""
    for node in graph.nodes:
        if node.op == "call_function" and phase_of(node) is None:
            for source in node.all_input_nodes[:1]:
                node.meta.update(some_of(source, *OF_TRACE))


_TYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _name_viewed_numbers(graph: fx.Graph) -> None:
    """Makes tensors of numbers that are viewed, as a backward views the conjugate of `1j`: a view
    is then one of a node."""
    for node in graph.nodes:
        if may_alias(node) and not node.all_input_nodes:
            number, *others = node.args
            given: dict[str, Any] = {"dtype": _TYPES[type(number)], "device": torch.device("cpu")}
            with graph.inserting_before(node):
                tensor = call_function_with_meta(
                    graph, aten.scalar_tensor.default, (number,), given, like=node
                )
            node.args = (tensor, *others)


_PROFILING = (
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
    "profiler::_record_function_enter",
)


def _drop_profiling(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if is_operator(node.target, *_PROFILING):
            graph.erase_node(node)


def _write_back(graph: fx.Graph, raw: RawTrace, updated: Sequence[int]) -> None:
    """Appends `copy_` into each updated input, and the output `((results, updates, carried))`."""
    placeholders = graph.find_nodes(op="placeholder")
    output = get_output(graph)
    values = list(cast(Any, output.args[0]))
    split = len(values) - len(updated)
    results, finals = values[:split], values[split:]
    updates = []
    for position, final in zip(updated, finals, strict=True):
        if _is_all_of(final, placeholders[position]):
            continue
        if is_expanded(fake_value(placeholders[position])):
            raise expanded_write(final)
        with graph.inserting_before(output):
            copy = _copied(graph, placeholders[position], final)
        source = _last_write(raw, position) if phase_of(copy) is None else None
        if source is not None:  # what it writes is what another input holds, no node of the trace
            copy.meta.update(some_of(source, *OF_TRACE))
        updates.append(copy)
    user = raw.signature.user_results
    set_outputs(graph, Outputs(results[:user], updates, results[user:]))
    output.meta.clear()


def _copied(graph: fx.Graph, placeholder: fx.Node, final: fx.Node) -> fx.Node:
    """Appends a `copy_` into an input, and returns its node."""
    arguments, value = (placeholder, final), fake_value(placeholder)
    if fake_value(final).shape != value.shape:
        return call_function_with_meta(graph, aten.copy_.default, arguments, like=final)
    value = _compat.detached(value)
    return call_function_giving(graph, aten.copy_.default, arguments, {}, value, like=final)


def _last_write(raw: RawTrace, position: int) -> fx.Node | None:
    """Returns the last node of a trace that writes to an input, or None."""
    placeholder = raw.graph_module.graph.find_nodes(op="placeholder")[position]
    base = _compat.storage_key(fake_value(placeholder))

    def writes(node: fx.Node) -> bool:
        values = map(known_value, written(node))
        return any(isinstance(v, torch.Tensor) and _compat.storage_key(v) == base for v in values)

    nodes: list[fx.Node] = list(raw.graph_module.graph.nodes)
    return next(filter(writes, reversed(nodes)), None)


def _is_all_of(value: fx.Node, source: fx.Node) -> bool:
    """True if a value is `source` itself, or a chain of views that ends in the same layout."""
    base = value
    while base is not source:
        viewed = base.args[0] if base.op == "call_function" and is_pure_view(base) else None
        if not isinstance(viewed, fx.Node):
            return False
        base = viewed
    return value is source or _shows_the_same(fake_value(value), fake_value(source))


def _shows_the_same(view: torch.Tensor, base: torch.Tensor) -> bool:
    """True if a view of all of `base` has its elements at the same positions."""
    if view.layout is not torch.strided or base.layout is not torch.strided:
        return False
    ours, theirs = (
        (t.shape, t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg())
        for t in (view, base)
    )
    return ours == theirs


def _place_updates(graph: fx.Graph) -> None:
    """Moves each `copy_` up behind the last read of its destination and behind its value."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    updates = dict.fromkeys(get_outputs(graph).updates)
    for copy in updates:
        placeholder, final = cast(tuple[fx.Node, fx.Node], copy.args)
        before = {*readers_through_views(placeholder), final} - {copy}
        if any(node in updates for node in before):
            continue
        last = max(before, key=position.__getitem__)
        after_placeholders(last).append(copy)


def name_placeholders(graph: fx.Graph, inputs: Sequence[tuple[str, str]]) -> list[str]:
    """Names placeholders after the `(kind, qualified name)` of their inputs and records both as
    metadata. Returns the chosen identifiers."""
    taken: set[str] = set()
    chosen = []
    placeholders = graph.find_nodes(op="placeholder")
    for node, (kind, name) in zip(placeholders, inputs, strict=True):
        node.meta.update(kind=kind, fqn=name)
        identifier = _identifier(name, taken)
        taken.add(identifier)
        _compat.renamed(node, identifier)
        node.target = node.name
        chosen.append(node.name)
    return chosen


def _identifier(name: str, taken: set[str]) -> str:
    base = re.sub(r"\W+", "_", name).strip("_") or "input"
    if base[0].isdigit() or keyword.iskeyword(base):
        base = f"_{base}"
    candidate, count = base, 1
    while candidate in taken:
        candidate, count = f"{base}_{count}", count + 1
    return candidate
