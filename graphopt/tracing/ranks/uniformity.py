"""Uniform values of a traced step: those that are equal on all ranks which average its gradients,
as they derive from parameters, optimizer state and collectives only.

    x ── local ──▶ loss ── backward ──▶ g ── all_reduce ──▶ mean of all ranks ── norm ──▶ alike

A decision by such a value is the same decision everywhere. Batches and random numbers are a rank's
own, and so are buffers that the step computes from them, as statistics of a batch are. Other
buffers (a count of steps, the average of a model's weights) begin alike and stay so. Which these
are is known when the whole step is: until then none is taken for a rank's own, and then each
decision is looked at once more.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import get_outputs, is_collective, is_copy, is_operator, written
from graphopt.host.decisions.assumptions import Assumption
from graphopt.ir.metadata import known_value, storages_of
from graphopt.ir.operators import draws, is_marker, operator_of
from graphopt.parallel.markers import Group
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.inputs.implicit import NamedModules
from graphopt.tracing.results.signature import Signature

_ALIKE = frozenset({"parameter", "optimizer_state"})
"""Kinds of inputs that all ranks have alike, where they begin so."""
_FUNCTIONAL_CHECK = "aten::_amp_foreach_non_finite_check_and_unscale"
_CHECK = f"{_FUNCTIONAL_CHECK}_"
_CheckOperands = tuple[list[fx.Node], fx.Node, fx.Node]
"""Gradients, where it is noted whether all are finite, and the scale."""


def own_inputs(inputs: Inputs, modules: NamedModules, *, broadcast: bool) -> list[bool]:
    """A flag for each placeholder: True if its value may differ between ranks. For steps that
    compute no buffer from such a value.

    Args:
        broadcast: the ranks begin with the same parameters and buffers of modules.
    """
    alike = _ALIKE if broadcast else _ALIKE - {"parameter"}
    own = [kind not in alike for kind, _ in inputs.kinds_and_names()]
    registered = {id(_compat.own_buffers(module)) for _, module in modules}
    for position, holder in enumerate(inputs.placeholders if broadcast else ()):
        if all(each.kind != "buffer" or each.is_in(registered) for each in holder.members):
            own[position] = False
    return own


def first_own(
    graph: fx.Graph, inputs: Inputs, own: Sequence[bool], signature: Signature, group: Group
) -> Assumption | None:
    """The first assumption of a captured step on a value that may differ between ranks.

    Args:
        group: the ranks.
        own: see `own_inputs`. What begins alike is a rank's own as well where the step computes it
            from what is, and a buffer where the step puts another tensor in its place.
    """
    asked = [node for node in graph.nodes if _is_of_all(node.target)]
    if not asked:
        return None
    buffers = dict(_buffers(inputs, signature))
    own = [known or buffers.get(position, False) for position, known in enumerate(own)]
    positions = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    copies = [(positions[copy.args[0]], copy.args[1]) for copy in get_outputs(graph).updates]
    updates = {position: value for position, value in copies if not own[position]}
    while True:
        marks = own_values(graph, own, group)
        found = [at for at, value in updates.items() if value in marks and not own[at]]
        if not found:
            break
        for position in found:
            own[position] = True
    decided = (node for node in asked if not marks.isdisjoint(node.all_input_nodes[:1]))
    return next((cast(Assumption, node.target) for node in decided), None)


def _is_of_all(target: object) -> bool:
    """True if a target is an assumption that must hold on all ranks alike."""
    return isinstance(target, Assumption) and not target.alone


def _buffers(inputs: Inputs, signature: Signature) -> Iterator[tuple[int, bool]]:
    """The positions of buffers, and a flag for each: True if the step changes it."""
    replaced = {(id(found.attributes), found.name) for found in signature.attributes}
    replaced |= {(id(left.place.holder), left.place.key) for left in signature.placed}
    rebound = {id(inputs.module_tensors[position]) for position in signature.rebound}
    for position, holder in enumerate(inputs.placeholders):
        buffers = [member for member in holder.members if member.kind == "buffer"]
        if buffers:
            places = {(id(owner), name) for each in buffers for owner, name in each.slots}
            stays = places.isdisjoint(replaced) and rebound.isdisjoint(map(id, buffers))
            yield position, not stays


def own_values(
    graph: fx.Graph, placeholders: Sequence[bool], group: Group, last: fx.Node | None = None
) -> set[Any]:
    """The nodes, and their memory, whose values may differ between ranks.

    Args:
        placeholders: whether each of them is a rank's own.
        group: the ranks.
        last: nodes behind it are not looked at.
    """
    own: set[Any] = set()
    ranks = frozenset(_compat.ranks_of_group(group.name) or ())
    order = iter(placeholders)
    for node in graph.nodes:
        if node.op == "placeholder":
            if next(order):
                own |= _marks(node)
        elif node.op == "call_function":
            _note(node, own, ranks)
        if node is last:
            break
    return own


def _note(node: fx.Node, own: set[Any], ranks: Set[int]) -> None:
    """Updates the set of values that differ between ranks, for one node and its writes."""
    if is_collective(node) or is_marker(node):
        if not _of_all(node, ranks):
            own |= _marks(node)
        return
    if is_copy(node) and _overwrites_all(node):
        destination, source = cast(tuple[fx.Node, fx.Node], node.args[:2])
        if own.isdisjoint(_marks(source)):
            own -= _marks(node) | _marks(destination)
            return
    if is_operator(node.target, _CHECK):
        gradients, found, _ = cast(_CheckOperands, node.args)
        _note_check(node, gradients, found, own)
        return
    check = node.args[0] if node.target is operator.getitem else node
    if isinstance(check, fx.Node) and is_operator(check.target, _FUNCTIONAL_CHECK):
        if node is not check:  # one of its two results: scaled gradients, or what is noted
            _note_check(check, [] if node.args[1] == 1 else [node], node, own)
        return
    if draws(node) or depends_on(node, own):
        own |= reached_by(node)


def depends_on(node: fx.Node, values: Set[Any]) -> bool:
    """True if an argument of a node, or its memory, is among the given values."""
    return any(not values.isdisjoint(_marks(arg)) for arg in node.all_input_nodes)


def reached_by(node: fx.Node) -> set[Any]:
    """A node with everything that it writes, and the memory that these share."""
    return _marks(node).union(*map(_marks, written(node)))


def _note_check(check: fx.Node, scaled: Sequence[fx.Node], noted: fx.Node, own: set[Any]) -> None:
    """Updates the set of differing values by a gradient scaler's finiteness check, which does not
    depend on the scale.

    Args:
        scaled: what the scaled gradients are in.
        noted: where it is noted.
    """
    gradients, found, scale = cast(_CheckOperands, check.args)
    if any(not own.isdisjoint(_marks(arg)) for arg in (*gradients, found)):
        own |= _marks(noted)
    if not own.isdisjoint(_marks(scale)):
        own.update(*map(_marks, scaled))


def _overwrites_all(copy: fx.Node) -> bool:
    """True if a copy replaces its destination's whole memory, as after an `all_reduce` of a
    whole tensor."""
    value = known_value(copy)
    if not isinstance(value, torch.Tensor) or _compat.has_symbolic_shape(value):
        return False
    return bool(value.untyped_storage().nbytes() == value.nbytes)


def _of_all(node: fx.Node, ranks: Set[int]) -> bool:
    """True if a collective or marker gives all of the given ranks the same value."""
    if not operator_of(node).same_on_all and not is_marker(node):
        return False
    found = _compat.ranks_of_group(str(node.args[-1]))
    return found is not None and ranks <= set(found)


def _marks(node: fx.Node) -> set[Any]:
    """A node, and the memory of its value."""
    return {node, *storages_of(node)}
