"""An interpreter of the raw graph that records its operators in functional form."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.known_nodes import copied_node, known_result, recorded_item, recorded_node
from graphopt._compat.sizes import laid_out_like
from graphopt.graph_utils import is_operator
from graphopt.host import HostCall
from graphopt.ir import inplace
from graphopt.ir.metadata import OF_TRACE, fake_value, known_value, some_of
from graphopt.ir.operators import fused_optimizer, rounds_a_list_in_place, updated_lists
from graphopt.ir.writing_operators import FunctionalForm, form_of
from graphopt.tracing.effects.decisions import SIZED
from graphopt.tracing.exactness import averages, fused, statistics
from graphopt.tracing.functional.rewriting import (
    explained_at,
    has_strides_of,
    is_expanded,
    keep_strides,
    refuse_unusual_writes,
    with_strides,
)
from graphopt.tracing.functional.whole_writes import OF_NUMBERS, WholeWrites
from graphopt.tracing.scalars import numbers
from graphopt.tracing.scalars.functions import GIVING_INTEGERS

aten = torch.ops.aten


class CopiedNode(NamedTuple):
    """A node that is the same in the functional graph as in the trace."""

    node: fx.Node


@dataclass
class WholeStorage:
    """A storage that is only ever written as a whole.

    Attributes:
        nodes: those of the trace whose values are all of it.
        now: what it holds since it was written to.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    now: CopiedNode | None = None


