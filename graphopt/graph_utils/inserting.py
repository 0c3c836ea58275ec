"""Insertion of calls with computed metadata."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Container
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import VerificationError
from graphopt.graph_utils.modes import without_autocast
from graphopt.graph_utils.tensor_metadata import tensors_in
from graphopt.ir.metadata import fake_value, known_value, set_value


def call_function_with_meta(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node | None = None,
) -> fx.Node:
    """Inserts a call at the graph's insertion point and computes its `meta["val"]`.

    Args:
        graph: an active `graph.inserting_before(...)` decides the place.
        target: an operator overload or a Python operator.
        args, kwargs: may contain nodes.
        like: a node whose phase, source line and module path the new node takes over.

    Raises:
        VerificationError: `target` is a function written in Python, or does not take these
            arguments. Nothing is inserted.

    >>> from graphopt.graph_utils import call_function_with_meta
    >>> weight = next(n for n in gm.graph.nodes if n.meta.get("fqn") == "weight")
    >>> with gm.graph.inserting_before(gm.graph.output_node()):
    ...     new = call_function_with_meta(gm.graph, torch.ops.aten.t.default, (weight,))
    >>> new.meta["val"].shape
    torch.Size([4, 2])
    """
    kwargs = kwargs or {}
    if isinstance(target, types.FunctionType):
        raise VerificationError(
            f"{target.__qualname__} is a Python function, of which nothing is known: nodes call"
            " operator overloads, such as torch.ops.aten.mul.Tensor, or Python operators\n"
            "  hint:  graphopt.host.insert_callback(graph, function, *nodes) calls a function in"
            " every step"
        )
    node = _inserted(graph, target, args, kwargs, like)
    try:
        with _compat.quiet_fakes():
            set_value(node, _value_of_call(graph, node))
    except Exception as error:  # operators raise what they like
        text = _refused_call(node, error)
        graph.erase_node(node)
        raise VerificationError(text) from error
    return node


def call_function_giving(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: Any,
    *,
    like: fx.Node,
) -> fx.Node:
    """Inserts a call as `call_function_with_meta` does, with the known result `value` (fake
    tensors) as metadata."""
    node = _inserted(graph, target, args, kwargs, like)
    set_value(node, value)
    return node


def _inserted(
    graph: fx.Graph, target: Callable[..., Any], args: Any, kwargs: Any, like: fx.Node | None
) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    if like is not None:
        node.meta = {key: value for key, value in like.meta.items() if key not in _COMPUTED}
    return node


def _value_of_call(graph: fx.Graph, node: fx.Node) -> Any:
    """Evaluates a call as `evaluate` does; factories run in the graph's fake mode."""
    return evaluate(cast(Any, node.target), node.args, node.kwargs, _fake_mode(graph))


def _refused_call(node: fx.Node, error: Exception) -> str:
    """Formats an operator's error together with its arguments."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    values = {f"%{source.name}": known_value(source) for source in node.all_input_nodes}
    kinds = [
        f"    {name} is {value.dtype} of shape {list(value.shape)} on {value.device}"
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    given = [*map(repr, node.args), *(f"{key}={value!r}" for key, value in node.kwargs.items())]
    call = f"  > {node.target}({', '.join(given)})"
    return "\n".join([f"{node.target} does not take these arguments: {reason}", call, *kinds])


def _fake_mode(graph: fx.Graph) -> Any:
    """Returns the FakeTensorMode of the first tensor in a graph."""
    values = (tensors_in(known_value(node)) for node in graph.nodes)
    first = next((found for found in map(list, values) if found), [])
    return _compat.fake_mode_of(first)


_COMPUTED = frozenset({"val", "tensor_meta", "unbacked_bindings", "eager_input_vals", "lowering"})


def evaluate(target: Callable[..., Any], args: Any, kwargs: Any, mode: Any = None) -> Any:
    """Runs `target` on nodes' `meta["val"]`: fake tensors, symbolic numbers or nests.

    Args:
        mode: the FakeTensorMode of what is made from no tensor, as by ``aten.scalar_tensor``.

    >>> from graphopt.graph_utils import evaluate
    >>> weight = next(n for n in gm.graph.nodes if n.meta.get("fqn") == "weight")
    >>> evaluate(torch.ops.aten.t.default, (weight,), {}).shape
    torch.Size([4, 2])
    """
    if target is operator.getitem and isinstance(args[0], fx.Node):
        return fake_value(args[0])[args[1]]
    values = fx.node.map_arg((args, kwargs), lambda node: fake_value(node))
    view = None if kwargs else _compat.plain_view(target, values[0])
    if view is not None:  # those of buckets are many, and take a fraction of the time so
        return view
    mode = _compat.fake_mode_of(list(tensors_in(values))) or mode
    if mode is None:
        return target(*values[0], **values[1])
    with mode, torch.no_grad(), without_autocast():
        result = target(*values[0], **values[1])
        given = set(map(id, tensors_in(values)))
        if isinstance(result, torch.Tensor):
            return _detached(result, given)
        return _compat.tree_map(lambda value: _detached(value, given), result)


def _detached(value: Any, given: Container[int]) -> Any:
    """Detaches a result that is an argument or requires grad, so that it is a tensor of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    return _compat.detached(value) if id(value) in given or value.requires_grad else value
