"""Patterns and replacements: Python functions, traced to ATen graphs.

    def pattern(x, w, scale: float):       x, w: placeholders; scale stands for any number
        return (x @ w) * scale             results: [mul]; gradients of x, w: [mm_1, mm_2]

With gradients, the function is traced together with its backward, as autograd writes it in a
captured step: `incoming` are then the gradients of the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import GraphOptError
from graphopt.graph_utils import (
    eliminate_dead_code,
    get_output,
    remove_identities,
    without_autocast,
)
from graphopt.ir.metadata import fake_value
from graphopt.ir.operators import operator_of


class RewriteError(GraphOptError, ValueError):
    """A pattern or replacement that cannot be used; the graph is unchanged.

    >>> from graphopt.rewriting import RewriteError
    >>> try:
    ...     graphopt.rewrite(gm, lambda x: x, lambda x: x + 0)
    ... except RewriteError as error:
    ...     print("computes nothing" in str(error))
    True
    """

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason if hint is None else f"{reason}\n  hint:  {hint}")


@dataclass(frozen=True)
class Pattern:
    """A traced function: a graph with named inputs, results and gradients.

    Attributes:
        graph: placeholders for the tensors and for incoming gradients, then calls.
        inputs: the placeholder of each parameter that is a tensor.
        numbers: the value of each other parameter.
        incoming: placeholders of the gradients of the results; empty without a backward side.
        results: what the function returns.
        gradients: the gradient of each parameter that has one, in the order they were named.
    """

    graph: fx.Graph
    inputs: Mapping[str, fx.Node]
    numbers: Mapping[str, float]
    incoming: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]

    @property
    def calls(self) -> list[fx.Node]:
        """All calls, in graph order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The results, followed by the gradients."""
        return (*self.results, *self.gradients)


def parameters_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Returns the parameters of a pattern or replacement; True for those annotated `float`, which
    are numbers.

    Raises:
        RewriteError: it is no function, or takes anything but positional parameters.
    """
    if not callable(function):
        raise RewriteError(f"a pattern is a function, not {function!r}")
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise RewriteError(f"parameter {name!r} of {_name(function)} is not a positional one")
        found[name] = parameter.annotation in (float, "float")
    return found


def trace(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    gradients: Sequence[str] = (),
    incoming: Sequence[torch.Tensor] | None = None,
) -> Pattern:
    """Traces a function for fake tensors of one mode, and numbers.

    Args:
        gradients: parameters through which gradients flow: the backward side is traced as well.
        incoming: gradients of the results; None: like the results.

    Raises:
        RewriteError: it returns something else than tensors, or has constants of its own.
        Exception: whatever the function raises for these arguments.
    """
    tensors = {name: v for name, v in arguments.items() if isinstance(v, torch.Tensor)}
    numbers = {name: v for name, v in arguments.items() if name not in tensors}
    mode = _compat.fake_mode_of(list(tensors.values()))
    if mode is None:
        raise RewriteError(f"{_name(function)} takes no tensor")
    with mode, torch.no_grad(), without_autocast():
        shown = _tensors(function, function(**arguments))
        seeds = list(incoming or map(torch.empty_like, shown)) if gradients else []
    count = len(tensors)

    def call(*flat: torch.Tensor) -> list[torch.Tensor]:
        given = {**dict(zip(tensors, flat[:count], strict=True)), **numbers}
        return _with_gradients(function, given, gradients, flat[count:])

    with without_autocast():
        graph = _functional(_compat.make_fx(call)(*tensors.values(), *seeds), mode).graph
    return _pattern(function, graph, tensors, numbers, len(shown), len(gradients))


def _with_gradients(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    gradients: Sequence[str],
    seeds: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Returns a function's results, followed by the gradients of the named arguments.

    Args:
        seeds: the gradients of the results.
    """
    if not gradients:
        with torch.no_grad():
            return _tensors(function, function(**arguments))
    leaves = {name: arguments[name].detach().requires_grad_() for name in gradients}
    through = [leaves[name] for name in gradients]
    with torch.enable_grad():
        results = _tensors(function, function(**{**arguments, **leaves}))
        found = torch.autograd.grad(results, through, seeds, allow_unused=True)
    for name, gradient in zip(gradients, found, strict=True):
        if gradient is None:
            raise RewriteError(
                f"no gradient flows to {name!r} in {_name(function)}",
                hint=f"leave {name!r} out of gradients=, or let the result depend on it",
            )
    return [*results, *found]


def _tensors(function: Callable[..., Any], returned: Any) -> list[torch.Tensor]:
    results = _compat.tree_leaves(returned)
    if not results or not all(isinstance(value, torch.Tensor) for value in results):
        raise RewriteError(f"{_name(function)} returns {returned!r}; it has to return tensors")
    return results


def _functional(traced: fx.GraphModule, mode: Any) -> fx.GraphModule:
    """Replaces in-place updates in a traced graph by functional operators, as captured steps have
    them."""
    if not any(operator_of(node).writes for node in traced.graph.nodes):
        return traced
    inputs = [fake_value(n).detach() for n in traced.graph.find_nodes(op="placeholder")]

    def run(*flat: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad(), _compat.functional_mode():
            wrapped = [_compat.to_functional(tensor) for tensor in flat]
            return [_compat.from_functional(r) for r in fx.Interpreter(traced).run(*wrapped)]

    return _compat.make_fx(run)(*inputs)


def _has_constant(node: fx.Node) -> bool:
    leaves = _compat.tree_leaves((node.args, node.kwargs))
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _pattern(
    function: Callable[..., Any],
    graph: fx.Graph,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, float],
    results: int,
    gradients: int,
) -> Pattern:
    remove_identities(graph)
    eliminate_dead_code(graph)
    if any(node.op == "get_attr" or _has_constant(node) for node in graph.nodes):
        raise RewriteError(
            f"{_name(function)} makes a constant of its own, such as torch.tensor(…)",
            hint="make it a parameter, or use an operator that takes a number",
        )
    placeholders = graph.find_nodes(op="placeholder")
    outputs = list(get_output(graph).args[0])  # type: ignore[arg-type]
    return Pattern(
        graph,
        dict(zip(tensors, placeholders, strict=False)),
        numbers,
        tuple(placeholders[len(tensors) :]),
        tuple(outputs[:results]),
        tuple(outputs[results:]),
    )


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
