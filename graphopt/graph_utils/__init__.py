"""Reading and editing FX graphs: free functions that keep metadata fresh."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import VerificationError
from graphopt.ir.families import COLLECTIVE_NAMESPACE, WAIT_FOR_SEVERAL, WAITS
from graphopt.ir.operators import (
    is_collective,
    is_copy,
    is_item,
    is_list_operator,
    is_operator,
    is_pointwise,
    is_random,
    is_wait,
    may_alias,
    operator_of,
    written,
)
from graphopt.ir.outputs import (
    Outputs,
    follows_output_convention,
    get_output,
    get_outputs,
    set_outputs,
)
from graphopt.ir.views import readers_through_views

__all__ = [
    "COLLECTIVE_NAMESPACE",
    "WAITS",
    "WAIT_FOR_SEVERAL",
    "Outputs",
    "after_placeholders",
    "call_function_with_meta",
    "eliminate_dead_code",
    "environment",
    "evaluate",
    "find_all_descendants",
    "find_nodes",
    "follows_output_convention",
    "get_output",
    "get_outputs",
    "is_collective",
    "is_copy",
    "is_dense",
    "is_item",
    "is_list_operator",
    "is_needed",
    "is_operator",
    "is_pointwise",
    "is_random",
    "is_view",
    "is_wait",
    "may_alias",
    "move_after",
    "move_before",
    "readers_through_views",
    "remove_identities",
    "same_kind",
    "set_outputs",
    "tensors_in",
    "without_autocast",
    "written",
]

is_view = may_alias
"""The name under which passes know `may_alias`."""


def is_needed(node: fx.Node) -> bool:
    """Whether a node must stay although nobody uses its result: it updates state, other ranks join
    it, or later random numbers depend on it.

    >>> from graphopt.graph_utils import find_nodes, is_needed
    >>> [node.name for node in find_nodes(gm.graph, is_needed)][-1]
    'output'
    """
    known = operator_of(node)
    if node.is_impure() or known.collective or known.marker or known.wait or known.random:
        return True
    return any(state.op in ("placeholder", "get_attr") for state in written(node))


def eliminate_dead_code(graph: fx.Graph) -> int:
    """Remove nodes without users or effects. Returns how many.

    `fx.Graph.eliminate_dead_code` would remove collectives that other ranks will join.

    >>> from graphopt.graph_utils import eliminate_dead_code
    >>> with gm.graph.inserting_before(gm.graph.output_node()):
    ...     dead = gm.graph.call_function(torch.ops.aten.t.default, (gm.graph.output_node().prev,))
    >>> eliminate_dead_code(gm.graph)
    1
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


def remove_identities(graph: fx.Graph) -> None:
    """Forward what only renames a value: `detach`, `alias`, and `copy` of the same kind of tensor.

    Values never change in a functional graph, so that sharing them cannot be seen.

    >>> from graphopt.graph_utils import remove_identities
    >>> graph = torch.fx.Graph()
    >>> copy = graph.call_function(torch.ops.aten.detach.default, (graph.placeholder("x"),))
    >>> _ = graph.output(copy)
    >>> remove_identities(graph)
    >>> [node.name for node in graph.nodes]
    ['x', 'output']
    """
    for node in graph.nodes:
        if is_operator(node.target, "aten::detach", "aten::alias"):
            node.replace_all_uses_with(node.args[0])
        elif is_operator(node.target, "aten::copy") and same_kind(*node.args[:2]):
            node.replace_all_uses_with(node.args[1])
    eliminate_dead_code(graph)


def without_autocast() -> AbstractContextManager[object]:
    """Autocast off: casts are nodes of a graph, and must not happen once more around them.

    >>> from graphopt.graph_utils import without_autocast
    >>> with torch.autocast("cpu"), without_autocast():
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def environment() -> tuple[Any, ...]:
    """Modes of torch that change what operators run.

    >>> from graphopt.graph_utils import environment
    >>> with torch.no_grad():
    ...     without = environment()
    >>> without == environment()
    False
    """
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
    """Nodes for which `predicate` holds, in graph order.

    >>> from graphopt.graph_utils import find_nodes, is_wait
    >>> find_nodes(gm.graph, is_wait)
    [wait_tensor, wait_tensor_1]
    """
    return [node for node in graph.nodes if predicate(node)]


def find_all_descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All direct and indirect users of `nodes`, without `nodes` themselves and the output.

    >>> from graphopt.graph_utils import find_all_descendants, find_nodes, is_copy, is_wait
    >>> found = find_all_descendants(find_nodes(gm.graph, is_wait)[:1])
    >>> any(map(is_copy, found))
    True
    """
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                pending.append(user)
    return found


def move_before(nodes: Sequence[fx.Node], target: fx.Node) -> None:
    """Move `nodes` to just before `target`, in the order given.

    >>> from graphopt.graph_utils import find_nodes, is_wait, move_before
    >>> waits = find_nodes(gm.graph, is_wait)
    >>> move_before(waits[:1], waits[1])
    >>> waits[0].next is waits[1]
    True
    """
    for node in nodes:
        target.prepend(node)


