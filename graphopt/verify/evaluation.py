"""What a graph computes, as terms: one walk over its nodes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import get_output, get_outputs, may_alias, written
from graphopt.host import is_host_call
from graphopt.ir.families import FUSED_OPTIMIZERS
from graphopt.ir.operators import draws, fused_optimizer, is_operator, nodes_in
from graphopt.optim.lists import list_schema
from graphopt.verify.axioms import RULES, reduced
from graphopt.verify.calls import entries, fresh, leaves, named, target_name
from graphopt.verify.constants import sent_constants
from graphopt.verify.contents import CannotWriteError, Contents, with_layout
from graphopt.verify.evaluated import Evaluation, NotDecidedError, Settled, input_value
from graphopt.verify.functional import functional_form, standard_form
from graphopt.verify.inlining import call_of
from graphopt.verify.labels import sent_tensors, signature_of
from graphopt.verify.recall import Call, same_constant
from graphopt.verify.regions import Unknown
from graphopt.verify.sending import Sending, with_constants_of
from graphopt.verify.terms import (
    Pending,
    TensorValue,
    Terms,
    canonical,
    tensor_value,
    whole,
)
from graphopt.verify.traits import traits_of

_ELEMENTWISE = ("all_reduce", "broadcast")
_SUMMING = ("all_reduce", "reduce_scatter_tensor")
_OF_STORAGE = ("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter")
"""Operators that read elements of a storage besides those of their argument."""

_PERHAPS_VIEWS = ("aten::reshape", "aten::flatten", "aten::contiguous", "aten::to")
"""Operators that give a view of their argument or a copy, as its strides have it."""


def evaluate_graph(
    gm: fx.GraphModule | fx.Graph,
    terms: Terms,
    inputs: dict[str, Any] | None = None,
    *,
    by_launch: bool = False,
    unknowns: Mapping[fx.Node, Unknown] | None = None,
    settled: Mapping[str, Settled] | None = None,
) -> Evaluation:
    """What a graph gives for arbitrary inputs, or for some that are terms already.

    Args:
        terms: shared by all graphs that are compared.
        inputs: values of placeholders by target; a placeholder without one is arbitrary.
        by_launch: a constant that is sent is known by the launch that sends it, and not by the node
            that made it: where graphs are compared that have the same launches in the same order.
        unknowns: nodes that are taken for unknown functions of others.
        settled: by placeholder, what is put in place of a value that an update leaves there.

    Raises:
        NotDecidedError: naming the node that terms cannot speak of.
    """
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    evaluator = _Evaluator(
        graph, terms, inputs or {}, by_launch=by_launch, unknowns=unknowns, settled=settled
    )
    return evaluator.run()


class _Evaluator:
    """Evaluates one graph; `found` is where what its nodes do besides giving values is noted."""

    def __init__(
        self,
        graph: fx.Graph,
        terms: Terms,
        inputs: dict[str, Any],
        found: Evaluation | None = None,
        *,
        by_launch: bool = False,
        unknowns: Mapping[fx.Node, Unknown] | None = None,
        settled: Mapping[str, Settled] | None = None,
    ) -> None:
        self._graph, self._terms, self._inputs = graph, terms, inputs
        self._contents = Contents(terms, self._view)
        self._by_launch = by_launch
        self._sent_constants = {} if by_launch else sent_constants(graph)
        self._in_flight: dict[fx.Node, fx.Node] = {}
        self._sending = Sending(self._contents.owner)
        self._found = found or Evaluation()
        self._unknowns = unknowns or {}
        self._settled = settled or {}

    def run(self) -> Evaluation:
        """The evaluation of the whole graph."""
        self._walk()
        self._finish()
        return self._found

    def _walk(self) -> None:
        made = self._found.made
        for node in self._graph.nodes:
            if node.op == "output":
                break
            try:
                value = self._taken_in(node)
            except NotDecidedError:
                raise
            except Exception as error:  # rules take it that arguments fit
                what = f"{type(error).__name__}: {error}"
                raise NotDecidedError(f"its arguments do not fit: {what}", node) from error
            made.append((node, value))

    def _taken_in(self, node: fx.Node) -> Any:
        """The value of a node, after which others may read it."""
        known = self._recalled(node)
        if known is not None:
            base = node.args[0] if known.based else None
            self._contents.add(node, known.value, cast("fx.Node | None", base))
            return known.value
        if node in self._unknowns:
            value, base = self._unknown(node), self._base(node)
        elif node.target is operator.getitem and node.op == "call_function":
            value, base = self._item(node)
        else:
            value, base = self._evaluated(node), self._base(node)
        self._contents.add(node, value, base, same=base is not None and _is_itself(node))
        return value

    def _item(self, node: fx.Node) -> tuple[Any, fx.Node | None]:
        """One of several results, and the node whose storage it shares: they are separate, but for
        views."""
        source = node.args[0]
        value = self._picked(node, self._read(source, sent=True))
        if not isinstance(source, fx.Node):
            return value, None
        several = isinstance(source.meta.get("val"), (list, tuple))
        return value, None if several and not self._contents.is_alias(source) else source

    def _evaluated(self, node: fx.Node) -> Any:
        held = node.meta.get("val")
        if isinstance(held, torch.Tensor) and _compat.has_symbolic_shape(held):
            raise NotDecidedError("its shape is not known", node)
        return self._value(node)

    def _recalled(self, node: fx.Node) -> Call | None:
        """The same call, if it was evaluated before."""
        calls = self._terms.recall.calls(node.name)
        if not calls or node in self._unknowns or node in self._sent_constants:
            return None
        if node.op == "placeholder":  # what it is follows from its readers as well
            return None
        target, fake = node.target, node.meta.get("val")
        for call in calls:
            if call.target is not target or call.fake is not fake:
                continue
            plain = not node.kwargs and not call.kwargs
            if not plain and not self._is_given(node.kwargs, call.kwargs):
                continue
            if self._are_given(node.args, call.args):
                return call
        return None

    def _are_given(self, arguments: Sequence[Any], known: Sequence[Any]) -> bool:
        if len(arguments) != len(known):
            return False
        for argument, value in zip(arguments, known, strict=True):
            if isinstance(argument, fx.Node):
                given = self._read_node(argument, False)
                if given is not value and given != value:
                    return False
            elif not self._is_given(argument, value):
                return False
        return True

    def _is_given(self, argument: Any, known: Any) -> bool:
        """Whether an argument is what it was in a call that was evaluated."""
        if isinstance(argument, fx.Node):
            return self._are_given((argument,), (known,))
        if isinstance(argument, (list, tuple)):
            return isinstance(known, tuple) and self._are_given(argument, known)
        if isinstance(argument, dict):
            if not isinstance(known, dict) or argument.keys() != known.keys():
                return False
            return all(self._is_given(argument[key], known[key]) for key in argument)
        return not isinstance(argument, slice) and same_constant(argument, known)

    def _unknown(self, node: fx.Node) -> Any:
        unknown = self._unknowns[node]
        if not all(self._contents.has(source) for source in unknown.inputs):
            raise NotDecidedError("it stands before what it was computed from", node)
        arguments = tuple(self._read(source) for source in unknown.inputs)
        return fresh(self._terms, (*unknown.key, canonical(arguments)), unknown.like.meta["val"])

    def _base(self, node: fx.Node) -> fx.Node | None:
        """The node whose storage a node shares."""
        source = node.args[0] if node.args else None
        if isinstance(source, (list, tuple)) or not isinstance(source, fx.Node):
            return None
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            several = isinstance(source.meta.get("val"), (list, tuple))
            return None if several and not self._contents.is_alias(source) else source
        traits = traits_of(node)
        if traits.wait or may_alias(node):
            return source
        return source if _is_itself(node) else None

    def _finish(self) -> None:
        outputs = get_outputs(self._graph)
        found = self._found
        found.results = self._returned("result", outputs.results)
        found.carried = self._returned("carried", outputs.carried)
        for owner in self._contents.written():
            if owner.op == "placeholder":
                found.states[str(owner.target)] = self._contents.read(owner)
                found.nodes["state", str(owner.target)] = owner
            elif owner.op == "get_attr":
                raise NotDecidedError("it updates a constant of the module", owner)
        for update in outputs.updates:
            if isinstance(update, fx.Node):
                owner = self._contents.owner(update)
                found.nodes["state", str(owner.target)] = update
                found.listed.add(str(owner.target))

    def _returned(self, kind: str, values: Sequence[Any]) -> list[Any]:
        for index, value in enumerate(values):
            if isinstance(value, fx.Node):
                self._found.nodes[kind, index] = value
                owner = self._contents.owner(value)
                self._found.aliases.setdefault(owner, []).append((kind, index))
        return [self._read(value, sent=True) for value in values]

    # ------------------------------------------------------------------------------ reading

    def _read(self, value: Any, *, sent: bool = False) -> Any:
        """An argument: nodes as their values. `sent`: also those that are under way."""
        if isinstance(value, fx.Node):
            return self._read_node(value, sent)
        if isinstance(value, (list, tuple)):
            return tuple(self._read(entry, sent=sent) for entry in value)
        if isinstance(value, dict):
            return {key: self._read(entry, sent=sent) for key, entry in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._read, (value.start, value.stop, value.step)))
        return value

    def _read_node(self, node: fx.Node, sent: bool) -> Any:
        if self._in_flight:
            launch = self._in_flight.get(self._contents.owner(node))
            if launch is not None and not sent:
                raise NotDecidedError(f"it is read while %{launch.name} is under way", node)
            if launch is not None:
                return Pending(self._contents.read(node))
        return self._contents.read(node)

    def _view(self, node: fx.Node, value: Any) -> Any:
        """What a view gives of another value of its first argument."""
        if node in self._unknowns:
            raise NotDecidedError("what it may be a view of was updated", node)
        if node.target is operator.getitem:
            return self._picked(node, value)
        if not isinstance(node.target, _compat.OpOverload):
            raise NotDecidedError("its storage was updated", node)
        if node.target._schema.name in _PERHAPS_VIEWS:
            raise NotDecidedError("it may be a view of what was updated, or a copy", node)
        arguments = self._arguments(node)
        arguments[next(iter(arguments))] = value
        return self._applied(node, node.target, arguments)

    # ---------------------------------------------------------------------------- computing

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            given = self._inputs.get(str(node.target))
            return input_value(self._terms, node) if given is None else given
        if node.op == "get_attr":
            return fresh(self._terms, ("attribute", str(node.target)), node.meta.get("val"))
        if node.op != "call_function":
            call = call_of(node)
            if call is not None:
                return self._module(node, *call)
            raise NotDecidedError(f"it calls {node.op} {node.target}", node, foreign=True)
        traits = traits_of(node)
        if traits.wait:
            return self._waited(node)
        if traits.copies:
            return self._copy(node)
        if written(node):
            return self._in_place(node)
        if traits.collective:
            return self._collective(node, traits.reduction)
        if str(node.target).endswith("_mutation"):
            raise NotDecidedError("it updates arguments of which its schema does not speak", node)
        return self._call(node)

    def _module(self, node: fx.Node, body: fx.GraphModule | None, arguments: Any) -> Any:
        """A part of the graph that stands in a graph of its own: one that was divided off, or is
        compiled, which is trusted to compute what its source does."""
        if body is None:
            raise NotDecidedError(
                f"it calls the module {node.target}, whose graph is unknown", node, foreign=True
            )
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        given = dict(zip((str(n.target) for n in inputs), self._read(arguments), strict=False))
        found = replace(self._found, results=[], carried=[], states={}, nodes={}, aliases={})
        inner = _Evaluator(body.graph, self._terms, given, found, by_launch=self._by_launch)
        inner._walk()
        for owner in inner._contents.written():
            argument = arguments[inputs.index(owner)] if owner in inputs else None
            if not isinstance(argument, fx.Node):
                raise NotDecidedError("it updates a constant of its module", node)
            self._written(node, argument, inner._contents.read(owner))
        self._found.launches = found.launches
        self._found.calls_of_host = found.calls_of_host
        return inner._read(get_output(body.graph).args[0], sent=True)

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = self._read(node.args), self._read(node.kwargs)
        arguments = named(node.target, args, kwargs)
        self._refuse_pending(node, arguments)
        if node in self._sent_constants:
            return self._sent_constant(node, arguments)
        found = None
        if list_schema(node) is not None:
            found = entries(self._terms, node.target, arguments, node.meta["val"])
        if found is None:
            found = self._applied(node, node.target, arguments)
        if not (draws(node) or node.is_impure() or is_operator(node.target, *_OF_STORAGE)):
            based = self._base(node) is not None
            self._terms.recall.note(node, args, kwargs, found, based=based)
        return found

    def _applied(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> Any:
        """What a call gives: by its rule, or an unknown function of all arguments."""
        extra: tuple[Any, ...] = ()
        fake, target = node.meta.get("val"), standard_form(target)
        if draws(node):
            extra = ("draw", len(self._found.draws))
            self._found.draws.append((target_name(target), canonical(arguments)))
        elif isinstance(target, _compat.OpOverload) and isinstance(
            fake, (torch.Tensor, list, tuple)
        ):
            rule = RULES.get(target._schema.name)
            value = rule and rule.value(self._terms, target, arguments, fake)
            if value is not None:
                return value
        key = ("call", target_name(target), *extra, canonical(arguments))
        if is_operator(target, *_OF_STORAGE):
            key = (*key, *self._storage(cast(fx.Node, node.args[0])))
        if not extra and node.is_impure() and not written(node):
            self._found.effects.append(key)
            self._found.calls_of_host += is_host_call(node)
        return fresh(self._terms, key, fake)

    def _storage(self, node: fx.Node) -> tuple[Any, ...]:
        """All that lies in the storage of a node, and where in it the node begins."""
        held = canonical(self._contents.read(self._contents.owner(node)))
        return held, node.meta["val"].storage_offset()

    def _sent_constant(self, node: fx.Node, arguments: dict[str, Any]) -> Any:
        """A constant that is sent: what other ranks send there is theirs, so that a reduction of
        this one is told from that of another which has the same value here."""
        fake = node.meta["val"]
        value = RULES[cast(Any, node.target)._schema.name].value(
            self._terms, node.target, arguments, fake
        )
        if value is None:
            return self._applied(node, node.target, arguments)
        like = [entry for entry in arguments.values() if isinstance(entry, TensorValue)]
        named = node.name if self._sent_constants[node] or not like else None
        place = (*map(canonical, like), named)
        key = ("constant", tuple(self._terms[s.term].key for s in value.segments), place)
        return whole(self._terms.make(key, constant=True), fake)

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """Arguments by name."""
        return named(node.target, self._read(node.args), self._read(node.kwargs))

    def _refuse_pending(self, node: fx.Node, arguments: Any) -> None:
        if any(isinstance(value, Pending) for value in leaves(arguments)):
            raise NotDecidedError("it reads what a collective gives before its wait", node)

    def _picked(self, node: fx.Node, source: Any) -> Any:
        index = cast(Any, node.args[1])
        if isinstance(source, Pending):
            return Pending(source.value[index]) if isinstance(source.value, tuple) else source
        if isinstance(source, tuple) and isinstance(index, int):
            return source[index]
        key = ("call", "getitem", canonical(source), canonical(self._read(index)))
        return fresh(self._terms, key, node.meta.get("val"))

    # ------------------------------------------------------------------------- communication

    def _collective(self, node: fx.Node, reduction: str) -> Any:
        arguments = self._arguments(node)
        self._refuse_pending(node, arguments)
        first, sent = next(iter(arguments.items()))
        options = canonical({name: v for name, v in arguments.items() if name != first})
        kind = (reduction, options)
        if self._by_launch:
            sent = with_constants_of(self._terms, sent, (self._found.launches,))
        self._found.launches += 1
        self._sending.launched(node)
        for tensor in sent_tensors(node):
            self._found.amounts[signature_of(node), tensor.dtype] += tensor.numel()
        self._count(kind, sent)
        if reduction in _SUMMING:
            rows = sent if isinstance(sent, tuple) else (sent,)
            self._found.places[kind, tuple(canonical(row) for row in rows)] += 1
        fake = node.meta["val"]
        if reduction in _ELEMENTWISE and self._is_static(sent):
            if isinstance(sent, tuple):
                pairs = zip(sent, fake, strict=True)
                return Pending(tuple(reduced(self._terms, kind, v, f) for v, f in pairs))
            return Pending(reduced(self._terms, kind, sent, fake))
        return Pending(fresh(self._terms, ("collective", *kind, canonical(sent)), fake))

    def _is_static(self, sent: Any) -> bool:
        values = sent if isinstance(sent, tuple) else (sent,)
        return all(isinstance(value, TensorValue) and value.is_static for value in values)

    def _count(self, kind: Any, sent: Any) -> None:
        for value in sent if isinstance(sent, tuple) else (sent,):
            for segment in value.segments if isinstance(value, TensorValue) else ():
                if not self._terms[segment.term].constant:
                    edges = self._found.sent.setdefault((kind, segment.term), Counter())
                    edges[segment.start] += 1
                    edges[segment.start + segment.length] -= 1

    def _waited(self, node: fx.Node) -> Any:
        source = node.args[0]
        value = self._read(source, sent=True)
        if not isinstance(value, Pending):
            raise NotDecidedError("it waits for something that is not a collective's", node)
        if isinstance(source, fx.Node):
            self._in_flight.pop(self._contents.owner(source), None)
        self._sending.waited(node)
        return value.value

    # -------------------------------------------------------------------------------- state

    def _copy(self, node: fx.Node) -> Any:
        destination = cast(fx.Node, node.args[0])
        if len(node.args) == 2 and not node.kwargs:
            before, source = map(self._read, node.args)
        else:
            arguments = self._arguments(node)
            before, source = arguments["self"], arguments["src"]
            if arguments["non_blocking"]:
                raise NotDecidedError("it copies while the host goes on", node)
        self._refuse_pending(node, (before, source))
        value = _copied(self._terms, before, source, destination)
        if value is None:
            raise NotDecidedError("what it writes has another shape than its destination", node)
        return self._put(node, destination, value)

    def _written(self, node: fx.Node, destination: fx.Node, value: Any) -> Any:
        if not isinstance(value, TensorValue):
            raise NotDecidedError("what it updates is not a tensor", node)
        return self._put(node, destination, with_layout(value, destination.meta["val"]))

    def _put(self, node: fx.Node, destination: fx.Node, value: TensorValue) -> Any:
        """Update a node with a value of its own layout."""
        reader = self._sending.reader_of(destination)
        if reader is not None:
            raise NotDecidedError(f"it overwrites what %{reader.name} still sends", node)
        try:
            self._contents.write(destination, value)
        except CannotWriteError as error:
            raise NotDecidedError(str(error), node, foreign=True) from None
        return self._settle(destination, value) if self._settled else value

    def _settle(self, destination: fx.Node, value: Any) -> Any:
        """What stands for the value of an update from now on: itself, nearly always."""
        owner = self._contents.owner(destination)
        known = self._settled.get(str(owner.target)) if owner.op == "placeholder" else None
        if known is None or self._contents.read(owner) != known.value:
            return value
        self._contents.write(owner, known.stands_for_it)
        return self._contents.read(destination)

    def _in_place(self, node: fx.Node) -> Any:
        """An operator that updates its arguments: what its functional form gives is written."""
        traits = traits_of(node)
        if traits.collective:
            return self._in_place_collective(node, traits.reduction)
        target = functional_form(node.target)
        if target is None:
            raise NotDecidedError("it updates an argument in place, in a way that is unknown", node)
        arguments = self._arguments(node)
        self._refuse_pending(node, arguments)
        if list_schema(node) is None:
            (destination,) = written(node)
            return self._written(node, destination, self._applied(node, target, arguments))
        return self._in_place_lists(node, target, arguments)

    def _in_place_lists(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> Any:
        first = cast(Sequence[fx.Node], node.args[0])  # what it gives itself is nothing
        held = node.meta["val"] or [destination.meta["val"] for destination in first]
        found = entries(self._terms, target, arguments, held)
        if found is None:
            raise NotDecidedError("entries of its lists cannot be told apart", node)
        self._refuse_entries_of_one_storage(node)
        several = fused_optimizer(node.target)
        columns = found if several else (found,)
        for position in FUSED_OPTIMIZERS[several] if several else (0,):
            destinations = cast(Sequence[Any], node.args[position])
            for destination, value in zip(destinations, columns[position], strict=True):
                self._written(node, destination, value)
        return found

    def _refuse_entries_of_one_storage(self, node: fx.Node) -> None:
        """Entries are updated one after the other, or all at once: none may read what another one
        writes."""
        places: dict[fx.Node, dict[fx.Node, set[int]]] = {}
        for row in node.args:
            for index, entry in enumerate(row if isinstance(row, (list, tuple)) else ()):
                for read in nodes_in(entry):
                    there = places.setdefault(self._contents.owner(read), {})
                    there.setdefault(read, set()).add(index)
        for destination in written(node):
            there = places[self._contents.owner(destination)]
            mine = there[destination]
            others = [other for other, indices in there.items() if indices != mine]
            if len(mine) > 1 or any(self._contents.overlap(destination, n) for n in others):
                raise NotDecidedError("one entry of its lists writes what another one has", node)

    def _in_place_collective(self, node: fx.Node, reduction: str) -> Any:
        """It may write whenever it likes until its wait."""
        destination = node.args[0]
        if not isinstance(destination, fx.Node) or reduction not in _ELEMENTWISE:
            raise NotDecidedError("it is an update in place by several ranks", node)
        value = self._collective(node, reduction)
        self._written(node, destination, value.value)
        self._in_flight[self._contents.owner(destination)] = node
        return value.value


def _is_itself(node: fx.Node) -> bool:
    """Whether a node gives its first argument, by another name."""
    traits = traits_of(node)
    return traits.wait or (bool(traits.writes) and isinstance(node.args[0], fx.Node))


def _copied(terms: Terms, before: Any, source: Any, destination: fx.Node) -> TensorValue | None:
    if not isinstance(source, TensorValue) or not isinstance(before, TensorValue):
        return None
    if source.shape != before.shape:
        return None
    fake = destination.meta["val"]
    if source.dtype == before.dtype:
        same = source.stride == before.stride and source.device == before.device
        return source if same else tensor_value(source.segments, fake)
    return cast(TensorValue, RULES["aten::_to_copy"].apply(terms, None, {"self": source}, fake))
