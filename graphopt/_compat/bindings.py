"""Direct calls of torch's Python bindings in generated graph code, faster than operator calls.

    torch.ops.aten.mm.default(a, b)     2.5 µs   parses a schema, boxes every argument
    torch.mm(a, b)                      1.5 µs   generated code

A function takes the place of an operator only where torch is seen to dispatch the very operator
with the very arguments, for arguments of these kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.fx.graph import CodeGen, PythonCode
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt._compat.gloo_gathers import LAUNCHES
from graphopt._compat.trees import tree_leaves, tree_map

_FUNCTIONS: tuple[Any, ...] = (
    torch._C._VariableFunctions,
    torch._C._nn,
    torch._C._linalg,  # type: ignore[attr-defined]
    torch._C._special,  # type: ignore[attr-defined]
    torch._C._fft,  # type: ignore[attr-defined]
)
_METHODS: Any = torch._C.TensorBase
_CALL = re.compile(r"^    (\w+) = torch\.ops\.[\w.]+\(")

Kind = tuple[Any, ...]
"""What the overload of a function depends on: of a tensor its dtype and number of dimensions, of
other arguments their type, and their value where there are few."""


class DirectCalls(CodeGen):
    """A code generator that calls torch functions instead of operators where they are
    equivalent."""

    def _gen_python_code(self, nodes: Any, *args: Any, **kwargs: Any) -> PythonCode:
        code = super()._gen_python_code(nodes, *args, **kwargs)
        by_name = {node.name: node for node in nodes}
        names: dict[Any, str] = {}
        lines = code.src.split("\n")
        for index, line in enumerate(lines):
            found = _CALL.match(line)
            node = by_name.get(found[1]) if found else None
            if found is None or node is None or not is_operator_overload(node.target):
                continue
            function = direct_call(node)
            name = names.setdefault(function, f"_direct_{len(names)}")
            lines[index] = f"    {found[1]} = {name}({line[found.end() :]}"
        code.src = "\n".join(lines)
        code.globals.update({name: function for function, name in names.items()})
        return code


def is_operator_overload(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    """True if a target is an operator overload that needs no special treatment."""
    return type(target) is torch._ops.OpOverload


def direct_call(node: fx.Node) -> Callable[..., Any]:
    """The function that computes a node's operator, with the same arguments."""
    target: Any = node.target
    if target in LAUNCHES:
        return LAUNCHES[target]
    if target.namespace == "aten" and _may_be_bound(node):
        args = tuple(_kind(arg) for arg in node.args)
        kwargs = tuple((name, _kind(arg)) for name, arg in sorted(node.kwargs.items()))
        result = _kind_of_result(node.meta.get("val"))
        if None not in (*args, *(kind for _, kind in kwargs), result):
            return _bound(target, args, kwargs, result)
    return _unbound(target)