def move_after(nodes: Sequence[fx.Node], target: fx.Node) -> None:
    """Move `nodes` to just after `target`, in the order given.

    >>> from graphopt.graph_utils import find_nodes, is_collective, move_after
    >>> first, second = find_nodes(gm.graph, is_collective)
    >>> move_after([first], second)
    >>> second.next is first
    True
    """
    for node in nodes:
        target.append(node)
        target = node


def after_placeholders(node: fx.Node) -> fx.Node:
    """`node`, or the last placeholder where it is one of them: the place after which to insert.

    >>> from graphopt.graph_utils import after_placeholders
    >>> first = next(iter(gm.graph.nodes))
    >>> after_placeholders(first).op, after_placeholders(first).next.op
    ('placeholder', 'call_function')
    """
    while node.next.op == "placeholder":
        node = node.next
    return node


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
    node = graph.call_function(target, args, kwargs)
    if like is not None:
        node.meta = {key: value for key, value in like.meta.items() if key not in _COMPUTED}
    try:
        with _compat.quiet_fakes():
            node.meta["val"] = _value_of_call(graph, node)
    except Exception as error:  # operators raise what they like
        text = _refused_call(node, error)
        graph.erase_node(node)
        raise VerificationError(text) from error
    return node


def _value_of_call(graph: fx.Graph, node: fx.Node) -> Any:
    """As `evaluate`; views of buckets, of which there are many, in a fraction of the time."""
    if not node.kwargs:
        given = fx.node.map_arg(node.args, lambda source: source.meta["val"])
        found = _compat.plain_view(node.target, given)
        if found is not None:
            return found
    return evaluate(cast(Any, node.target), node.args, node.kwargs, _fake_mode(graph))


def _refused_call(node: fx.Node, error: Exception) -> str:
    """What an operator said of its arguments, and what these are."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    values = {f"%{source.name}": source.meta.get("val") for source in node.all_input_nodes}
    kinds = [
        f"    {name} is {value.dtype} of shape {list(value.shape)} on {value.device}"
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    given = [*map(repr, node.args), *(f"{key}={value!r}" for key, value in node.kwargs.items())]
    call = f"  > {node.target}({', '.join(given)})"
    return "\n".join([f"{node.target} does not take these arguments: {reason}", call, *kinds])


def _fake_mode(graph: fx.Graph) -> Any:
    """The FakeTensorMode of the first tensor of a graph."""
    values = (tensors_in(node.meta.get("val")) for node in graph.nodes)
    first = next((found for found in map(list, values) if found), [])
    return _compat.fake_mode_of(first)


_COMPUTED = frozenset({"val", "tensor_meta", "unbacked_bindings", "eager_input_vals", "lowering"})


def evaluate(target: Callable[..., Any], args: Any, kwargs: Any, mode: Any = None) -> Any:
    """What `target` gives for nodes' `meta["val"]`: fake tensors, symbolic numbers or nests.

    Args:
        mode: the FakeTensorMode of what is made from no tensor, as by ``aten.scalar_tensor``.

    >>> from graphopt.graph_utils import evaluate
    >>> weight = next(n for n in gm.graph.nodes if n.meta.get("fqn") == "weight")
    >>> evaluate(torch.ops.aten.t.default, (weight,), {}).shape
    torch.Size([4, 2])
    """
    if target is operator.getitem and isinstance(args[0], fx.Node):
        return args[0].meta["val"][args[1]]
    values = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = _compat.fake_mode_of(list(tensors_in(values))) or mode
    if mode is None:
        return target(*values[0], **values[1])
    with mode, torch.no_grad(), without_autocast():
        result = target(*values[0], **values[1])
        given = set(map(id, tensors_in(values)))
        if isinstance(result, torch.Tensor):
            return _of_its_own(result, given)
        return _compat.tree_map(lambda value: _of_its_own(value, given), result)


def _of_its_own(value: Any, given: Container[int]) -> Any:
    """A result that is none of the arguments, and needs no gradient."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if id(value) in given or value.requires_grad else value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors among the leaves of a nest.

    >>> from graphopt.graph_utils import tensors_in
    >>> [len(t) for t in tensors_in(([torch.ones(2)], {"other": torch.ones(3)}, 4))]
    [2, 3]
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple):  # of torch's ways through a nest none is as short
        for entry in value:
            yield from tensors_in(entry)
    elif value is not None:
        for leaf in _compat.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie side by side in memory, each once.

    >>> from graphopt.graph_utils import is_dense
    >>> is_dense(torch.ones(2, 3).t()), is_dense(torch.ones(3)[::2])
    (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_kind(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes hold tensors of one shape, stride, dtype and device.

    >>> from graphopt.graph_utils import find_nodes, is_copy, same_kind
    >>> update = find_nodes(gm.graph, is_copy)[0]
    >>> same_kind(*update.args[:2])
    True
    """
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return (
        x.shape == y.shape
        and x.stride() == y.stride()
        and x.dtype == y.dtype
        and x.device == y.device
    )
