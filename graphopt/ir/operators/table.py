"""The table of operators: one row for each that does more than compute its result."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.families import (
    COLLECTIVE_NAMESPACE,
    COPIES,
    DROPOUTS,
    LISTED_FAMILIES,
    LISTS_ROUND_IN_PLACE,
    MARKERS,
    MAY_COPY,
    METADATA_ONLY,
    ONE_TENSOR_TWICE,
    ROUNDS_IN_PLACE,
    SAME_ELEMENTS,
    SPLITS,
    UNDECLARED_ALIASES,
    UNDECLARED_WRITES,
    WAITS,
    WORKSPACES,
    collective_kind,
    written_where,
)


@dataclass(frozen=True)
class Operator:
    """The table row of one operator: its kind and effects.

    Attributes:
        aliases: per result, positions of the arguments whose memory it may share. An operator that
            returns lists has one entry per list.
        view: each result is a view of the first argument for certain, and nothing is computed.
        item: it picks one of several results.
        writes: positions of the arguments that it may update in place; see `written`.
        workspaces: positions of the arguments that it computes in, and leaves without a meaning.
        copies: it does not read what it writes, all of which it replaces.
        random: it draws random numbers, or reads or writes the state of a generator.
        wait, collective: it ends or launches a collective.
        marker: it stands for communication that is still to be inserted.
        reads_until_wait: of a collective: it reads what it sends until its wait.
        same_on_all: of a collective: it gives all ranks the same.
        reduction: of a collective: its name without the marks of variants, such as "all_reduce".
        listed: a list of independent operations, one for each entry of its list arguments.
        pointwise: each element of the result is computed from one of each operand.
        elements: how the elements of a concatenation go through it: "cat", "same", "split",
            "slice", "pointwise", or "" where they mix.
        metadata_only: of its tensor arguments it reads only what is known without their values.
        one_tensor_twice: several of its results may be one tensor.
        drops: it gives its argument itself where it drops nothing.
        rounds: of an in-place operator: the kinds of numbers that it rounds otherwise than its
            functional form does; see `rounds_in_place`.
    """

    aliases: tuple[tuple[int, ...], ...] = ()
    view: bool = False
    item: bool = False
    writes: tuple[int, ...] = ()
    workspaces: tuple[int, ...] = ()
    copies: bool = False
    random: bool = False
    wait: bool = False
    collective: bool = False
    marker: bool = False
    reads_until_wait: bool = False
    same_on_all: bool = False
    reduction: str = ""
    listed: bool = False
    pointwise: bool = False
    elements: str = ""
    metadata_only: bool = False
    one_tensor_twice: bool = False
    drops: bool = False
    rounds: tuple[str, ...] = ()

    @cached_property
    def may_alias(self) -> bool:
        """True if a result may share memory with an argument."""
        return any(self.aliases)

    @cached_property
    def own_memory(self) -> bool:
        """True if all results have memory of their own."""
        return not (self.may_alias or self.one_tensor_twice)

    @cached_property
    def only_computes(self) -> bool:
        """True if a call has no effect but its result, which has memory of its own."""
        shares = self.item or self.may_alias or self.writes or self.workspaces
        return not (shares or self.copies or self.wait or self.collective)

    @cached_property
    def aliased(self) -> tuple[int, ...]:
        """The positions of the arguments whose memory a result may share."""
        return tuple(dict.fromkeys(index for result in self.aliases for index in result))


_PLAIN = Operator()
_GETITEM = Operator(aliases=((0,),), view=True, item=True)


def operator_of(node: fx.Node) -> Operator:
    """Returns the table row of a node's target. Modules and methods have no row of their own."""
    known = _ROWS.get(id(node.target))
    if known is not None:
        return known
    return row(node.target) if node.op == "call_function" else _PLAIN


def row(target: Any) -> Operator:
    """Returns the table row of a target; a row without effects if it is no operator of torch."""
    known = _ROWS.get(id(target))
    if known is not None:
        return known
    if isinstance(target, _compat.OpOverload):
        _TARGETS.append(target)
        return _ROWS.setdefault(id(target), _row(target))
    return _GETITEM if target is operator.getitem else _PLAIN


