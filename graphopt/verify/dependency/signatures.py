"""The signatures of collectives: what two of them must have in common to be of one kind."""

from __future__ import annotations

from typing import Any

from torch import fx

from graphopt.graph_utils import tensors_in
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import operator_of

Signature = tuple[str, ...]
"""A collective without its tensors: kind, reduction or source rank, and group."""


def signature_of(launch: fx.Node) -> Signature:
    """Returns the signature of a collective, such as ``("all_reduce", "sum", "0")``. Variants of
    one collective share it."""
    settings = [a for a in launch.args[1:] if isinstance(a, (str, int))]
    return (operator_of(launch).reduction, *(str(setting) for setting in settings))


def as_reduced(signature: Signature) -> Signature:
    """Returns the signature of the `all_reduce` of which a reduce-scatter is a part."""
    if signature[0] != "reduce_scatter_tensor":
        return signature
    _, reduction, _, group = signature
    return "all_reduce", reduction, group


def signature_text(signature: Signature) -> str:
    """Formats a signature, such as ``all_reduce(sum, group 0)``."""
    name, *settings, group = signature
    return f"{name}({', '.join((*settings, f'group {group}'))})"


def sent_tensors(launch: fx.Node) -> list[Any]:
    """Returns the tensors that a collective sends."""
    first = launch.args[0]
    nodes = first if isinstance(first, (list, tuple)) else [first]
    values = [known_value(node) for node in nodes if isinstance(node, fx.Node)]
    return list(tensors_in(values))
