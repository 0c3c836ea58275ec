"""What operators do besides computing their result: one row per operator.

Capture, passes, verifier, finalizer, lowering and pipelining all ask here which operators are
views, work on lists, in place, at random, element by element, or communicate. An operator that no
family (`graphopt.ir.families`) names aliases and writes what its schema says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.families import (
    COLLECTIVE_NAMESPACE,
    COMPLEX,
    COPIES,
    COPY_WHAT_THEY_SEND,
    DROPOUTS,
    ELEMENT_COLLECTIVES,
    FUSED_OPTIMIZERS,
    HALF,
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
    WRITES_WHERE,
)


@dataclass(frozen=True)
class Operator:
    """What is known of the target of a node.

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
        """Whether a result may share memory with an argument."""
        return any(self.aliases)

    @cached_property
    def own_memory(self) -> bool:
        """Whether no result shares memory with an argument, nor another result."""
        return not (self.may_alias or self.one_tensor_twice)

    @cached_property
    def aliased(self) -> tuple[int, ...]:
        """Positions of the arguments whose memory a result may share."""
        return tuple(dict.fromkeys(index for result in self.aliases for index in result))


_PLAIN = Operator()
_GETITEM = Operator(aliases=((0,),), view=True, item=True)


def operator_of(node: fx.Node) -> Operator:
    """The row of what a node calls. Modules and methods have none of their own."""
    known = _ROWS.get(id(node.target))
    if known is not None:
        return known
    return row(node.target) if node.op == "call_function" else _PLAIN


def row(target: Any) -> Operator:
    """The row of a target; a row without effects where it is no operator of torch's."""
    known = _ROWS.get(id(target))
    if known is not None:
        return known
    if isinstance(target, _compat.OpOverload):
        _TARGETS.append(target)
        return _ROWS.setdefault(id(target), _row(target))
    return _GETITEM if target is operator.getitem else _PLAIN


_ROWS: dict[int, Operator] = {id(operator.getitem): _GETITEM}
"""Rows made so far, by the identity of their targets: to hash an `OpOverload` runs Python code. All
but those of calls of functions are names, and have no row."""

_TARGETS: list[_compat.OpOverload] = []
"""The targets of these rows, held, since another object may have the identity of one that is gone.
"""


def _row(target: _compat.OpOverload) -> Operator:
    schema = target._schema
    name = schema.name
    wait = name in WAITS
    collective = target.namespace == COLLECTIVE_NAMESPACE and not wait
    marker, reduction = name in MARKERS, ""
    if collective:
        reduction = name.split("::")[1].removesuffix("_").removesuffix("_coalesced")
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
        reads_until_wait=collective and not writes and name not in COPY_WHAT_THEY_SEND,
        reduction=reduction,
        listed=_is_listed(schema, collective or wait),
        pointwise=pointwise,
        elements=_elements(name, wait, reduction, pointwise),
        metadata_only=name in METADATA_ONLY,
        one_tensor_twice=name in ONE_TENSOR_TWICE,
        drops=name in DROPOUTS,
        rounds=(ROUNDS_IN_PLACE | LISTS_ROUND_IN_PLACE).get(_name_with_overload(target), ()),
    )


def _name_with_overload(target: _compat.OpOverload) -> str:
    overload = target._schema.overload_name
    return f"{target._schema.name}.{overload}" if overload else str(target._schema.name)


def _aliases(schema: Any) -> tuple[tuple[int, ...], ...]:
    undeclared = UNDECLARED_ALIASES.get(schema.name)
    if undeclared is not None:
        return (undeclared,) * len(schema.returns)
    return tuple(_aliased_by(result.alias_info, schema) for result in schema.returns)


def _aliased_by(result: Any, schema: Any) -> tuple[int, ...]:
    """Positions of arguments in an alias set of a result; those in any, where it is of a list:
    torch does not say in which."""
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
    undeclared = *UNDECLARED_WRITES.get(schema.name, ()), *WRITES_WHERE.get(schema.name, ())
    return tuple(sorted(declared.union(undeclared)))


def _takes_a_generator(schema: Any) -> bool:
    """As `prims::normal` does, which torch does not say to be random."""
    return any("Generator" in str(argument.type) for argument in schema.arguments)


def _is_listed(schema: Any, communicates: bool) -> bool:
    """List operators are known by their first argument, a list of tensors, and by their family:
    `cat` takes a list as well, and an operator like `_fused_rms_norm` does not."""
    if not schema.arguments or not is_list_of_tensors(schema.arguments[0].type):
        return False
    return communicates or schema.name.startswith(LISTED_FAMILIES)


