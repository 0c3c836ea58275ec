"""Whether very many objects are still the same, in few steps of the interpreter.

Guards are asked before every call of a step. What says in detail how something has changed takes
microseconds for each module and parameter; this takes tens of nanoseconds for each object.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from graphopt import _compat
from graphopt.watching import unwatched

_kind = attrgetter("shape", "dtype", "device", "requires_grad")


class Snapshot:
    """Which objects dictionaries and lists contain, and what is known of tensors.

    Args:
        containers: dictionaries and lists, none of them watched. Kept alive with what is in them.
        tensors: of these shape, stride, dtype, device, `requires_grad` and gradient hooks count.
    """

    def __init__(
        self,
        containers: Iterable[dict[Any, Any] | list[Any]],
        tensors: Iterable[torch.Tensor] = (),
    ) -> None:
        self._tensors = list(tensors)
        self._hooks = list(chain.from_iterable(map(_compat.hook_tables, self._tensors)))
        known = [*containers, *(table for table in self._hooks if table is not None)]
        self._dicts = [each for each in known if isinstance(each, dict)]
        self._views = [dict.values(each) if isinstance(each, dict) else each for each in known]
        self._sizes = list(map(len, known))
        self._keys = list(chain.from_iterable(self._dicts))
        self._values = [unwatched(value) for value in chain.from_iterable(self._views)]
        self._kinds = list(map(_kind, self._tensors))
        self._strides = list(map(torch.Tensor.stride, self._tensors))

    def holds(self) -> bool:
        """Whether all is as it was: the same objects, under the same keys, in the same order."""
        return (
            list(map(len, self._views)) == self._sizes
            and all(map(is_, chain.from_iterable(self._dicts), self._keys))
            and (
                all(map(is_, chain.from_iterable(self._views), self._values))
                or all(map(is_, map(unwatched, chain.from_iterable(self._views)), self._values))
            )
            and list(map(_kind, self._tensors)) == self._kinds
            and list(map(torch.Tensor.stride, self._tensors)) == self._strides
            and all(
                map(is_, chain.from_iterable(map(_compat.hook_tables, self._tensors)), self._hooks)
            )
        )
