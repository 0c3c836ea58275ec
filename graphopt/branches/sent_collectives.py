"""Results of a call's collectives, reused by another graph that continues the call.

Where some ranks alone find out that another graph holds for a call, they have sent what all ranks
were waiting for, and the others have gone on. The other graph begins from the beginning, and has
the same collectives in the same order, in each group: it takes what those before have given, and
launches the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import SpmdMismatchError


@dataclass
class SentCollective:
    """A collective that was launched, and its result.

    Attributes:
        what: the operator, what it was given, and its options.
        given: what it has given, as far as that is there; several tensors where it takes several.
    """

    what: str
    given: list[torch.Tensor | None]


SentBefore = Mapping[str, Sequence[SentCollective]]
"""By the name of a group, what was launched in it, in order."""


class CollectiveResults(_compat.TorchDispatchMode):
    """While active, records the results of collectives.

    Args:
        known: what the first of them in each group have given already, which are not launched.
    """

    def __init__(self, known: SentBefore) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = {name: list(sent) for name, sent in known.items()}
        self._known = {name: iter(sent) for name, sent in known.items()}
        self._pending: dict[int, tuple[SentCollective, int, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "_c10d_functional":
            return func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return self._waited(func, args[0])
        what, name = _described(func, args), str(args[-1])
        known = next(self._known.get(name, iter(())), None)
        if known is not None:
            return _given(known, what, func, args[0])
        result = func(*args, **kwargs)
        leaves = _compat.tree_leaves(result)
        sent = SentCollective(what, [None] * len(leaves))
        self._launches.setdefault(name, []).append(sent)
        self._pending |= {id(leaf): (sent, i, leaf) for i, leaf in enumerate(leaves)}
        return result

    def _waited(self, func: Any, launched: torch.Tensor) -> Any:
        result = func(launched)
        if id(launched) in self._pending:
            sent, index, _ = self._pending.pop(id(launched))
            sent.given[index] = result.clone()
        return result

    def results(self, groups: Collection[str] | None = None) -> SentBefore:
        """The recorded results of all collectives, or of those in given groups."""
        for sent, index, launched in self._pending.values():
            sent.given[index] = torch.ops._c10d_functional.wait_tensor(launched)
        self._pending = {}
        return {n: sent for n, sent in self._launches.items() if groups is None or n in groups}


def _described(func: Any, args: Sequence[Any]) -> str:
    """A launch as the ranks compare it, whichever of its memory it returns."""
    tensors = (leaf for leaf in _compat.tree_leaves(args[0]) if isinstance(leaf, torch.Tensor))
    kinds = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors]
    return f"{func.name().rstrip('_')}({', '.join([*kinds, *map(str, args[1:])])})"


def _given(known: SentCollective, what: str, func: Any, sent: Any) -> Any:
    """The recorded result of a collective that was launched before."""
    if known.what != what:
        raise SpmdMismatchError(
            "the branch that a decision by value leads to launches other collectives before it than"
            f" the one that was tried first:\n  launched:  {known.what}\n  now:  {what}\n"
            "  hint:  let all ranks launch the same collectives, whatever they decide"
        )
    found = [tensor for tensor in known.given if tensor is not None]
    written = _compat.schema_of(func).arguments[0].alias_info
    if written is not None and written.is_write:
        for destination, value in zip(_compat.tree_leaves(sent), found, strict=True):
            destination.copy_(value)
        return sent
    copies = [value.clone() for value in found]
    return copies if isinstance(sent, (list, tuple)) else copies[0]
