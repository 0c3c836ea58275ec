"""Symbolic evaluation of a graph to terms, in one walk over its nodes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import reduce
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import written
from graphopt.graph_utils.nodes import graph_of
from graphopt.host import is_host_call
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import (
    aliased,
    draws,
    first_argument,
    is_list_operator,
    is_random,
    operator_of,
    overwritten,
)
from graphopt.ir.writing_operators import FunctionalForm, form_of
from graphopt.verify.inlining import in_one
from graphopt.verify.symbolic.callees import Callees
from graphopt.verify.symbolic.collective_results import CollectiveTerms
from graphopt.verify.symbolic.evaluation_outcome import Evaluation, NotDecidedError, input_value
from graphopt.verify.symbolic.node_values import NodeValues, is_itself
from graphopt.verify.symbolic.outcome_recording import record_outcome
from graphopt.verify.symbolic.sent_constants import sent_constant, sent_constants
from graphopt.verify.symbolic.storage_updates import StorageUpdates
from graphopt.verify.trials.exchanged_regions import UnknownPlace
from graphopt.verify.values.call_terms import entries, fresh, has_empty, named
from graphopt.verify.values.elementwise_runs import evaluate_runs
from graphopt.verify.values.remembered_calls import RecalledCall
from graphopt.verify.values.terms import (
    PendingResult,
    TensorValue,
    Terms,
    canonical,
    storage_layout_of,
)

_PERHAPS_VIEWS = ("aten::reshape", "aten::flatten", "aten::contiguous", "aten::to")
"""Operators that return a view or a copy of their argument, depending on its strides."""


def evaluate_graph(
    gm: fx.GraphModule | fx.Graph,
    terms: Terms,
    inputs: dict[str, Any] | None = None,
    *,
    by_launch: bool = False,
    unknowns: Mapping[fx.Node, UnknownPlace] | None = None,
) -> Evaluation:
    """Evaluates a graph symbolically, for arbitrary or for given symbolic inputs. Graphs that it
    calls are a part of it; a compiled one is trusted to compute what its source does.

    Args:
        terms: the table of terms, shared by all compared graphs.
        inputs: values of placeholders by target; a placeholder without one is arbitrary.
        by_launch: identify sent constants by the launch that sends them instead of the node that
            made them, for graphs with equal launches in equal order.
        unknowns: nodes to replace by unknown functions of others.

    Raises:
        NotDecidedError: naming the node that terms cannot speak of.
    """
    graph = in_one(graph_of(gm))
    return _Evaluator(graph, terms, inputs or {}, unknowns or {}, by_launch=by_launch).run()


class _Evaluator:
    """Evaluates one graph that calls no others."""

    def __init__(
        self,
        graph: fx.Graph,
        terms: Terms,
        inputs: Mapping[str, Any],
        unknowns: Mapping[fx.Node, UnknownPlace],
        *,
        by_launch: bool,
    ) -> None:
        self._graph, self._terms = graph, terms
        self._inputs, self._unknowns = inputs, unknowns
        self._sent_constants = {} if by_launch else sent_constants(graph)
        self._found = Evaluation()
        self._callees = Callees()
        self._separate: set[fx.Node] = set()  # whose items share no storage with others
        self._reading = NodeValues(terms, self._view)
        self._contents, self._read = self._reading.contents, self._reading.read
        self._communication = CollectiveTerms(
            terms, self._reading, self._found, by_launch=by_launch
        )
        self._updates = StorageUpdates(terms, self._reading, self._communication, self._applied)

    def run(self) -> Evaluation:
        """Evaluates all nodes and returns what the graph leaves."""
        made = self._found.made
        for node in self._graph.nodes:
            if node.op == "output":
                break
            try:
                made.append((node, self._evaluate_node(node)))
            except NotDecidedError:
                raise
            except Exception as error:  # rules take it that arguments fit
                what = f"{type(error).__name__}: {error}"
                raise NotDecidedError(f"its arguments do not fit: {what}", node) from error
        record_outcome(self._graph, self._reading, self._found)
        return self._found

    def _evaluate_node(self, node: fx.Node) -> Any:
        """Evaluates a node and registers its value for later readers."""
        if node.op == "call_function" and node not in self._unknowns:
            if node.target is operator.getitem:
                return self._evaluate_item(node)
            traits = operator_of(node)
            if traits.only_computes:
                known = self._recalled(node)
                value = self._value(node) if known is None else self._reuse(node, known)
                self._contents.current[node] = value
                return value
        return self._evaluate_other(node)

    def _evaluate_other(self, node: fx.Node) -> Any:
        """Evaluates an input, constant, view, update, collective or module call, and registers
        it."""
        base: fx.Node | None = None
        same = False
        if node.op == "placeholder":
            value = self._input(node)
        elif node in self._unknowns:
            value, base = self._unknown(node), self._base(node)
        elif (known := self._recalled(node)) is not None:
            value, base = self._reuse(node, known), self._base(node) if known.based else None
        else:
            value, base = self._value(node), self._base(node)
            same = base is not None and is_itself(node)
        self._contents.add(node, value, base, same=same)
        if base is None and node.op == "call_function":
            self._note_possible_view(node)
        return value

    def _reuse(self, node: fx.Node, known: RecalledCall) -> Any:
        """Returns the value of a call that was evaluated before, and records the error it may
        raise."""
        if known.raises is not None:
            self._found.may_raise.setdefault(known.raises, node)
        return known.value

    def _evaluate_item(self, node: fx.Node) -> Any:
        """Evaluates and registers a `getitem`: one of several results, or a view."""
        source, *index = node.args
        if isinstance(source, fx.Node) and not self._reading.in_flight:
            value = self._contents.read(source)
        else:
            value = self._read(source, sent=True)
        if type(value) is tuple and type(index[0]) is int:
            value = value[index[0]]
        else:
            value = self._picked(node, value)
        if isinstance(source, fx.Node) and source in self._separate:
            self._contents.current[node] = value
        else:
            self._contents.add(node, value, self._base_of_item(node))
        if self._contents.possible and not self._contents.is_alias(node):
            self._note_possible_view(node)
        return value

    def _note_possible_view(self, node: fx.Node) -> None:
        """Records a node without a known base that may nevertheless be a view of one of its
        arguments."""
        traits, possible = operator_of(node), self._contents.possible
        sources: list[fx.Node] = []
        if traits.item:
            sources = [n for n in node.all_input_nodes[:1] if n in possible] if possible else []
        elif traits.may_alias and not (traits.writes or traits.wait or traits.workspaces):
            sources = aliased(node)
        if sources:
            self._contents.may_share(node, sources)

    def _input(self, node: fx.Node) -> Any:
        held = known_value(node)
        if isinstance(held, torch.Tensor) and _compat.has_symbolic_shape(held):
            # Of a graph of torch.compile for many sizes: rules about elements do not apply.
            raise NotDecidedError("its shape is not known", node)
        given = self._inputs.get(str(node.target))
        return input_value(self._terms, node) if given is None else given

    def _recalled(self, node: fx.Node) -> RecalledCall | None:
        """Returns the remembered evaluation of the same call, or None."""
        if node.name not in self._terms.recall.by_name or node in self._sent_constants:
            return None
        known = {} if self._reading.in_flight else self._contents.current
        return self._terms.recall.find(node, known, self._reading.gives)

    def _unknown(self, node: fx.Node) -> Any:
        unknown = self._unknowns[node]
        if not all(self._contents.has(source) for source in unknown.inputs):
            raise NotDecidedError("it stands before its inputs", node)
        arguments = tuple(self._read(source) for source in unknown.inputs)
        return fresh(self._terms, (*unknown.key, canonical(arguments)), fake_value(unknown.like))

    def _base(self, node: fx.Node) -> fx.Node | None:
        """Returns the node whose storage a node shares, or None."""
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            return self._base_of_item(node)
        traits = operator_of(node)
        if traits.writes and form_of(node.target) is not None:
            return None
        if traits.workspaces or not (traits.wait or traits.may_alias or traits.writes):
            return None
        source = first_argument(node)
        if not isinstance(source, fx.Node):
            return None
        return source if traits.wait or traits.may_alias or is_itself(node) else None

    def _base_of_item(self, node: fx.Node) -> fx.Node | None:
        """Returns the node whose storage an item shares: None for separate results, the source for
        views."""
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        several = isinstance(known_value(source), (list, tuple))
        if not several or self._contents.is_alias(source):
            return source
        self._separate.add(source)
        return None

    def _view(self, node: fx.Node, value: Any) -> Any:
        """Evaluates a view again for a new value of its first argument."""
        if node in self._unknowns:
            raise NotDecidedError("a tensor of which it may be a view was updated", node)
        if node.target is operator.getitem:
            return self._picked(node, value)
        if not isinstance(node.target, _compat.OpOverload):
            raise NotDecidedError("its storage was updated", node)
        if _compat.operator_name(node.target) in _PERHAPS_VIEWS:
            raise NotDecidedError("it may be a view of an updated tensor, or a copy", node)
        arguments = self._reading.arguments(node)
        arguments[next(iter(arguments))] = value
        return self._applied(node, node.target, arguments)

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return fresh(self._terms, ("attribute", str(node.target)), known_value(node))
        if node.op != "call_function":
            what = f"it calls {node.op} {node.target}, of which no graph is known"
            raise NotDecidedError(what, node, foreign=True)
        traits = operator_of(node)
        if traits.wait:
            return self._communication.waited(node)
        if traits.copies:
            return self._updates.copied(node)
        form = form_of(node.target) if traits.writes else None
        if form is not None:
            return self._call_user_operator(node, form)
        if traits.writes and written(node):
            return self._updates.in_place(node)
        if traits.collective:
            return self._communication.launched(node)
        if self._callees.of(node, node.target).writes_unseen:
            raise NotDecidedError("it updates arguments that its schema does not declare", node)
        found = self._call(node)
        for source in overwritten(node) if traits.workspaces else ():
            self._updates.taken(node, source)  # scratch memory, which nobody may use afterwards
        return found

    def _call_user_operator(self, node: fx.Node, form: FunctionalForm) -> Any:
        """Evaluates a user's operator that writes to its arguments, by its functional form."""
        self._reading.refuse_pending(node)
        arguments = named(form.functional, self._read(node.args), self._read(node.kwargs))
        found = self._applied(node, form.functional, arguments, form.value_for(node))
        name = self._callees.of(node, form.functional).name
        self._found.may_raise.setdefault((name, canonical(arguments)), node)
        for path, destination in form.entries(node):
            self._updates.written(node, destination, reduce(operator.getitem, path, found))
        own, _ = form.split(found)
        return own[0] if form.gives_one else tuple(own)

    def _call(self, node: fx.Node) -> Any:
        self._reading.refuse_pending(node)
        args, kwargs = self._read(node.args), self._read(node.kwargs)
        arguments = named(node.target, args, kwargs)
        if node in self._sent_constants:
            several = self._sent_constants[node]
            return sent_constant(self._terms, node, arguments, by_name=several)
        found = None
        if is_list_operator(node):
            found = entries(self._terms, node.target, arguments, fake_value(node))
        if found is None:
            found = self._applied(node, node.target, arguments)
        callee = self._callees.of(node, node.target)
        raises = (callee.name, canonical(arguments)) if callee.may_raise else None
        if raises is not None:
            self._found.may_raise.setdefault(raises, node)
        more = callee.reads_storage or callee.does_more(node) or draws(node)
        if not (more or operator_of(node).workspaces):
            based = self._base(node) is not None
            self._terms.recall.note(node, args, kwargs, found, based=based, raises=raises)
        return found

    def _applied(
        self, node: fx.Node, target: Any, arguments: dict[str, Any], like: Any = None
    ) -> Any:
        """Returns the value of a call: by its rule, else an unknown function of all arguments.

        Args:
            like: what it is like, where it is not what the node gives.
        """
        fake = known_value(node) if like is None else like
        callee = self._callees.of(node, target)
        drawn = draws(node)
        if callee.rule is not None and not drawn and isinstance(fake, (torch.Tensor, list, tuple)):
            value = callee.rule.value(self._terms, callee.standard, arguments, fake)
            if value is not None:
                return value
        if self._terms.whole_cuts and not drawn:
            value = evaluate_runs(self._terms, target, arguments, fake)
            if value is not None:
                return value
        given = canonical(arguments)
        place: tuple[Any, ...] = ()
        if drawn:
            place = ("draw", len(self._found.draws))
            self._found.draws.append((callee.name, given))
        key = ("call", callee.name, *place, given)
        if callee.reads_storage:
            key = (*key, *self._storage(cast(fx.Node, first_argument(node))))
        more = like is None and callee.does_more(node)
        if more and not is_random(node) and not written(node):
            self._found.effects.append(key)
            self._found.calls_of_host += is_host_call(node)
        found = fresh(self._terms, key, fake)
        if has_empty(found) and _is_looked_at(node):
            return fresh(self._terms, key, fake, even_empty=True)
        return found

    def _storage(self, node: fx.Node) -> tuple[Any, ...]:
        """Returns the contents of a node's whole storage, and the node's place in it."""
        owner = self._contents.owner(node)
        held, value = self._contents.read(owner), known_value(owner)
        if isinstance(held, TensorValue) and isinstance(value, torch.Tensor):
            held = TensorValue(held.segments, *storage_layout_of(value))
        return canonical(held), canonical(self._contents.place(node))

    def _picked(self, node: fx.Node, source: Any) -> Any:
        index = cast(Any, node.args[1])
        if isinstance(source, PendingResult):
            return PendingResult(source.value[index]) if isinstance(source.value, tuple) else source
        if isinstance(source, tuple) and isinstance(index, int):
            return source[index]
        key = ("call", "getitem", canonical(source), canonical(self._read(index)))
        return fresh(self._terms, key, known_value(node))


def _is_looked_at(node: fx.Node) -> bool:
    """True if the host reads a node or an item of it, as an assumed size does."""
    items = (user for user in node.users if user.target is operator.getitem)
    return any(is_host_call(user) for n in (node, *items) for user in n.users)