def _unbound(target: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = target._op
    return function


def _may_be_bound(node: fx.Node) -> bool:
    """True if a torch function may replace an operator. Factory functions obey the default
    device, which operators do not, and functions return tuples instead of lists."""
    if not node.args or not _is_tensor_or_list(node.args[0]):
        return False
    value = node.meta.get("val")
    return not isinstance(value, (list, tuple)) or all(map(_takes_item, node.users))


def _is_tensor_or_list(arg: Any) -> bool:
    first = arg[0] if isinstance(arg, (list, tuple)) and arg else arg
    return isinstance(first, fx.Node) and isinstance(first.meta.get("val"), torch.Tensor)


def _takes_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _kind(arg: Any) -> Kind | None:
    """The kind of a node's argument, or None if it is unknown."""
    return _kind_of_value(arg.meta.get("val") if isinstance(arg, fx.Node) else arg)


def _kind_of_value(value: Any) -> Kind | None:
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not value.is_quantized
        return ("tensor", value.dtype, value.dim()) if plain else None
    if isinstance(value, (list, tuple)):
        kinds = [_kind_of_value(v.meta.get("val") if isinstance(v, fx.Node) else v) for v in value]
        # How often a kind is repeated tells functions nothing.
        return None if None in kinds else ("list", tuple(dict.fromkeys(kinds)))
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return ("number", 1)
    if isinstance(value, (float, torch.SymFloat)):
        return ("number", 0.5)
    if isinstance(value, torch.device):
        return ("device",)
    known = (bool, str, torch.dtype, torch.layout, torch.memory_format)
    return ("value", value) if value is None or isinstance(value, known) else None


def _kind_of_result(value: Any) -> Kind | None:
    """The kind of a result, as `_kind_of_value`, with the number of its tensors."""
    if not isinstance(value, (list, tuple)):
        return _kind_of_value(value)
    kinds = [_kind_of_value(each) for each in value]
    return None if None in kinds else ("list", tuple(kinds))


def _sample(kind: Kind) -> Any:
    """An example value for an argument of a kind."""
    if kind[0] == "tensor":
        return torch.empty((1,) * kind[2], dtype=kind[1], device="meta")
    if kind[0] == "list":
        return [_sample(each) for each in kind[1]]
    return torch.device("meta") if kind[0] == "device" else kind[1]


@cache
def _bound(
    target: Any, args: tuple[Kind, ...], kwargs: tuple[tuple[str, Kind], ...], result: Kind
) -> Callable[..., Any]:
    """The torch function to call in place of an operator, for arguments of these kinds."""
    given = tuple(map(_sample, args)), {name: _sample(kind) for name, kind in kwargs}
    expected = _dispatched(target, given, result)
    if expected is None:
        return _unbound(target)
    for function in _candidates(target):
        seen = _dispatched(function, given, result)
        if seen is not None and _is_same(seen, expected):
            return function
    return _unbound(target)


def _candidates(target: Any) -> Iterator[Callable[..., Any]]:
    name = target._schema.name.removeprefix("aten::")
    homes = (_METHODS, *_FUNCTIONS) if name.endswith("_") else (*_FUNCTIONS, _METHODS)
    yield from (getattr(home, name) for home in homes if hasattr(home, name))
    if name == "_local_scalar_dense":
        yield _METHODS.item


_Call = tuple[Any, Sequence[Any], dict[str, Any]]


class _DispatchRecorder(TorchDispatchMode):
    """A dispatch mode that records operators without running them."""

    def __init__(self, result: Kind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result = result
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        if not func._schema.returns:
            return None
        if func._schema.name.endswith("_") and isinstance(args[0], torch.Tensor):
            return args[0]
        return _sample(self.result)


def _dispatched(function: Any, given: Any, result: Kind) -> _Call | None:
    """The operator that a torch function dispatches, or None unless it is exactly one."""
    args, kwargs = given
    seen = _DispatchRecorder(result)
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad(), seen:
            function(*args, **kwargs)
    except Exception:  # some operators look at what they are given before they are dispatched
        return None
    return seen.calls[0] if len(seen.calls) == 1 else None


def _is_same(one: _Call, other: _Call) -> bool:
    """True if two calls are equal apart from options of new tensors that one call leaves to
    defaults."""
    if one[0] is not other[0]:
        return False
    more = {name: one[2][name] for name in one[2].keys() - other[2].keys()}
    if more and not _are_of_first(other, more):
        return False
    return _described(one[1], one[2]) == _described(other[1], {**more, **other[2]})


def _are_of_first(call: _Call, options: dict[str, Any]) -> bool:
    """True if a new tensor would get these options anyway, from the tensor that it is modelled
    on."""
    name = call[0]._schema.name.removeprefix("aten::")
    if not name.startswith("new_") and not name.endswith("_like"):
        return False
    held = {n: getattr(call[1][0], n) for n in ("dtype", "layout", "device")} | {
        "pin_memory": False
    }
    return all(name in held and value == held[name] for name, value in options.items())


def _described(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call in comparable form; tensors are compared by identity."""
    leaves, shape = [sorted(kwargs)], []  # type: list[Any], list[str]
    for each in (*args, *(kwargs[name] for name in sorted(kwargs))):
        leaves += [
            id(v) if isinstance(v, torch.Tensor) else (type(v), v) for v in tree_leaves(each)
        ]
        shape.append(str(tree_map(lambda _: None, each)))
    return [leaves, shape]