def is_list_of_tensors(kind: Any) -> bool:
    """Whether the type of an argument in a schema is a list of tensors."""
    return isinstance(kind, torch.ListType) and isinstance(kind.getElementType(), torch.TensorType)


def _elements(name: str, wait: bool, reduction: str, pointwise: bool) -> str:
    if name == "aten::cat":
        return "cat"
    if wait or name in SAME_ELEMENTS:
        return "same"
    if name in SPLITS:
        return "split"
    if name == "aten::slice":
        return "slice"
    return "pointwise" if pointwise or reduction in ELEMENT_COLLECTIVES else ""


def calls_of(graph: fx.Graph, has: Callable[[Operator], object]) -> list[fx.Node]:
    """The calls of operators for whose rows `has` holds, in graph order.

    The graph is asked by targets, of which there are few: no walk over its nodes.
    """
    known = _compat.calls_by_target(graph)
    return sorted(node for target, nodes in known if has(row(target)) for node in nodes)


def writers(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that update arguments in place, or may; see `written`. In graph order."""
    found = calls_of(graph, attrgetter("writes"))
    for op in ("call_module", "call_method"):
        found += graph.find_nodes(op=op, sort=False)
    return sorted(found)


def is_operator(target: object, *names: str) -> bool:
    """Whether a node target is an overload of one of the operators, such as ``aten::copy_``.

    >>> from graphopt.graph_utils import find_nodes, is_operator
    >>> find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::sum", "aten::mean"))
    [sum_1, sum_2]
    """
    return isinstance(target, _compat.OpOverload) and target._schema.name in names


def is_copy(node: fx.Node) -> bool:
    """Whether a node replaces the whole value of its first argument by that of its second.

    >>> from graphopt.graph_utils import find_nodes, is_copy
    >>> [str(node.args[0]) for node in find_nodes(gm.graph, is_copy)][:2]
    ['weight', 'bias']
    """
    return operator_of(node).copies


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a functional collective.

    >>> from graphopt.graph_utils import find_nodes, is_wait
    >>> find_nodes(gm.graph, is_wait)
    [wait_tensor, wait_tensor_1]
    """
    return operator_of(node).wait


def is_collective(node: fx.Node) -> bool:
    """Whether a node launches a functional collective.

    >>> from graphopt.graph_utils import find_nodes, is_collective
    >>> find_nodes(gm.graph, is_collective)
    [all_reduce, all_reduce_1]
    """
    return operator_of(node).collective


def is_marker(node: fx.Node) -> bool:
    """Whether a node stands for communication that a kind of parallelism is to insert."""
    return operator_of(node).marker


def is_item(node: fx.Node) -> bool:
    """Whether a node picks one of several results.

    >>> from graphopt.graph_utils import find_nodes, is_item
    >>> all(is_item(n) for n in gm.graph.nodes if n.name.startswith('getitem'))
    True
    """
    return operator_of(node).item


def is_pointwise(target: object) -> bool:
    """Whether a node target computes each element of its result from one of each operand.

    >>> from graphopt.graph_utils import is_pointwise
    >>> is_pointwise(torch.ops.aten.add.Tensor), is_pointwise(torch.ops.aten.mm.default)
    (True, False)
    """
    return row(target).pointwise


def rounds_in_place(target: object, dtype: torch.dtype) -> bool:
    """Whether an in-place operator gives other bits than torch's functional form of it.

    >>> from graphopt.ir.operators import rounds_in_place
    >>> times = torch.ops.aten.mul_.Scalar
    >>> rounds_in_place(times, torch.bfloat16), rounds_in_place(times, torch.float32)
    (True, False)
    """
    kinds = row(target).rounds
    return (dtype.is_complex and COMPLEX in kinds) or (dtype in _HALVES and HALF in kinds)


def rounds_a_list_in_place(target: object, entries: Iterable[Any]) -> bool:
    """Whether a list operator that works in place gives other bits of some entry than its
    functional form: on CPUs.

    Args:
        entries: the tensors that it updates, or tensors like them.
    """
    if not row(target).listed or not row(target).rounds:
        return False
    tensors = (entry for entry in entries if isinstance(entry, torch.Tensor))
    return any(t.device.type == "cpu" and rounds_in_place(target, t.dtype) for t in tensors)


_HALVES = (torch.bfloat16, torch.float16)


def may_alias(node: fx.Node) -> bool:
    """Whether the result, or an item of it, may share memory with an argument.

    >>> from graphopt.graph_utils import find_nodes, may_alias
    >>> find_nodes(gm.graph, may_alias)[0]
    t
    """
    return operator_of(node).may_alias


def is_list_operator(node: fx.Node) -> bool:
    """Whether a node computes, in place or not, one thing for each entry of lists of tensors.

    >>> from graphopt.graph_utils import find_nodes, is_list_operator
    >>> find_nodes(gm.graph, is_list_operator)
    [_foreach_add, _fused_adam]
    """
    known = operator_of(node)
    return known.listed and not known.collective and not known.wait


def fused_optimizer(target: Any) -> str | None:
    """`_fused_adamw` for each overload of it and of its in-place form; None for other targets."""
    if not isinstance(target, _compat.OpOverload):
        return None
    name: str = target._schema.name.removeprefix("aten::").removesuffix("_")
    return name if name in FUSED_OPTIMIZERS else None


def updated_lists(name: str, grad_scale: object) -> tuple[int, ...]:
    """Positions of the lists that a fused optimizer updates, gradients among them where it takes
    the scale of a `GradScaler`, with which it unscales them."""
    lists = FUSED_OPTIMIZERS[name]
    return lists if grad_scale is None else (*lists[:1], 1, *lists[1:])


def argument(node: fx.Node, name: str) -> Any:
    """The argument of an operator call that its schema calls `name`: its default, where it is not
    given; None if the operator has none such.

    >>> from graphopt.comm import argument, get_all_comm_blocks
    >>> argument(get_all_comm_blocks(gm)[0].comm_node, "reduce_op")
    'sum'
    """
    assert isinstance(node.target, _compat.OpOverload)
    for index, parameter in enumerate(node.target._schema.arguments):
        if parameter.name != name:
            continue
        if index < len(node.args):
            return node.args[index]
        default = parameter.default_value if parameter.has_default_value() else None
        return node.kwargs.get(name, default)
    return None


def argument_at(node: fx.Node, index: int) -> Any:
    """The argument that a schema has at a position, given by position or by name."""
    if index < len(node.args):
        return node.args[index]
    assert isinstance(node.target, _compat.OpOverload)
    return node.kwargs.get(node.target._schema.arguments[index].name)


def first_argument(node: fx.Node) -> Any:
    """The argument that comes first, given by position or by name; None where there is none."""
    if node.args or not isinstance(node.target, _compat.OpOverload):
        return node.args[0] if node.args else None
    return argument_at(node, 0) if node.target._schema.arguments else None


def is_random(node: fx.Node) -> bool:
    """Whether a node may draw from a random number generator, or reads or writes its state.

    >>> from graphopt.graph_utils import find_nodes, is_random
    >>> dropout = torch.nn.Dropout(0.5)
    >>> graph = graphopt.capture(lambda m, x: m(x), dropout, torch.ones(3)).graph_module.graph
    >>> find_nodes(graph, is_random)
    [bernoulli]
    """
    return operator_of(node).random


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or touches a generator: attention without dropout does
    not, although its operator may."""
    if not is_random(node):
        return False
    return argument(node, "dropout_p") != 0.0 and argument(node, "train") is not False


def written(node: fx.Node) -> list[fx.Node]:
    """Arguments that a node updates in place; of a call of compiled code by `meta["writes"]`,
    positions of arguments.

    >>> from graphopt.graph_utils import find_nodes, is_copy, written
    >>> update = find_nodes(gm.graph, is_copy)[0]
    >>> list(written(update))
    [weight]
    """
    if node.op in ("call_module", "call_method"):
        return [node.args[index] for index in node.meta.get("writes", ())]
    found: list[fx.Node] = []
    for index in operator_of(node).writes:
        if _is_written(node, index):
            found += nodes_in(argument_at(node, index))
    return found


def overwritten(node: fx.Node) -> list[fx.Node]:
    """What `written` says, and the workspaces that the node computes in."""
    found = written(node)
    for index in operator_of(node).workspaces:
        found += nodes_in(argument_at(node, index))
    return found


def _is_written(node: fx.Node, index: int) -> bool:
    conditions = WRITES_WHERE.get(node.target._schema.name)  # type: ignore[union-attr]
    if conditions is None or index not in conditions:
        return True
    return argument(node, conditions[index]) not in (None, False)


def aliased(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory the result of a node, or an item of it, may share."""
    known = operator_of(node)
    if known.item:
        return node.all_input_nodes[:1]
    if not known.may_alias:
        return []
    if known.drops and argument(node, "train") and argument(node, "p"):
        return []
    found: list[fx.Node] = []
    for index in known.aliased:
        value = argument_at(node, index)
        found += [value] if isinstance(value, fx.Node) else nodes_in(value)
    return found


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """Nodes among the leaves of a nest."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from nodes_in(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from nodes_in(entry)
