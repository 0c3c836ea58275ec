"""Calls of ATen's fused optimizers inside compiled code.

One kernel of ATen's reads and writes everything of a parameter once, and what Inductor makes of the
same formulas is not faster. So compiled code calls it, among the operators that compute gradients:
the memory of a gradient is free again for the next one.

Fused optimizers take Python floats, which compiled code does not have: it passes them as tensors to
`graphopt::fused_update`, whose `call` says where each argument goes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.entries import list_call
from graphopt.ir.families import FUSED_OPTIMIZERS
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument, fused_optimizer, is_copy
from graphopt.lowering.number_arguments import GraphNumber

_library = torch.library.Library("graphopt", "FRAGMENT")
_library.define(
    "fused_update(str operator, Tensor(a!)[] written, Tensor[] read, Tensor[] numbers, str call)"
    " -> ()"
)


def _fused_update(
    operator: str,
    written: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
    numbers: Sequence[torch.Tensor],
    call: str,
) -> None:
    _function(operator, call)(written, read, [number.item() for number in numbers])


_library.impl("fused_update", _fused_update, "CPU")
torch.library.register_fake("graphopt::fused_update", lambda *args: None, lib=_library)

FUSED_UPDATE: _compat.OpOverload = torch.ops.graphopt.fused_update.default


@lru_cache(maxsize=1024)
def _function(operator: str, call: str) -> Callable[..., None]:
    """The function of three tensor lists that runs the optimizer call of `fused_update`."""
    args, kwargs = ast.literal_eval(call)
    given = [_source(value) for value in args]
    given += [f"{key}={_source(value)}" for key, value in kwargs.items()]
    name, _, overload = operator.partition(".")
    kernel = getattr(getattr(torch.ops.aten, name), overload)
    text = f"lambda written, read, numbers: kernel({', '.join(given)})"
    return eval(text, {"kernel": kernel})  # type: ignore[no-any-return]


def _source(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[0]}[{value[1]}]"
    return f"[{', '.join(map(_source, value))}]" if isinstance(value, list) else repr(value)


def reason_to_keep_update(node: fx.Node) -> str | None:
    """Returns why compiled code cannot call a fused optimizer, or None if it can."""
    if argument(node, "grad_scale") is not None:
        return "it unscales gradients in place"
    for source in node.all_input_nodes:
        value = known_value(source)
        if isinstance(value, torch.SymFloat):
            continue
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return "it takes something else than tensors and numbers"
        if value.device.type != "cpu":
            return "ATen has one kernel for all updates"
        if value.is_neg() or value.is_complex():
            return "a tensor is complex or has its negative bit set"
    return None


def gradients(node: fx.Node) -> list[fx.Node]:
    """The gradients that a fused optimizer reads."""
    return list(node.args[1])  # type: ignore[arg-type]


def stored_by(node: fx.Node) -> dict[fx.Node, fx.Node]:
    """The `copy_` nodes that store a fused optimizer's results, by the tensor that they update."""
    call = list_call(node)
    assert call is not None
    found: dict[fx.Node, fx.Node] = {}
    for position, sources in call.lists.items():  # its results stand at the same position
        for item, picked in call.results(position).items():
            for copy in (user for result in picked for user in result.users if is_copy(user)):
                if copy.args[0] is sources[item]:
                    found[sources[item]] = copy
    return found


def updated(node: fx.Node) -> list[fx.Node]:
    """The tensors that the in-place form of a fused optimizer writes."""
    name = fused_optimizer(node.target)
    assert name is not None
    found: list[fx.Node] = []
    for position in FUSED_OPTIMIZERS[name]:
        found += node.args[position]  # type: ignore[arg-type]
    return found


def call_update(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Runs a fused optimizer in place while a region is traced.

    Returns:
        What its functional form returns: the lists that it has updated, and the gradients.
    """
    name = fused_optimizer(target)
    assert name is not None
    lists: dict[str, list[torch.Tensor]] = {"written": [], "read": [], "numbers": []}

    def noted(value: Any, kind: str) -> Any:
        if isinstance(value, (list, tuple)):
            return [noted(entry, kind) for entry in value]
        if isinstance(value, GraphNumber):
            kind, value = "numbers", value.like(torch.float64)
        if not isinstance(value, torch.Tensor):
            return value
        lists[kind].append(value)
        return kind, len(lists[kind]) - 1

    taken = tuple(
        noted(value, "written" if position in FUSED_OPTIMIZERS[name] else "read")
        for position, value in enumerate(args)
    )
    named = {key: noted(value, "read") for key, value in kwargs.items()}
    FUSED_UPDATE(f"{name}_.{_compat.overload_name(target)}", *lists.values(), repr((taken, named)))
    return tuple(args[: max(FUSED_OPTIMIZERS[name]) + 1])
