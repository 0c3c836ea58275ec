"""`graphopt.rewrite`: replaces every occurrence of a pattern.

    t    = t(weight)          pattern(x, w):               t_1 = addmm(bias, x, t)
    mm   = mm(x, t)               return x @ w      ==>
    add  = add(mm, bias)      …

What stands between the inputs and the outputs of a place goes, and what the replacement computes
comes in: its forward side before the first result, its backward side before the first gradient. A
result that lies in memory otherwise than before is copied into the old layout, so that nothing that
reads it computes other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import call_function_with_meta
from graphopt.ir.metadata import fake_value
from graphopt.ir.rewritten_places import RewrittenPlace, note_place
from graphopt.rewriting.finding import Exchange, Rule, exchanges, names_of, needed_for
from graphopt.rewriting.matching import Match

aten = torch.ops.aten


def rewrite(
    gm: fx.GraphModule,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    where: Callable[[Match], bool] | None = None,
    gradients: Sequence[str] = (),
    examples: Mapping[str, torch.Tensor | int] | None = None,
    tolerance: float | None = None,
) -> int:
    """Replaces each occurrence of `pattern` in a graph by `replacement`.

    Both are Python functions of the same parameters, written with whatever torch offers, and are
    traced to ATen for the shapes, strides and dtypes of each place. Parameters are tensors; one
    that is annotated ``float`` stands for a number in the graph. Layout, metadata (line, phase,
    module path) and provenance are kept.

    A place is left alone where a value within it is read from outside, where it reaches over two
    phases or into the next iteration, where it overlaps a place before it, where it writes or
    communicates, and where an input is computed too late.

    Inside a pass, a rewrite is proven like any edit. Where a pass is declared with
    ``changes_numerics=True``, everything outside of the rewritten places is proven, and each
    distinct place is run before and after on random inputs, and compared with `tolerance`.

    Args:
        gm: its graph is edited.
        pattern: what to look for; returns a tensor, or several.
        replacement: what to put there; returns as many, of the same shapes and dtypes.
        where: given each `Match`, says whether to rewrite it.
        gradients: parameters through which gradients flow: then the place is the forward side
            together with the backward side that autograd makes of it, and the replacement's
            backward comes with it.
        examples: tensors like those that parameters stand for, or their number of dimensions alone.
            Only that number and the dtype matter, sizes do not. Without an example, all
            parameters have the same, any number of dimensions, and any floating dtype in the graph.
        tolerance: of the comparison, relative to the largest element of an output; None: 1e-6 for
            float64, 1e-3 for float32, 3e-2 for smaller types.

    Returns:
        The number of places that were rewritten.

    Raises:
        RewriteError: pattern or replacement cannot be traced, or give other kinds of tensors.
            Nothing is changed.

    >>> import graphopt, torch
    >>> def step(model, x):
    ...     return torch.relu(model(x)) + 1
    >>> gm = graphopt.capture(step, torch.nn.ReLU(), torch.ones(3)).graph_module
    >>> graphopt.rewrite(gm, lambda x: x.relu().relu(), lambda x: x.relu())
    1
    """
    rule = Rule(pattern, replacement, tuple(gradients), dict(examples or {}))
    found = list(exchanges(gm.graph, rule, where))
    renamed: dict[fx.Node, fx.Node] = {}
    for exchange in found:
        _exchange(gm.graph, exchange, renamed, rule, tolerance)
    return len(found)


def _exchange(
    graph: fx.Graph,
    exchange: Exchange,
    renamed: dict[fx.Node, fx.Node],
    rule: Rule,
    tolerance: float | None,
) -> None:
    match, new = exchange.match, exchange.new
    tensors = {n: v for n, v in match.inputs.items() if isinstance(v, fx.Node)}
    inputs = {name: renamed.get(node, node) for name, node in tensors.items()}
    incoming = [renamed.get(node, node) for node in match.incoming]
    made: dict[fx.Node, fx.Node] = {new.inputs[name]: inputs[name] for name in new.inputs}
    made.update(zip(new.incoming, incoming, strict=True))
    _insert(graph, exchange, made)
    outputs = []
    for was, node in zip(match.outputs, new.outputs, strict=True):
        output = _with_layout_of(graph, was, made[node])
        was.replace_all_uses_with(output)
        renamed[was] = output
        outputs.append(output)
    for node in reversed(match.nodes):
        if not node.users:
            graph.erase_node(node)
    names = [*tensors, *(f"gradient of result {i}" for i in range(len(incoming)))]
    note_place(
        graph,
        RewrittenPlace(
            rule.name,
            (*inputs.values(), *incoming),
            tuple(names),
            match.outputs,
            tuple(outputs),
            tuple(names_of(rule, match)),
            tolerance,
        ),
    )


def _insert(graph: fx.Graph, exchange: Exchange, made: dict[fx.Node, fx.Node]) -> None:
    """Inserts the replacement's calls; `made` maps its placeholders, and gets its calls."""
    match, new = exchange.match, exchange.new
    forward = needed_for(new.results, new.calls)
    for node in new.calls:
        assert callable(node.target)
        place = min(match.results if node in forward else match.gradients)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
        with graph.inserting_before(place):
            made[node] = call_function_with_meta(
                graph, node.target, tuple(args), dict(kwargs), like=place
            )


def _with_layout_of(graph: fx.Graph, was: fx.Node, now: fx.Node) -> fx.Node:
    """Converts a value to the memory layout of another."""
    held, other = fake_value(was), fake_value(now)
    if held.stride() == other.stride():
        return now
    with graph.inserting_before(was):
        if held.is_contiguous():
            kwargs = {"memory_format": torch.contiguous_format}
            return call_function_with_meta(graph, aten.clone.default, (now,), kwargs, like=was)
        sizes = list(held.shape), list(held.stride())
        place = call_function_with_meta(
            graph, aten.new_empty_strided.default, (now, *sizes), like=was
        )
        return call_function_with_meta(graph, aten.copy.default, (place, now), like=was)
