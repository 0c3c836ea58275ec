"""Batches small operators of optimizers that do the same to several tensors (`_foreach_*`).

    a = mul(m, 0.9)                          ab  = _foreach_mul([m, n], [0.9, 0.9])
    c = sqrt(a)                       ==>    a   = ab[0]; b = ab[1]
    b = mul(n, 0.9)                          cd  = _foreach_sqrt([a, b])
    d = sqrt(b)                              c   = cd[0]; d = cd[1]

An optimizer that goes through its parameters one by one calls a dozen operators for each of them,
and where a parameter is small, to call them takes longer than to compute. On CPUs an operator on
lists calls the same kernel for each entry, so that bits do not change; it takes about half as long.

Operators of one kind are put together that have as many others of the kinds in question before them
on the longest way from the inputs: so none of them needs another one, nor do two lists need each
other. Lists are short enough to stay in a processor's cache from one operator to the next.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_collective
from graphopt.graph_utils.inserting import call_function_giving
from graphopt.graph_utils.ordering import earliest_order
from graphopt.host.decisions.assumptions import Assumption
from graphopt.ir.metadata import fake_value, has_late_work, known_value, phase_of
from graphopt.schedule import Schedule, apply_schedule
from graphopt.schedule.constraints import Predecessors, predecessors

aten = torch.ops.aten

SMALL_BYTES = 2**14
"""Of a tensor: to compute with a larger one takes longer than to call an operator."""

LIST_BYTES = 2**17
"""Of the tensors of one list."""

_DTYPES = frozenset({torch.float32, torch.float64})
"""In other ones, and for some operators, lists are rounded otherwise."""


class _ListForm(NamedTuple):
    """The list form of an operator.

    Attributes:
        target: the operator on lists.
        tensors: for each list of tensors its entry.
        numbers: the entry of the list of numbers, if it takes one.
        scale: `alpha`, which is one number for all entries.
    """

    target: Any
    tensors: tuple[fx.Node, ...]
    numbers: tuple[Any, ...] = ()
    scale: tuple[Any, ...] = ()


_UNARY = {
    aten.sqrt.default: aten._foreach_sqrt.default,
    aten.neg.default: aten._foreach_neg.default,
    aten.abs.default: aten._foreach_abs.default,
    aten.reciprocal.default: aten._foreach_reciprocal.default,
}
_OF_TWO = {
    aten.mul.Tensor: (aten._foreach_mul.List, aten._foreach_mul.ScalarList),
    aten.div.Tensor: (aten._foreach_div.List, aten._foreach_div.ScalarList),
    aten.add.Tensor: (aten._foreach_add.List, aten._foreach_add.ScalarList),
    aten.sub.Tensor: (aten._foreach_sub.List, aten._foreach_sub.ScalarList),
    aten.maximum.default: (aten._foreach_maximum.List, None),
    aten.minimum.default: (aten._foreach_minimum.List, None),
}
_OF_THREE = {
    aten.addcmul.default: aten._foreach_addcmul.ScalarList,
    aten.addcdiv.default: aten._foreach_addcdiv.ScalarList,
}


def batch_small_operators(graph: fx.Graph) -> int:
    """Batches small operators of optimizers.

    Args:
        graph: a graph in the captured dialect, of one iteration without late work of the previous
            one.

    Returns:
        How many operators are part of a list now.
    """
    forms = {node: form for node in graph.nodes if (form := _form_of(node)) is not None}
    if len(forms) < 2 or has_late_work(graph):
        return 0
    before = _with_launches_in_order(graph, predecessors(graph))
    lists = list(_lists(forms, _levels(graph, before, forms)))
    if not lists:
        return 0
    apply_schedule(graph, Schedule(tuple(_order(graph, before, lists))))
    for members in lists:
        _put_together(graph, members)
    return sum(map(len, lists))


def _with_launches_in_order(graph: fx.Graph, before: Predecessors) -> Predecessors:
    """The dependencies of each node; launches and decisions depend on the previous one, as ranks
    have agreed on their order."""
    launches = find_nodes(graph, lambda n: is_collective(n) or isinstance(n.target, Assumption))
    for first, second in pairwise(launches):
        before[second].append(first)
    return before


def _form_of(node: fx.Node) -> _ListForm | None:
    """The list form of a small optimizer operator; None for all other nodes."""
    if node.op != "call_function" or phase_of(node) != "optimizer" or not node.users:
        return None
    value = known_value(node)
    if not isinstance(value, torch.Tensor) or not _is_small(value):
        return None
    form = _written_on_lists(node.target, node.args, dict(node.kwargs))
    if form is None or not all(_is_like(tensor, value) for tensor in form.tensors):
        return None
    return form if all(map(_is_number, (*form.numbers, *form.scale))) else None


def _is_small(value: torch.Tensor) -> bool:
    if value.device.type != "cpu" or value.dtype not in _DTYPES:
        return False
    if value.layout is not torch.strided or _compat.has_symbolic_shape(value):
        return False
    return value.nbytes <= SMALL_BYTES


def _written_on_lists(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _ListForm | None:
    if target in _UNARY and len(args) == 1 and not kwargs:
        return _ListForm(_UNARY[target], (args[0],))
    if target is aten.lerp.Scalar and len(args) == 3 and not kwargs:
        return _ListForm(aten._foreach_lerp.ScalarList, (args[0], args[1]), (args[2],))
    if target in _OF_THREE and len(args) == 3 and kwargs.keys() <= {"value"}:
        return _ListForm(_OF_THREE[target], tuple(args), (kwargs.get("value", 1),))
    if target not in _OF_TWO or len(args) != 2 or not kwargs.keys() <= {"alpha"}:
        return None
    if target is aten.sub.Tensor and any(isinstance(v, fx.Node) for v in kwargs.values()):
        return None  # on lists, its shape rule asks whether the factor is 1
    of_tensors, of_numbers = _OF_TWO[target]
    if isinstance(args[1], fx.Node) and isinstance(known_value(args[1]), torch.Tensor):
        return _ListForm(of_tensors, (args[0], args[1]), scale=tuple(kwargs.values()))
    return None if kwargs or of_numbers is None else _ListForm(of_numbers, (args[0],), (args[1],))


def _is_like(node: Any, value: torch.Tensor) -> bool:
    """True if a tensor has a result's shape, dtype and device, so that nothing is cast or
    expanded."""
    given = known_value(node) if isinstance(node, fx.Node) else None
    if not isinstance(given, torch.Tensor) or given.layout is not torch.strided:
        return False
    same = (given.dtype, given.device) == (value.dtype, value.device)
    return same and not _compat.has_symbolic_shape(given) and given.shape == value.shape


def _is_number(value: Any) -> bool:
    if isinstance(value, fx.Node):
        value = known_value(value)
    kinds = (int, float, torch.SymInt, torch.SymFloat)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _levels(
    graph: fx.Graph, before: Predecessors, forms: dict[fx.Node, _ListForm]
) -> dict[fx.Node, int]:
    """The largest number of `forms` on any path to each node."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        levels[node] = max((levels[each] + (each in forms) for each in before[node]), default=0)
    return levels


