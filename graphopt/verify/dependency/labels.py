"""Labels: the set of collectives that a value passes through between two nodes."""

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


class CollectiveLabels:
    """Numbers for collective signatures and for sets of them (*labels*). 0 is the empty set.

    One instance serves all flows that are compared.

    Args:
        kinds: whether collectives of other kinds are told apart; otherwise those of a group are
            one.
    """

    def __init__(self, *, kinds: bool = True) -> None:
        self._kinds = kinds
        self._signatures: list[Signature] = []
        self._numbers: dict[Signature, int] = {}
        self._sets: list[frozenset[int]] = [frozenset()]
        self._labels: dict[frozenset[int], int] = {frozenset(): 0}

    def number(self, signature: Signature) -> int:
        """Returns the number of a signature; equal signatures have one number."""
        if not self._kinds:
            signature = ("a collective", signature[-1])
        if signature not in self._numbers:
            self._numbers[signature] = len(self._signatures)
            self._signatures.append(signature)
        return self._numbers[signature]

    def through(self, label: int, number: int) -> int:
        """Returns `label` with collective `number` added."""
        found = self._sets[label] | {number}
        if found not in self._labels:
            self._labels[found] = len(self._sets)
            self._sets.append(found)
        return self._labels[found]

    def including(self, label: int) -> list[int]:
        """Returns the labels that are supersets of `label`."""
        wanted = self._sets[label]
        return [other for other, found in enumerate(self._sets) if wanted <= found]

    def text(self, label: int) -> str:
        """Formats the collectives of a label; empty if there are none."""
        return " and ".join(signature_text(self._signatures[n]) for n in sorted(self._sets[label]))
