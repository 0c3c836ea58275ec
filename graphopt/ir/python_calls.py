"""Memory effects of torch's functions, methods and modules, which are above operators.

Names say what is written and viewed there. Which functions are random is not known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx, nn

from graphopt import _compat
from graphopt.ir import views
from graphopt.ir.operators import written

_VIEWS = frozenset(
    {
        *("adjoint", "as_strided", "bfloat16", "broadcast_to", "chunk", "contiguous", "detach"),
        *("diagonal", "double", "dropout", "dsplit", "expand", "expand_as", "flatten", "float"),
        *("half", "hsplit", "imag", "moveaxis", "movedim", "narrow", "permute", "ravel", "real"),
        *("reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes"),
        *("swapdims", "t", "tensor_split", "to", "transpose", "type_as", "unbind", "unflatten"),
        *("unfold", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "vsplit"),
    }
)
"""Functions and methods of torch whose result may share storage with their first argument."""

_VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout)

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"),
        *("irshift", "isub", "itruediv", "ixor", "setitem"),
    )
)


class PythonCalls:
    """The effects of calls other than operators; see `graphopt.ir.effects.CallEffects`.

    Args:
        find: the module that a node calls.
    """

    def __init__(self, find: Callable[[fx.Node], Any]) -> None:
        self._find = find

    def shared_with(self, node: fx.Node) -> Iterable[fx.Node]:
        """Returns the nodes whose memory the value of `node` may share."""
        if isinstance(node.target, _compat.OpOverload) or node.target is operator.getitem:
            return views.shared_with(node)
        found = self.written(node)
        if self._may_view(node):
            found += node.all_input_nodes[:1]
        return found

    def written(self, node: fx.Node) -> list[fx.Node]:
        """Returns the arguments that `node` updates in place."""
        if isinstance(node.target, _compat.OpOverload):
            return written(node)
        found: list[Any] = [node.kwargs.get("out"), *written(node)]
        if node.args and self._updates_first(node):
            found.append(node.args[0])
        return [value for value in found if isinstance(value, fx.Node)]

    def _may_view(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self._find(node), _VIEW_MODULES)
        if node.target is getattr:
            return node.args[1] in _VIEW_ATTRIBUTES
        return _name_of(node) in _VIEWS

    def _updates_first(self, node: fx.Node) -> bool:
        if node.kwargs.get("inplace") is True:
            return True
        if node.op == "call_module":
            module = self._find(node)
            return getattr(module, "inplace", False) is True
        if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
            return node.target in _IN_PLACE_OPERATORS
        name = _name_of(node)
        return name.endswith("_") and not name.endswith("__")


def _name_of(node: fx.Node) -> str:
    if node.op == "call_function":
        return getattr(node.target, "__name__", "")
    return str(node.target) if node.op == "call_method" else ""
