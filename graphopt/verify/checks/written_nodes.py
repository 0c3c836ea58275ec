"""A check of the nodes that a pass wrote: known targets, no new updates, correct metadata."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import evaluate, is_list_operator, tensors_in, written
from graphopt.ir.entries import list_positions
from graphopt.ir.metadata import fake_value, has_value, known_value
from graphopt.ir.operators import operator_of
from graphopt.verify.checks.module_constants import attribute
from graphopt.verify.problems import Problem
from graphopt.verify.values.call_terms import named, parameters
from graphopt.verify.values.terms import Layout, layout_of

_OF_BUILTINS = "abs bool complex divmod float int len list max min pow round slice sum tuple"
_OF_OPERATOR_WITH_EFFECTS = (
    "call delitem setitem"
    " iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
)


def _of_numbers() -> Iterator[str]:
    names = (name for name in dir(torch) if name.startswith(("sym_", "_sym_")))
    return (name for name in names if "constrain" not in name)  # those raise


_PURE = {
    id(getattr(module, name))
    for module, names in (
        (builtins, _OF_BUILTINS.split()),
        (math, dir(math)),
        (operator, set(operator.__all__) - set(_OF_OPERATOR_WITH_EFFECTS.split())),
        (torch, _of_numbers()),
    )
    for name in names
}
"""Functions of Python and of torch (for numbers) without side effects."""
_HINT = "insert nodes with graphopt.graph_utils.call_function_with_meta"
_DATA_DEPENDENT = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


@dataclass(frozen=True)
class GivenArgument:
    """A former argument, recorded by its value instead of its node."""

    value: Any


Former = Callable[[fx.Node], Any]
"""node -> its former target, positional and keyword arguments, with former values in place of
nodes."""


class KindsOfResults:
    """A cache of the shapes, strides, dtypes and devices that calls of operators give."""

    def __init__(self) -> None:
        self._found: dict[Any, list[Layout]] = {}
        self._of_entries: dict[Any, dict[Any, list[Layout]]] = {}

    def of(self, node: fx.Node) -> list[Layout]:
        """Computes the metadata of a node's tensors by running its operator on fake tensors. Raises
        what the operator raises."""
        target, args, kwargs = node.target, node.args, node.kwargs
        if target is operator.getitem:
            return _kinds_given(target, args, kwargs, known_value(node))
        key = target, _lookup_key((args, kwargs))
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _kinds_given(target, args, kwargs, known_value(node))
        return found

    def of_entries(
        self, target: Any, shared: dict[str, Any], lists: dict[str, Sequence[Any]]
    ) -> Iterator[list[Layout]]:
        """Computes the metadata of one call for each entry of lists, up to the end of the shortest
        list. Raises what the operator raises.

        Args:
            shared: by name, the arguments that all calls have.
            lists: by name, one value for each call, of which it gets a list.
        """
        alike = target, tuple(lists), _lookup_key(shared)
        known = self._of_entries.setdefault(alike, {})
        for one in zip(*lists.values(), strict=False):
            key = _lookup_key(one)
            found = known.get(key)
            if found is None:
                alone = {name: [value] for name, value in zip(lists, one, strict=True)}
                found = known[key] = _kinds_given(target, (), {**shared, **alone}, None)
            yield found


def _lookup_key(value: Any) -> Any:
    """Returns `_kind_of` an argument, or an object equal to nothing if it cannot be hashed."""
    try:
        key = _kind_of(value)
        hash(key)
        return key
    except TypeError:
        return object()


def _kinds_given(target: Any, args: Any, kwargs: Any, like: Any) -> list[Layout]:
    """Runs an operator on fake tensors; `like` holds fake tensors whose mode factories use."""
    mode = _compat.fake_mode_of(list(tensors_in(like)))
    return _layouts(evaluate(target, args, kwargs, mode))


def _kind_of(value: Any) -> Any:
    """Returns everything about an argument that decides the metadata of a call's results.

    Raises:
        TypeError: it is symbolic: to compare that would decide something.
    """
    if isinstance(value, (fx.Node, GivenArgument)):
        return "node", _kind_of(fake_value(value) if isinstance(value, fx.Node) else value.value)
    if isinstance(value, torch.Tensor) and not _compat.has_symbolic_shape(value):
        return "tensor", layout_of(value)
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("a symbolic argument")
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind_of, value))
    if isinstance(value, dict):
        return tuple((name, _kind_of(entry)) for name, entry in value.items())
    return type(value), repr(value) if isinstance(value, float) else value


def changed_problems(
    new: Iterable[fx.Node],
    changed: Iterable[tuple[fx.Node, Any]],
    former: Former,
    *,
    functional: bool,
    kinds: KindsOfResults | None = None,
) -> Iterator[Problem]:
    """Yields problems with new or changed nodes, and with readers of values whose layout changed.

    Args:
        changed: changed nodes with their former `meta["val"]`.
        former: node -> its former target and arguments.
        functional: True if the graph is in the captured dialect, which updates by `copy_` only.
        kinds: the cache of result metadata.
    """
    kinds = KindsOfResults() if kinds is None else kinds
    looked_at: set[fx.Node] = set()
    for node in new:
        looked_at.add(node)
        yield from _of_target(node, functional)
        yield from _of_constant(node)
        yield from _of_value(node, None, former, kinds)
    changed = list(changed)
    for node, value in changed:
        looked_at.add(node)
        yield from _of_target(node, functional)
        yield from _of_input(node, value)
        yield from _of_value(node, value, former, kinds)
    for node, value in changed:
        if known_value(node) is not value and _layouts(known_value(node)) != _layouts(value):
            for reader in node.users.keys() - looked_at:
                looked_at.add(reader)
                yield from _of_value(reader, known_value(reader), former, kinds)


def _of_target(node: fx.Node, functional: bool) -> Iterator[Problem]:
    if node.op != "call_function":
        return
    if functional and written(node) and not operator_of(node).copies:
        yield Problem(
            f"it put in %{node.name}, which works in place: {node.target}",
            (node,),
            hint="use the functional operator and copy_ its result into the input that it updates;"
            " updates in place are made after all passes",
        )
    if not _is_known(node.target):
        yield Problem(
            "it put in a call of a Python function, of which nothing is known",
            (node,),
            hint="register it with torch.library.custom_op, or write it with overloads of ATen"
            " operators, such as torch.ops.aten.relu.default",
        )


def _is_known(target: Any) -> bool:
    """True if a target is a registered operator, a pure Python function, or one of ours."""
    if isinstance(target, (_compat.OpOverload, _compat.HigherOrderOperator)):
        return True
    if id(target) in _PURE:
        return True
    module = getattr(target, "__module__", None) or ""
    return module.startswith("graphopt") and "<" not in getattr(target, "__qualname__", "")


def _of_input(node: fx.Node, before: Any) -> Iterator[Problem]:
    """Yields a problem if a pass changed the metadata of an input or a constant."""
    if node.op not in ("placeholder", "get_attr"):
        return
    held, earlier = _layouts(known_value(node)), _layouts(before)
    if held != earlier:
        now, was = (", ".join(map(_text, found)) or "no tensor" for found in (held, earlier))
        yield Problem(f"meta['val'] says {now}, before it was {was}", (node,))


def _of_constant(node: fx.Node) -> Iterator[Problem]:
    found = attribute(node.graph.owning_module, node) if node.op == "get_attr" else None
    if isinstance(found, torch.Tensor):
        says, gives = _layouts(known_value(node)), [layout_of(found)]
        if says != gives:
            held = ", ".join(map(_text, says)) or "no tensor"
            yield Problem(
                f"meta['val'] says {held}, but the constant is {_text(gives[0])}", (node,)
            )


def _of_value(
    node: fx.Node, before: Any, former: Former, kinds: KindsOfResults
) -> Iterator[Problem]:
    if node.op != "call_function" or not has_value(node) or _has_no_rule(node):
        return
    if is_list_operator(node):
        yield from _of_entries(node, kinds)
        return
    if _is_an_item(node, fake_value(node)):
        return
    try:
        found = kinds.of(node)
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Problem(f"its arguments do not fit: {what}", (node,))
        return
    held = _layouts(fake_value(node))
    earlier = held if before is fake_value(node) else _layouts(before)
    if len(held) != len(found):
        count = f"{len(held)} tensor(s) where the node gives {len(found)}"
        yield Problem(f"meta['val'] holds {count}", (node,), hint=_HINT)
        return
    for index, (says, gives) in enumerate(zip(held, found, strict=True)):
        known = earlier[index] if len(earlier) == len(held) else None
        if says != gives and not (
            _differ_in_strides(says, gives, known) and _calls_alike(node, former)
        ):
            message = f"meta['val'] says {_text(says)}, but the node gives {_text(gives)}"
            yield Problem(message, (node,), hint=_HINT)
            return


def _of_entries(node: fx.Node, kinds: KindsOfResults) -> Iterator[Problem]:
    """Checks the metadata of a list operator's results. That of an entry does not depend on the
    others, so a list of a thousand tensors of three kinds takes three evaluations."""
    for index, (says, gives) in enumerate(_entries(node, kinds)):
        if _layouts(says) != gives:
            held, found = (", ".join(map(_text, row)) for row in (_layouts(says), gives))
            message = f"meta['val'] says {held} for entry {index}, but the node gives {found}"
            yield Problem(message, (node,), hint=_HINT)
            return


def _entries(node: fx.Node, kinds: KindsOfResults) -> Iterator[tuple[Any, list[Layout]]]:
    """Yields, for each entry of a functional list operator, the metadata as recorded and as
    computed. Ends where there is no metadata or no shape rule."""
    says = known_value(node)
    if not says:
        return
    given = fx.node.map_arg((node.args, node.kwargs), lambda n: _plain(fake_value(n)))
    arguments = named(node.target, *given)
    known = [name for name, _ in parameters(node.target)]
    values = {name: arguments[name] for name in map(known.__getitem__, list_positions(node.target))}
    lists: dict[str, Sequence[Any]] = {
        name: v for name, v in values.items() if isinstance(v, (list, tuple)) and len(v)
    }
    columns = says if isinstance(says[0], (list, tuple)) else [says]
    shared = {name: value for name, value in arguments.items() if name not in lists}
    rows = kinds.of_entries(node.target, shared, lists)
    for index in range(min(map(len, lists.values()), default=0)):
        try:
            gives = next(rows)
        except Exception:  # there is no rule, or none for such numbers
            return
        yield [tensor for column in columns for tensor in column[index : index + 1]], gives


def _plain(value: Any) -> Any:
    """Returns metadata with 1 in place of numbers that the graph computes."""
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return 1.0 if isinstance(value, torch.SymFloat) else 1
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def _is_an_item(node: fx.Node, value: Any) -> bool:
    """True if a node picks one of several results, and `value` is that very result."""
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    held = known_value(source) if isinstance(source, fx.Node) else None
    if not isinstance(held, (list, tuple)) or type(index) is not int:
        return False
    return -len(held) <= index < len(held) and held[index] is value


def _layouts(value: Any) -> list[Layout]:
    return [layout_of(tensor) for tensor in tensors_in(value)]


def _differ_in_strides(says: Layout, gives: Layout, known: Layout | None) -> bool:
    """True if recorded strides equal the former ones and only the shape rule gives others: the real
    kernel may differ from its rule."""
    shape, stride, dtype, device = says
    same = (shape, dtype, device) == (gives[0], gives[2], gives[3])
    return same and known is not None and stride == known[1]


def _calls_alike(node: fx.Node, former: Former) -> bool:
    """True if a node still calls the same target with arguments of the same kinds."""
    target, *given = former(node)
    try:
        same = _kind_of(tuple(given)) == _kind_of((node.args, node.kwargs))
        return target is node.target and bool(same)
    except TypeError:  # symbolic ones
        return False


def _has_no_rule(node: fx.Node) -> bool:
    """True if a node's metadata depends on data and cannot be recomputed."""
    target = node.target
    if not isinstance(target, _compat.OpOverload):
        return False
    return any(tag in target.tags for tag in _DATA_DEPENDENT)


def _text(layout: Layout) -> str:
    shape, stride, dtype, device = layout
    return (
        f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {list(stride)} on {device}"
    )