def _lists(forms: dict[fx.Node, _ListForm], levels: dict[fx.Node, int]) -> Iterator[list[fx.Node]]:
    """The groups of at least two nodes that become one list operator."""
    alike: dict[Any, list[fx.Node]] = {}
    for node, form in forms.items():
        key = (levels[node], form.target, fake_value(node).dtype, form.scale)
        alike.setdefault(key, []).append(node)
    for nodes in alike.values():
        members: list[fx.Node] = []
        nbytes = 0
        for node in nodes:
            if nbytes + fake_value(node).nbytes > LIST_BYTES:
                yield from [members] if len(members) > 1 else []
                members, nbytes = [], 0
            members.append(node)
            nbytes += fake_value(node).nbytes
        yield from [members] if len(members) > 1 else []


def _order(
    graph: fx.Graph, before: Predecessors, lists: Sequence[Sequence[fx.Node]]
) -> Iterator[fx.Node]:
    """All nodes in nearly their old order, the nodes of a list adjacent at the place of the
    last."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for members in lists:
        place |= dict.fromkeys(members, place[members[-1]])
    standing: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        standing.setdefault(place[node], []).append(node)
    followers: dict[int, set[int]] = {index: set() for index in standing}
    for node, needed in before.items():
        for each in needed:
            followers[place[each]].add(place[node])
    for index in earliest_order(followers):
        yield from standing[index]


def _put_together(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    forms = [form for form in map(_form_of, members) if form is not None]
    like, form = members[-1], forms[-1]
    args: list[Any] = [list(entries) for entries in zip(*(f.tensors for f in forms), strict=True)]
    if form.numbers:
        args.append([number for each in forms for number in each.numbers])
    kwargs = {"alpha": form.scale[0]} if form.scale else {}
    values = [fake_value(member) for member in members]  # the kernels are the same
    with graph.inserting_after(like):
        call = call_function_giving(graph, form.target, tuple(args), kwargs, values, like=like)
    place = call
    for index, member in enumerate(members):
        with graph.inserting_after(place):
            place = call_function_with_meta(graph, operator.getitem, (call, index), like=member)
        member.replace_all_uses_with(place)
        graph.erase_node(member)
