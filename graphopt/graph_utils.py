"""Reading and editing FX graphs: free functions that keep metadata fresh."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import VerificationError

COLLECTIVE_NAMESPACE = "_c10d_functional"

WAIT_FOR_SEVERAL = f"{COLLECTIVE_NAMESPACE}::wait_tensors"  # since torch 2.15
WAITS = (f"{COLLECTIVE_NAMESPACE}::wait_tensor", WAIT_FOR_SEVERAL)
"""The operators that wait for functional collectives; all others of their namespace launch."""


def is_operator(target: object, *names: str) -> bool:
    """Whether a node target is an overload of one of the operators, such as ``aten::copy_``."""
    return isinstance(target, _compat.OpOverload) and target._schema.name in names


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a functional collective."""
    return is_operator(node.target, *WAITS)


def is_collective(node: fx.Node) -> bool:
    """Whether a node launches a functional collective."""
    target = node.target
    if not isinstance(target, _compat.OpOverload) or is_wait(node):
        return False
    return target.namespace == COLLECTIVE_NAMESPACE


def is_pointwise(target: object) -> bool:
    """Whether a node target computes each element of its result from one of each operand."""
    return isinstance(target, _compat.OpOverload) and torch.Tag.pointwise in target.tags


def is_view(node: fx.Node) -> bool:
    """Whether the result may share storage with an input: views, and items of lists of views."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, _compat.OpOverload) and _returns_views(node.target)


_UNDECLARED_VIEWS = (
    "aten::_unsafe_view",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
    "aten::unsafe_chunk",
)
"""Operators whose results are views although their schemas do not say so."""


def may_alias(node: fx.Node) -> bool:
    """Whether the result may share storage with the first argument, by the schema or against it."""
    return is_view(node) or is_operator(node.target, *_UNDECLARED_VIEWS)


@cache
def _returns_views(target: _compat.OpOverload) -> bool:
    return any(result.alias_info is not None for result in target._schema.returns)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a random number generator, or reads or writes its state."""
    target = node.target
    if not isinstance(target, _compat.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or target.namespace == "graphopt"


def written(node: fx.Node) -> list[fx.Node]:
    """Arguments that a node updates in place, by the alias annotations of its schema; of a call of
    compiled code by `meta["writes"]`, positions of arguments."""
    target = node.target
    if node.op in ("call_module", "call_method"):
        return [cast(fx.Node, node.args[index]) for index in node.meta.get("writes", ())]
    if not isinstance(target, _compat.OpOverload) or not target._schema.is_mutable:
        return []
    found: list[fx.Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        found += [leaf for leaf in _compat.tree_leaves(value) if isinstance(leaf, fx.Node)]
    return found


def is_needed(node: fx.Node) -> bool:
    """Whether a node must stay although nobody uses its result: it updates state, other ranks join
    it, or later random numbers depend on it."""
    return node.is_impure() or is_collective(node) or is_wait(node) or is_random(node)


def eliminate_dead_code(graph: fx.Graph) -> int:
    """Remove nodes without users or effects. Returns how many.

    `fx.Graph.eliminate_dead_code` would remove collectives that other ranks will join.
    """
    dead = [n for n in reversed(graph.nodes) if not n.users and not is_needed(n)]
    removed = 0
    while dead:
        node = dead.pop()
        inputs = list(node.all_input_nodes)
        graph.erase_node(node)
        removed += 1
        dead += [n for n in inputs if not n.users and not is_needed(n)]
    return removed


def get_output(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    node: fx.Node = next(iter(reversed(graph.nodes)))
    assert node.op == "output"
    return node


class Outputs(NamedTuple):
    """The three parts of a captured graph's output, as lists of nodes and constants."""

    results: list[Any]
    updates: list[fx.Node]
    carried: list[Any]


def get_outputs(graph: fx.Graph) -> Outputs:
    """What a graph returns, in the output convention of docs/ir.md.

    Of a graph that has another output, every `copy_` returned is a state update, and every other
    leaf a result.
    """
    returned = get_output(graph).args[0]
    if follows_output_convention(graph):
        results, updates, carried = cast(Any, returned)
        return Outputs(list(results), list(updates), list(carried))
    leaves = _compat.tree_leaves(returned)
    updates = [leaf for leaf in leaves if _is_copy(leaf)]
    return Outputs([leaf for leaf in leaves if not _is_copy(leaf)], updates, [])


def follows_output_convention(graph: fx.Graph) -> bool:
    """Whether a graph returns ``(user results, state updates, carried values)``, each a list."""
    returned = get_output(graph).args[0]
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        return False
    return all(isinstance(part, (tuple, list)) for part in returned)


def _is_copy(value: object) -> bool:
    return isinstance(value, fx.Node) and is_operator(value.target, "aten::copy_")


def set_outputs(graph: fx.Graph, outputs: Outputs) -> None:
    """Let a graph return `outputs`."""
    get_output(graph).args = (tuple(outputs),)


def without_autocast() -> AbstractContextManager[object]:
    """Autocast off: casts are nodes of a graph, and must not happen once more around them."""
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def environment() -> tuple[Any, ...]:
    """Modes of torch that change what operators run."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        *_compat.global_settings(),
    )


def find_nodes(graph: fx.Graph, predicate: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Nodes for which `predicate` holds, in graph order."""
    return [node for node in graph.nodes if predicate(node)]


def find_all_descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All direct and indirect users of `nodes`, without `nodes` themselves and the output."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                pending.append(user)
    return found


def readers_through_views(root: fx.Node) -> Iterator[fx.Node]:
    """Nodes that read the storage of `root`, directly or through views of it."""
    found: set[fx.Node] = set()
    pending = [root]
    while pending:
        for user in pending.pop().users:
            if user.op == "output" or user in found:
                continue
            found.add(user)
            yield user
            if may_alias(user) and not is_operator(user.target, "aten::copy_"):
                pending.append(user)


def move_before(nodes: Sequence[fx.Node], target: fx.Node) -> None:
    """Move `nodes` to just before `target`, in the order given."""
    for node in nodes:
        target.prepend(node)


def move_after(nodes: Sequence[fx.Node], target: fx.Node) -> None:
    """Move `nodes` to just after `target`, in the order given."""
    for node in nodes:
        target.append(node)
        target = node


def call_function_with_meta(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node | None = None,
) -> fx.Node:
    """Insert a call at the graph's insertion point and compute its `meta["val"]`.

    Args:
        graph: an active `graph.inserting_before(...)` decides the place.
        target: an operator overload or a Python operator.
        args, kwargs: may contain nodes.
        like: a node whose phase, source line and module path the new node takes over.

    Raises:
        VerificationError: `target` is a function written in Python.
    """
    kwargs = kwargs or {}
    if isinstance(target, types.FunctionType):
        raise VerificationError(
            f"{target.__qualname__} is a Python function, of which nothing is known: nodes call"
            " operator overloads, such as torch.ops.aten.mul.Tensor, or Python operators\n"
            "  hint:  graphopt.host.insert_callback(graph, function, *nodes) calls a function in"
            " every step"
        )
    node = graph.call_function(target, args, kwargs)
    if like is not None:
        node.meta = {key: value for key, value in like.meta.items() if key not in _COMPUTED}
    node.meta["val"] = evaluate(target, args, kwargs)
    return node


_COMPUTED = frozenset({"val", "tensor_meta", "unbacked_bindings", "eager_input_vals", "lowering"})


def evaluate(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What `target` gives for nodes' `meta["val"]`: fake tensors, symbolic numbers or nests."""
    if target is operator.getitem and isinstance(args[0], fx.Node):
        return args[0].meta["val"][args[1]]
    values = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = _compat.fake_mode_of(list(tensors_in(values)))
    if mode is None:
        return target(*values[0], **values[1])
    with mode, torch.no_grad(), without_autocast():
        result = target(*values[0], **values[1])
        return _compat.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, result)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors among the leaves of a nest."""
    for leaf in _compat.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie side by side in memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_kind(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes hold tensors of one shape, stride, dtype and device."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return (
        x.shape == y.shape
        and x.stride() == y.stride()
        and x.dtype == y.dtype
        and x.device == y.device
    )
