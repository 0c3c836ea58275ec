"""Facts about the targets of calls, such as effects and rules, computed once for each target."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from graphopt import _compat
from graphopt.ir.families import COLLECTIVE_NAMESPACE, MAY_RAISE
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import is_operator
from graphopt.verify.symbolic.functional import is_standard, standard_form
from graphopt.verify.values.axioms import RULES, Axiom
from graphopt.verify.values.call_terms import target_name

OF_STORAGE = ("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter")
"""Operators that read elements of a storage beyond those of their argument."""

NAMESPACES = ("aten", "prims", "prim", COLLECTIVE_NAMESPACE, "graphopt", "graphopt_shards")
"""The namespaces that `MAY_RAISE` covers; operators of any other may raise at any time."""


class Callee(NamedTuple):
    """Facts about one target of calls.

    Attributes:
        target: the target; a reference keeps its identity valid.
        standard: the representative of all operators that compute the same.
        name: the name of `standard`, as keys have it.
        rule: the axiom for its elements, or None.
        reads_storage: it reads elements of a storage beyond those of its argument.
        writes_unseen: it updates arguments that its schema does not declare as written.
        may_raise: it raises for some argument values, or that is unknown.
        impure: True if it has side effects; None if that depends on its arguments.
        itself: what is known of calls to which `standard` would give other bits, as some do to
            tensors that are not contiguous; None where there are none.
    """

    target: Any
    standard: Any
    name: str
    rule: Axiom | None
    reads_storage: bool
    writes_unseen: bool
    may_raise: bool
    impure: bool | None
    itself: Callee | None = None

    def does_more(self, node: fx.Node) -> bool:
        """True if a call of this target has an effect besides its result."""
        return node.is_impure() if self.impure is None else self.impure


class Callees:
    """A table of facts by the identity of targets, since hashing an operator runs Python code."""

    def __init__(self) -> None:
        self._found: dict[int, Callee] = {}

    def of(self, node: fx.Node, target: Any) -> Callee:
        """Returns the facts about the target of a node, computed at its first use.

        Args:
            node: one that calls it, or its form that works in place.
        """
        found = self._found.get(id(target))
        if found is None:
            found = self._found[id(target)] = _callee(node, target)
        if found.itself is None or is_standard(target, known_value(node)):
            return found
        return found.itself


def _callee(node: fx.Node, target: Any) -> Callee:
    standard = standard_form(target)
    itself = None if standard is target else _callee_of(node, target, target)
    return _callee_of(node, target, standard)._replace(itself=itself)


def _callee_of(node: fx.Node, target: Any, standard: Any) -> Callee:
    is_aten = isinstance(standard, _compat.OpOverload)
    return Callee(
        target,
        standard,
        target_name(standard),
        RULES.get(_compat.operator_name(standard)) if is_aten else None,
        is_operator(standard, *OF_STORAGE),
        str(target).endswith("_mutation"),
        _may_raise(standard),
        node.is_impure() if is_aten and node.target is target else None,
    )


def _may_raise(target: Any) -> bool:
    if not isinstance(target, _compat.OpOverload):
        return False
    schema = _compat.schema_of(target)
    name, known = schema.name, target.namespace in NAMESPACES
    return not known or name in MAY_RAISE or f"{name}.{schema.overload_name}" in MAY_RAISE
