"""Gradients that a step drops before it computes any, as one does that begins with `zero_grad`.

    optimizer.zero_grad(); loss.backward(); optimizer.step()

The first call finds no gradients, and each later one those of the call before, which it drops
unread. So one trace is that of both: the later call has inputs besides, of which nothing is made.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch

from graphopt import _compat
from graphopt.ir.metadata import set_value
from graphopt.tracing.inputs.entries import GradientInput, Inputs
from graphopt.tracing.trace import RawTrace


def with_dropped_gradients(
    first: RawTrace, inputs: Inputs, left: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[RawTrace, Inputs] | None:
    """The trace of a later call and its inputs, made of the first call's; None where the later call
    may not be the same.

    Args:
        left: tensors to which the first call gives their first gradient, each with its kind.
    """
    new = {id(tensor): like for tensor, like in left}
    tensors = {id(inputs.module_tensors[index].tensor) for index in first.dropped_gradients}
    if first.looks_at_gradients or not new.keys() <= tensors or first.signature.numbers_inputs():
        return None
    known = {id(gradient.owner): gradient for gradient in inputs.gradients}
    gradients = [
        known.get(id(entry)) or GradientInput(entry, f"{entry.fqn}.grad")
        for entry in inputs.module_tensors
        if id(entry) in known or id(entry.tensor) in new
    ]
    start = len(inputs.placeholders) + len(inputs.states)
    graph, fakes = first.graph_module.graph, list(first.fakes)
    for position, gradient in enumerate(gradients, start):
        if id(gradient.owner) in known:
            continue
        like = new[id(gradient.owner.tensor)]
        fake = _compat.fake_laid_out(like, like.shape, like.stride(), like.dtype)
        behind = next(islice(graph.nodes, position, None))  # inputs are the first nodes
        with graph.inserting_before(behind):
            set_value(graph.placeholder(f"gradient_{position}"), fake)
        fakes.insert(position, fake)
    first.graph_module.recompile()
    return replace(first, fakes=fakes), replace(inputs, gradients=gradients)
