"""Results of functional collectives, computed from the values of all ranks in one process.

    rank 0: all_reduce(1, "sum")  ─┐          ┌─ 3
                                   ├─ exchange ┤
    rank 1: all_reduce(2, "sum")  ─┘          └─ 3

Sums run in rank order in the tensors' own dtype, so that the bits do not depend on how tensors are
put into buckets. A ring of three ranks or more adds in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CollectiveError
from graphopt.graph_utils import COLLECTIVE_NAMESPACE

Call = Mapping[str, Any]
"""Arguments of one rank's call, by the names of the operator's schema."""


def exchange(target: _compat.OpOverload, calls: Sequence[Call]) -> list[Any]:
    """Computes the result of a collective for each rank of a group.

    Args:
        target: the operator that all ranks call.
        calls: the arguments of each rank, in rank order.

    Returns:
        The result of each rank: tensors of their own; of variants in place, the tensor written.

    Raises:
        CollectiveError: the ranks send different shapes or dtypes, or the operator is not known.
    """
    name = _compat.operator_name(target).removeprefix(f"{COLLECTIVE_NAMESPACE}::")
    kind = name.removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
    if kind not in _KINDS:
        raise CollectiveError(f"{name} cannot be replayed for several ranks in one process")
    results = _of_lists(_KINDS[kind], name, calls) if "_coalesced" in name else None
    if results is None:
        _check_same(name, calls)
        results = _KINDS[kind](calls)
    if name.endswith(("_", "_out")):
        return [_written(call, result) for call, result in zip(calls, results, strict=True)]
    return results


def sent(call: Call) -> Any:
    """The tensor, or list of tensors, that one rank sends: the first argument of all operators."""
    return next(iter(call.values()))


def _of_lists(
    kind: Callable[[Sequence[Call]], list[Any]], name: str, calls: Sequence[Call]
) -> list[Any]:
    """The results of a collective on lists: that of single tensors, for each of them."""
    singles = []
    for index in range(len(sent(calls[0]))):
        single = [{**call, "inputs": call["inputs"][index]} for call in calls]
        _check_same(name, single)
        singles.append(kind(single))
    return [list(results) for results in zip(*singles, strict=True)]


def _check_same(name: str, calls: Sequence[Call]) -> None:
    kinds = [(tuple(sent(call).shape), sent(call).dtype) for call in calls]
    for rank, found in enumerate(kinds):
        if found != kinds[0]:
            raise CollectiveError(
                f"{name}: rank {rank} sends {found[1]} of shape {list(found[0])}, rank 0"
                f" {kinds[0][1]} of shape {list(kinds[0][0])}"
            )
    size = calls[0].get("group_size", len(calls))
    if size != len(calls):
        raise CollectiveError(f"{name} has group_size={size}, but its group has {len(calls)} ranks")


def _written(call: Call, result: Any) -> Any:
    """Writes the result of an in-place collective into its argument."""
    destination = call.get("out", sent(call))
    if isinstance(destination, (list, tuple)):
        return [old.copy_(new) for old, new in zip(destination, result, strict=True)]
    return destination.copy_(result)


def _all_reduce(calls: Sequence[Call]) -> list[Any]:
    total = _reduced(calls)
    return [total.clone() for _ in calls]


def _broadcast(calls: Sequence[Call]) -> list[Any]:
    root = sent(calls[calls[0]["src"]])
    return [root.clone() for _ in calls]


def _all_gather(calls: Sequence[Call]) -> list[Any]:
    return [torch.cat([sent(call) for call in calls]) for _ in calls]


def _reduce_scatter(calls: Sequence[Call]) -> list[Any]:
    return [part.clone() for part in _reduced(calls).chunk(len(calls))]


def _all_to_all(calls: Sequence[Call]) -> list[Any]:
    parts = [sent(call).split(list(call["input_split_sizes"])) for call in calls]
    return [torch.cat([theirs[rank] for theirs in parts]) for rank in range(len(calls))]


_KINDS: Mapping[str, Callable[[Sequence[Call]], list[Any]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}

_OPERATIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _reduced(calls: Sequence[Call]) -> torch.Tensor:
    operation = str(calls[0]["reduce_op"]).lower()
    if operation not in _OPERATIONS:
        raise CollectiveError(
            f"there is no reduction {operation!r}: one of {', '.join(_OPERATIONS)}"
        )
    total: torch.Tensor = sent(calls[0])
    for call in calls[1:]:
        total = _OPERATIONS[operation](total, sent(call))
    return torch.div(total, len(calls)).to(total.dtype) if operation == "avg" else total
