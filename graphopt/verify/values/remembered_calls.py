"""A memory of evaluated calls, so that the same call with the same arguments is not evaluated
twice.

A pass leaves most of a graph untouched, and derived graphs have copies of its nodes. Recognizing an
evaluated call is many times cheaper than evaluating it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt.ir.metadata import known_value

Same = Callable[[fx.Node, Any], bool]
"""(node, recorded argument) -> True if the node stands for that argument."""

_FEW = 3
"""The number of remembered calls per name: a step's, and those of its late work in flight."""


class RecalledCall(NamedTuple):
    """An evaluated call whose value depends only on its target, arguments and layout.

    Attributes:
        fake: the metadata of the node, which gives the value its layout.
        args, kwargs: the arguments, with values in place of nodes.
        based: True if the value shares the storage of the first argument.
        raises: a key of the error that the call may raise, or None.
    """

    target: Any
    fake: Any
    args: Any
    kwargs: Any
    value: Any
    based: bool
    raises: Any = None


class CallMemory:
    """Evaluated calls by node name, which copies of a graph share.

    Attributes:
        by_name: node name -> calls of nodes with that name, which may otherwise differ.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, list[RecalledCall]] = {}

    def find(
        self, node: fx.Node, current: Mapping[fx.Node, Any], gives: Same
    ) -> RecalledCall | None:
        """Returns the remembered call with the node's target and arguments, or None.

        Args:
            current: the values of nodes; for others, `gives` decides.
            gives: (node, value) -> True if the node has that value.
        """
        target, fake = node.target, known_value(node)
        args, kwargs = node.args, node.kwargs
        for call in self.by_name[node.name]:
            if call.target is not target or call.fake is not fake or len(call.args) != len(args):
                continue
            if (kwargs or call.kwargs) and not same_arguments(kwargs, call.kwargs, gives):
                continue
            if _are_given(args, call.args, current, gives):
                return call
        return None

    def note(
        self, node: fx.Node, args: Any, kwargs: Any, value: Any, *, based: bool, raises: Any = None
    ) -> None:
        """Remembers a call."""
        calls = self.by_name.setdefault(node.name, [])
        fake = known_value(node)
        calls.insert(0, RecalledCall(node.target, fake, args, kwargs, value, based, raises))
        del calls[_FEW:]


def _are_given(
    args: Sequence[Any], known: Sequence[Any], current: Mapping[fx.Node, Any], gives: Same
) -> bool:
    for given, was in zip(args, known, strict=True):
        if isinstance(given, fx.Node):
            if was is not None and current.get(given) is was:
                continue
            if not gives(given, was):
                return False
        elif given is not was and not same_arguments(given, was, gives):
            return False
    return True


def same_arguments(given: Any, known: Any, same: Same) -> bool:
    """True if the arguments of two calls are equal: nodes by `same`, constants as in
    `same_constant`."""
    if isinstance(given, fx.Node):
        return same(given, known)
    if isinstance(given, (list, tuple)):
        if not isinstance(known, (list, tuple)) or len(given) != len(known):
            return False
        if set(map(type, given)) == {int}:  # sizes
            return set(map(type, known)) == {int} and tuple(given) == tuple(known)
        return all(same_arguments(a, b, same) for a, b in zip(given, known, strict=True))
    if isinstance(given, dict):
        if not isinstance(known, dict) or given.keys() != known.keys():
            return False
        return all(same_arguments(value, known[name], same) for name, value in given.items())
    if isinstance(given, slice):
        return isinstance(known, slice) and same_arguments(_ends(given), _ends(known), same)
    return same_constant(given, known)


def _ends(value: slice) -> tuple[Any, ...]:
    return value.start, value.stop, value.step


def same_constant(given: Any, known: Any) -> bool:
    """True if two arguments other than nodes and tensors have the same type and value; 0.0 and -0.0
    differ."""
    if given is known:
        return True
    if type(given) is not type(known) or isinstance(given, (torch.Tensor, torch.SymInt)):
        return False  # to compare symbolic numbers would decide something
    return bool(given == known) and (type(given) is not float or given.hex() == known.hex())