_ROWS: dict[int, Operator] = {id(operator.getitem): _GETITEM}
"""The rows made so far, by the identity of their targets, since hashing an `OpOverload` runs Python
code. Targets of other node kinds are names, and have no row."""

_TARGETS: list[_compat.OpOverload] = []
"""References to the targets of these rows, so that their identities are not reused."""


_ROUNDS = ROUNDS_IN_PLACE | LISTS_ROUND_IN_PLACE


def _row(target: _compat.OpOverload) -> Operator:
    schema = _compat.schema_of(target)
    name = schema.name
    wait = name in WAITS
    collective = target.namespace == COLLECTIVE_NAMESPACE and not wait
    marker, reduction = name in MARKERS, ""
    if collective:
        reduction = name.split("::")[1].removesuffix("_").removesuffix("_coalesced")
    kind = collective_kind(reduction.removesuffix("_out"))
    aliases, writes = _aliases(schema), _writes(schema)
    pointwise = torch.Tag.pointwise in target.tags
    return Operator(
        aliases=aliases,
        view=any(aliases) and not writes and not wait and name not in MAY_COPY,
        writes=writes,
        workspaces=WORKSPACES.get(name, ()),
        copies=name in COPIES,
        random=torch.Tag.nondeterministic_seeded in target.tags
        or _takes_a_generator(schema)
        or (target.namespace == "graphopt" and not marker),
        wait=wait,
        collective=collective,
        marker=marker,
        reads_until_wait=collective and not writes and not kind.copies,
        same_on_all=kind.same_on_all,
        reduction=reduction,
        listed=_is_listed(schema, collective or wait),
        pointwise=pointwise,
        elements=_elements(name, wait, pointwise or collective_kind(reduction).by_element),
        metadata_only=name in METADATA_ONLY,
        one_tensor_twice=name in ONE_TENSOR_TWICE,
        drops=name in DROPOUTS,
        rounds=_ROUNDS.get(f"{name}.{schema.overload_name}".removesuffix("."), ()),
    )


def _aliases(schema: Any) -> tuple[tuple[int, ...], ...]:
    undeclared = UNDECLARED_ALIASES.get(schema.name)
    if undeclared is not None:
        return (undeclared,) * len(schema.returns)
    return tuple(_aliased_by(result.alias_info, schema) for result in schema.returns)


def _aliased_by(result: Any, schema: Any) -> tuple[int, ...]:
    """Returns the positions of the arguments that a result may alias. For a list result, torch does
    not say which item."""
    if result is None:
        return ()
    marked = [(i, a.alias_info) for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    return tuple(
        index
        for index, argument in marked
        if not result.before_set or not result.before_set.isdisjoint(argument.before_set)
    )


def _writes(schema: Any) -> tuple[int, ...]:
    declared = {
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    undeclared = *UNDECLARED_WRITES.get(schema.name, ()), *written_where(schema.name)
    return tuple(sorted(declared.union(undeclared)))


def _takes_a_generator(schema: Any) -> bool:
    """True if an operator takes a generator, such as `prims::normal`, which torch does not tag as
    random."""
    return any("Generator" in str(argument.type) for argument in schema.arguments)


def _is_listed(schema: Any, communicates: bool) -> bool:
    """True if an operator works on lists entry by entry. Excludes operators such as `cat`."""
    if not schema.arguments or not is_list_of_tensors(schema.arguments[0].type):
        return False
    return communicates or schema.name.startswith(LISTED_FAMILIES)


def is_list_of_tensors(kind: Any) -> bool:
    """True if the type of an argument in a schema is a list of tensors."""
    return isinstance(kind, torch.ListType) and isinstance(kind.getElementType(), torch.TensorType)


def _elements(name: str, wait: bool, by_element: bool) -> str:
    if name == "aten::cat":
        return "cat"
    if wait or name in SAME_ELEMENTS:
        return "same"
    if name in SPLITS:
        return "split"
    if name == "aten::slice":
        return "slice"
    return "pointwise" if by_element else ""
