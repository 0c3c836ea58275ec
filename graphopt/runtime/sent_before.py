"""What the collectives of a call have given, for another graph that goes on with the same call.

Where one rank alone finds out that another graph holds for a call, it has sent what all ranks were
waiting for, and the others have gone on. The other graph begins from the beginning, and has the
same collectives in the same order: it takes what those before have given, and launches the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphopt import _compat


class CollectiveResults(_compat.TorchDispatchMode):
    """While active, notes what collectives give.

    Args:
        known: what the first of them have given already, which are not launched.
    """

    def __init__(self, known: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: list[torch.Tensor | None] = list(known)
        self._replayed = len(known)
        self._launched = 0
        self._pending: dict[int, tuple[int, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "_c10d_functional":
            return func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return self._waited(func, args[0])
        number, self._launched = self._launched, self._launched + 1
        if number < self._replayed:
            return self._given(number, func, args[0])
        result = func(*args, **kwargs)
        self._results.append(None)
        self._pending[id(result)] = number, result
        return result

    def _waited(self, func: Any, launched: torch.Tensor) -> Any:
        result = func(launched)
        if id(launched) in self._pending:
            number, _ = self._pending.pop(id(launched))
            self._results[number] = result.clone()
        return result

    def _given(self, number: int, func: Any, sent: torch.Tensor) -> torch.Tensor:
        known = self._results[number]
        assert known is not None
        written = _compat.schema_of(func).arguments[0].alias_info
        if written is not None and written.is_write:
            return sent.copy_(known)
        return known.clone()

    def results(self) -> list[torch.Tensor]:
        """What all collectives that were launched have given, in order."""
        for launched in [launched for _, launched in self._pending.values()]:
            torch.ops._c10d_functional.wait_tensor(launched)
        for number, launched in self._pending.values():
            self._results[number] = launched
        self._pending = {}
        return [result for result in self._results if result is not None]
