"""Effects of a call on its arguments, and the calls of a graph that have any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, cast

from torch import fx

from graphopt import _compat
from graphopt.ir.families import written_where
from graphopt.ir.metadata import written_arguments
from graphopt.ir.operators.kinds import is_random
from graphopt.ir.operators.table import Operator, operator_of, row


def argument(node: fx.Node, name: str) -> Any:
    """Returns a call's argument by its schema name: its default if it is not given, None if there
    is none of that name.

    >>> from graphopt.comm import argument, get_all_comm_blocks
    >>> argument(get_all_comm_blocks(gm)[0].comm_node, "reduce_op")
    'sum'
    """
    assert isinstance(node.target, _compat.OpOverload)
    for index, parameter in enumerate(_compat.schema_of(node.target).arguments):
        if parameter.name != name:
            continue
        if index < len(node.args):
            return node.args[index]
        default = parameter.default_value if parameter.has_default_value() else None
        return node.kwargs.get(name, default)
    return None


def arguments_by_name(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of an operator call by their schema names."""
    names = [argument.name for argument in _compat.schema_of(target).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def argument_at(node: fx.Node, index: int) -> Any:
    """Returns the argument at a schema position, whether given by position or by name."""
    if index < len(node.args):
        return node.args[index]
    assert isinstance(node.target, _compat.OpOverload)
    return node.kwargs.get(_compat.schema_of(node.target).arguments[index].name)


def first_argument(node: fx.Node) -> Any:
    """Returns the first argument, given by position or by name, or None."""
    if node.args or not isinstance(node.target, _compat.OpOverload):
        return node.args[0] if node.args else None
    return argument_at(node, 0) if _compat.schema_of(node.target).arguments else None


def draws(node: fx.Node) -> bool:
    """True if a node draws random numbers or touches a generator. Attention without dropout does
    not, although its operator may."""
    if not is_random(node):
        return False
    return argument(node, "dropout_p") != 0.0 and argument(node, "train") is not False


def written(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that a node updates in place; for compiled code, by `meta["writes"]`.

    >>> from graphopt.graph_utils import find_nodes, is_copy, written
    >>> update = find_nodes(gm.graph, is_copy)[0]
    >>> list(written(update))
    [weight]
    """
    if node.op in ("call_module", "call_method"):
        return [cast(fx.Node, node.args[index]) for index in written_arguments(node)]
    found: list[fx.Node] = []
    if operator_of(node).writes:  # of few nodes, and this is asked of all
        for index in written_positions(node):
            found += nodes_in(argument_at(node, index))
    return found


def written_positions(node: fx.Node) -> list[int]:
    """Returns the positions of the arguments that the operator of a node updates in place."""
    return [index for index in operator_of(node).writes if _is_written(node, index)]


def overwritten(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that a node updates, and those that it uses as scratch memory."""
    found = written(node)
    for index in operator_of(node).workspaces:
        found += nodes_in(argument_at(node, index))
    return found


def _is_written(node: fx.Node, index: int) -> bool:
    condition = written_where(_compat.operator_name(node.target)).get(index)
    return condition is None or argument(node, condition) not in (None, False)


def aliased(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments whose memory the result of a node, or an item of it, may share."""
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
    """Yields the nodes among the leaves of a nest."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from nodes_in(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from nodes_in(entry)


def calls_of(graph: fx.Graph, has: Callable[[Operator], object]) -> list[fx.Node]:
    """Returns the calls of operators whose table row satisfies `has`, in graph order.

    The graph is asked by targets, of which there are few: no walk over its nodes.
    """
    known = _compat.calls_by_target(graph)
    return sorted(node for target, nodes in known if has(row(target)) for node in nodes)


def writers(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that update arguments in place, or may (see `written`), in graph order."""
    found = calls_of(graph, attrgetter("writes"))
    for op in ("call_module", "call_method"):
        found += graph.find_nodes(op=op, sort=False)
    return sorted(found)