class RawGraphRunner(fx.Interpreter):
    """Interprets the raw graph; new nodes get the tags of the raw node that runs.

    What torch's functionalization would call as it is, is copied without being run: what it gives
    is known from the trace, and is wrapped when somebody may write to it.
    """

    def __init__(self, graph_module: fx.GraphModule, tracer: Any, mode: Any) -> None:
        super().__init__(graph_module)
        self._tracer, self._mode = tracer, mode
        self._running: fx.Node | None = None
        self._writes = WholeWrites(graph_module.graph)
        self._whole: defaultdict[int, WholeStorage] = defaultdict(WholeStorage)
        self._inputs: list[tuple[fx.Node, Any, Any]] = []

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        flat, node = super().placeholder(target, args, kwargs), self._running
        assert node is not None
        value = _wrapped(flat)
        if node in self._writes.whole:
            recorded = _compat.node_of(self._tracer, flat)
            value = flat if recorded is None else CopiedNode(recorded)
        self._inputs.append((node, flat, value))
        return value

    def finals(self) -> list[Any]:
        """Returns the final values of the inputs; None for those not written."""
        return [self._final(*each) for each in self._inputs]

    def _final(self, node: fx.Node, flat: Any, value: Any) -> Any:
        if node not in self._writes.whole:
            final = _compat.from_functional(value)
            return None if final is flat else final
        now = self._whole[self._writes.whole[node]].now
        return None if now is None else known_result(self._tracer, now.node)

    def run_node(self, n: fx.Node) -> Any:
        self._running = n
        result = super().run_node(n) if n.op == "placeholder" else self._run(n)
        if n in self._writes.whole:
            self._whole[self._writes.whole[n]].nodes.append(n)
        return result

    def _run(self, n: fx.Node) -> Any:
        if self._writes.copied(n) or self._is_item_of_copy(n):
            args, kwargs = fx.map_arg((n.args, dict(n.kwargs)), self._recorded)
            return CopiedNode(copied_node(self._tracer, n, args, kwargs))
        refuse_unusual_writes(n)
        functional = self._writes.functional_form(n)
        if functional is not None:
            return self._write(n, functional)
        for source in n.all_input_nodes:
            self._prepare(source, bare=n.op == "output")
        with explained_at(n), self._sizes_of(n):
            return super().run_node(n)

    def _is_item_of_copy(self, n: fx.Node) -> bool:
        is_item = n.target is operator.getitem and isinstance(n.args[0], fx.Node)
        return is_item and isinstance(self.env[n.args[0]], CopiedNode)  # type: ignore[index]

    def _recorded(self, source: fx.Node) -> fx.Node:
        """Returns the functional graph's node for the value of a raw node."""
        value, traced = self.env[source], known_value(source)
        if not isinstance(value, CopiedNode):
            keep_strides(value, traced)
            node = _compat.node_of(self._tracer, _compat.from_functional(value))
            assert node is not None, "whatever a trace computes with is recorded"
            return node
        if source in self._writes.whole and not has_strides_of(known_value(value.node), traced):
            self._put(source, with_strides(known_result(self._tracer, value.node), traced))
        return self.env[source].node  # type: ignore[no-any-return]

    def _bare(self, source: fx.Node) -> Any:
        """Returns a raw node's traced value with its strides, for operators to work on."""
        node = self._recorded(source)
        copied = isinstance(self.env[source], CopiedNode)
        return known_result(self._tracer, node) if copied else self.env[source]

    def _prepare(self, source: fx.Node, bare: bool) -> None:
        """Converts a value to the form needed by the next node, bare or wrapped, with its
        strides."""
        if isinstance(self.env[source], CopiedNode):
            value = self._bare(source)
            self.env[source] = value if bare else _compat.tree_map(_wrapped, value)
        keep_strides(self.env[source], known_value(source))

    def _write(self, n: fx.Node, functional: Any) -> Any:
        """Runs an operator that writes whole storages, and replaces their values by its results."""
        lists = n.args[: len(_compat.schema_of(functional).returns)]
        if fused_optimizer(n.target) is not None and all(map(_are_contiguous, lists)):
            self._update_whole_lists(n, functional, lists)
            return None
        args, kwargs = fx.map_arg((n.args, dict(n.kwargs)), self._bare)
        args, kwargs = _compat.tree_map(_compat.from_functional, (args, kwargs))
        name = fused_optimizer(n.target)
        with explained_at(n), _compat.without_functional_mode():
            if name is None:
                self._put_each(n.args[0], functional(*args, **kwargs))
            else:
                results = fused.call_with_symbols(self._tracer, functional, args, kwargs)
                for position in updated_lists(name, kwargs.get("grad_scale")):
                    if position < len(results):
                        self._put_each(n.args[position], results[position])
        return self.env[n.args[0]] if isinstance(n.args[0], fx.Node) else None

    def _update_whole_lists(self, n: fx.Node, functional: Any, lists: Any) -> None:
        """Runs a fused optimizer on whole contiguous tensors, and records its results as theirs."""
        args, kwargs = fx.map_arg((n.args, dict(n.kwargs)), self._recorded)
        with _compat.without_modes():
            values = tuple(list(map(_compat.fake_anew, map(fake_value, each))) for each in lists)
        update = recorded_node(self._tracer, functional, args, kwargs, values)
        name = fused_optimizer(n.target)
        assert name is not None
        for position in updated_lists(name, kwargs.get("grad_scale")):
            if position < len(lists) and lists[position]:
                entries = recorded_item(self._tracer, update, position)
                for index, target in enumerate(lists[position]):
                    self._hold(target, recorded_item(self._tracer, entries, index))

    def _put_each(self, target: Any, value: Any) -> None:
        """Replaces the value of a node, or of each node in a list."""
        if isinstance(target, fx.Node):
            self._put(target, value)
            return
        for each, entry in zip(target, value, strict=True):
            self._put(each, entry)

    def _put(self, target: fx.Node, value: torch.Tensor) -> None:
        """Replaces the value of all nodes that are the whole of one storage."""
        dtype = known_value(target).dtype
        if value.dtype != dtype:
            value = aten._to_copy.default(value, dtype=dtype)
        node = _compat.node_of(self._tracer, value)
        assert node is not None, "whatever a trace computes is recorded"
        self._hold(target, node)

    def _hold(self, target: fx.Node, node: fx.Node) -> None:
        storage = self._whole[self._writes.whole[target]]
        storage.now = CopiedNode(node)
        for each in storage.nodes:
            if each in self.env:
                self.env[each] = storage.now

    def _sizes_of(self, node: fx.Node) -> AbstractContextManager[None]:
        """Returns a context in which a node's data-dependent results get the sizes that were
        traced."""
        if SIZED not in node.meta:
            return nullcontext()
        return _compat.sizes_given(
            self._mode, lambda function, result: laid_out_like(result, fake_value(node))
        )

    def tag(self, node: fx.Node) -> None:
        """Copies the metadata of the running raw node to a new node."""
        source = self._running
        if source is not None and source.op == "output":
            # A view that is returned, made anew of what its base has become.
            source = next(iter(node.all_input_nodes), None)
        if source is None:
            return
        node.meta.update(some_of(source, *OF_TRACE))

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(target, HostCall):
            return target(*args)
        if target is int and isinstance(args[0], torch.SymBool):  # torch would ask which it is
            return _compat.record_integer(int, args)
        if target in GIVING_INTEGERS and len(args) == 1 and isinstance(args[0], torch.SymFloat):
            assert self._running is not None
            traced = fake_value(self._running)
            if SIZED in self._running.meta:  # of which something may have been asked
                return _compat.record_known(target, args, traced)
            integer = isinstance(traced, torch.SymInt)  # else a known number
            return (_compat.record_integer if integer else _compat.record_number)(target, args)
        if target in OF_NUMBERS and any(isinstance(a, torch.SymFloat) for a in args):
            number = numbers.record(target, *args)
            if number is not NotImplemented:  # as of what torch has recorded itself: round(x, None)
                return number
        if averages.takes(target, args, kwargs):
            return averages.call_with_symbol(
                self._tracer, partial(self._call, target), args, kwargs
            )
        if fused_optimizer(target) is not None:
            return self._update_lists(target, args, kwargs)
        assert self._running is not None
        traced_value = known_value(self._running)
        if is_operator(target, "aten::expand") and not is_expanded(traced_value):
            return _with_dimensions_before(args[0], traced_value.dim())
        if args and isinstance(args[0], list) and rounds_a_list_in_place(target, args[0]):
            return self._update_each(target, args, kwargs)
        functional = inplace.functional_form(target, args) if args else None
        if functional is not None:
            return args[0].copy_(functional(*args, **kwargs))
        form = form_of(target)
        if form is not None:
            return _written_functionally(form, args, kwargs)
        results = statistics.written_functionally(target, args, kwargs)
        if results is not None:
            return results
        result = super().call_function(target, args, kwargs)
        if is_operator(target, "aten::lift_fresh_copy"):
            # What was to be a number is one since the first trace.
            _compat.forget_constant(self._tracer, _compat.from_functional(result))
        return result

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_function(target, args, kwargs)

    def _update_each(self, target: Any, args: Any, kwargs: Any) -> None:
        """Runs a list operator entry by entry, since its in-place form rounds as the single
        operators do."""
        for inplace_operator, given in _each_entry(target, args, kwargs):
            named = {"value": given[3]} if len(given) > 3 else {}
            self.call_function(inplace_operator, tuple(given[:3]), named)

    def _update_lists(self, target: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Runs a fused optimizer's functional form, and copies the results into its lists."""
        name = fused_optimizer(target)
        assert name is not None
        functional = getattr(getattr(aten, name), _compat.overload_name(target))
        results = fused.call_with_symbols(self._tracer, functional, args, kwargs)
        for position in updated_lists(name, kwargs.get("grad_scale")):
            if position >= len(results):
                continue
            for old, new in zip(args[position], results[position], strict=True):
                old.copy_(new)


def _written_functionally(form: FunctionalForm, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs a custom operator's functional form, and copies what it writes to the written
    arguments."""
    fresh, contents = form.split(form.functional(*args, **kwargs))
    for position, content in zip(form.written, contents, strict=True):
        old = form.given(args, kwargs, position)
        if isinstance(content, torch.Tensor):
            old.copy_(content)
            continue
        entries = old if isinstance(old, (list, tuple)) else [old]
        present = (entry for entry in entries if entry is not None)
        for entry, new in zip(present, content, strict=True):
            entry.copy_(new)
    return form.results(fresh, args, kwargs)


def _are_contiguous(nodes: Any) -> bool:
    return all(fake_value(node).is_contiguous() for node in nodes)


def _with_dimensions_before(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """What `expand` gives where it repeats nothing. A write to what `expand` itself gives is, in
    torch's functionalization, added as a difference, which rounds."""
    view: torch.Tensor = aten.alias.default(tensor)
    for _ in range(count - tensor.dim()):
        view = aten.unsqueeze.default(view, 0)
    return view


def _each_entry(target: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yields the in-place operator, with its arguments, that a list operator calls for each entry
    on CPUs."""
    given = [
        *args,
        *(kwargs[a.name] for a in _compat.schema_of(target).arguments if a.name in kwargs),
    ]
    packet = getattr(aten, _compat.operator_name(target).removeprefix("aten::_foreach_"))
    count = len(given[0])
    lists = [value if isinstance(value, (list, tuple)) else [value] * count for value in given]
    for entry in zip(*lists, strict=True):
        if "default" in packet.overloads():
            yield packet.default, list(entry)
        else:
            yield packet.Tensor if isinstance(entry[1], torch.Tensor) else packet.Scalar, [*entry]


def _wrapped(value: Any) -> Any:
    return _compat.to_functional(value) if isinstance(value, torch.Tensor) else value
