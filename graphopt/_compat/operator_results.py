"""A cache of operator results by the operator's name and the kinds of its arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import _ProxyTensor, set_proxy_slot, track_tensor_tree

_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}
    | {torch.memory_format, complex}
)

Kind: TypeAlias = tuple[Any, ...]
"""Data type, device, sizes, strides, offset of a tensor, and whether it requires a gradient."""


class _GivenTensor(NamedTuple):
    """A result that is one of the arguments."""

    position: int


class _NewTensor(NamedTuple):
    """A result in new memory, or in that of an argument."""

    kind: Kind
    shares: int | None


_Result: TypeAlias = _GivenTensor | _NewTensor | None


@dataclass(eq=False, slots=True)
class KnownResults:
    """The cached results of an operator for arguments of given kinds.

    Attributes:
        asked: true if there has been such a call.
        results: the results; None if they do not follow from the kinds.
        container: the class that holds several results.
    """

    asked: bool = False
    results: list[_Result] | None = None
    container: type | None = None


@lru_cache(maxsize=1 << 14)
def known_results(question: tuple[Any, ...]) -> KnownResults:
    """The cache entry of an operator call, kept for later captures."""
    return KnownResults()


class _UnknownError(Exception):
    """The call cannot be cached and goes through torch."""


class OperatorCall:
    """An operator call, as the key into the cache of results.

    Attributes:
        key: everything that decides what it gives.
    """

    __slots__ = (
        *("_args", "_func", "_kwargs", "_mode", "_parts", "_positions", "_tensors", "_tracer"),
        "key",
    )

    def __init__(self, tracer: Any, func: Any) -> None:
        self._tracer, self._func = tracer, func
        self._mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self._tensors: list[FakeTensor] = []
        self._positions: dict[int, int] = {}
        correction = getattr(self._mode, "correction", None)
        self._parts: list[Any] = [func, correction, *_settings()]
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self.key: tuple[Any, ...] = ()

    @staticmethod
    def of(tracer: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> OperatorCall | None:
        """The cache key of a call, or None if its result does not follow from the kinds of its
        arguments."""
        question = OperatorCall(tracer, func)
        try:
            question._args = tuple([question._argument(value) for value in args])
            question._kwargs = {name: question._named(name, kwargs[name]) for name in kwargs}
        except _UnknownError:
            return None
        if not question._tensors:
            return None
        question.key = tuple(question._parts)
        return question

    def _named(self, name: str, value: Any) -> Any:
        self._parts.append(name)
        return self._argument(value)

    def _argument(self, value: Any) -> Any:
        """Adds an argument to the key, and returns its form in the graph."""
        kind = type(value)
        if kind is FakeTensor:
            return self._tensor(value)
        if kind in _PLAIN:
            self._parts += (kind, value)
            return value
        if kind is list or kind is tuple:
            self._parts += (kind, len(value))
            return kind([self._argument(item) for item in value])
        if isinstance(value, torch.SymFloat) and torch.Tag.pointwise in self._func.tags:
            return self._number(value)
        raise _UnknownError

    def _tensor(self, tensor: FakeTensor) -> fx.Node:
        slot = self._tracer.tensor_tracker.get(tensor)
        if slot is None or slot.constant is not None or tensor.constant is not None:
            raise _UnknownError
        kind = _kind(tensor)
        if kind is None or tensor.fake_mode is not self._mode:
            raise _UnknownError
        first = self._positions.setdefault(id(tensor), len(self._tensors))
        # `x.mul_(x)` gives its first argument and its second: another question than `x.mul_(y)`.
        self._parts += (kind,) if first == len(self._tensors) else (kind, first)
        self._tensors.append(tensor)
        node: fx.Node = slot.proxy.node
        return node

    def _number(self, number: torch.SymFloat) -> fx.Node:
        """Adds a number to the key; of an unknown number in an elementwise operator only the
        type counts."""
        slot = self._tracer.symnode_tracker.get(number)
        if slot is None:
            raise _UnknownError
        self._parts.append(torch.SymFloat)
        node: fx.Node = slot.force().node
        return node

    def learn(self, answer: KnownResults, result: Any) -> None:
        """Stores the operator's result in the cache, for later calls with the same key."""
        answer.asked = True
        several = type(result) is list or type(result) is tuple
        results = result if several else [result]
        stored: defaultdict[int, list[int]] = defaultdict(list)
        for position, tensor in enumerate(self._tensors):
            stored[_storage(tensor)].append(position)
        found = [self._described(one, stored) for one in results]
        if any(one is _NOTHING for one in found) or _share(results, found):
            return
        answer.container = type(result) if several else None
        answer.results = found

    def _described(self, result: Any, stored: Mapping[int, list[int]]) -> Any:
        """Describes a result of the operator.

        Args:
            stored: positions of the given tensors, by storage.
        """
        if result is None:
            return None
        position = self._positions.get(id(result))
        if position is not None:
            # The operator may have given the tensor other sizes.
            known = _kind(result) in self._parts
            return _GivenTensor(position) if known else _NOTHING
        kind = _kind(result) if type(result) is FakeTensor else None
        if kind is None or result.constant is not None or result.requires_grad:
            return _NOTHING
        shares = stored.get(_storage(result))
        if not shares:
            own = result.untyped_storage().nbytes() == _bytes(kind)
            return _NewTensor(kind, None) if own else _NOTHING
        return _NewTensor(kind, shares[0]) if len(shares) == 1 else _NOTHING

    def answered(self, answer: KnownResults, func: Any) -> Any:
        """The cached result of the operator, recorded in the graph."""
        assert answer.results is not None
        made = [self._made(result) for result in answer.results]
        call = ("call_function", func, self._args, self._kwargs)
        node = self._tracer.create_node(*call, name_of_operator(func))
        proxy = self._tracer.proxy(node)
        if answer.container is not None:
            results = answer.container([result for result, _ in made])
            track_tensor_tree(results, proxy, constant=None, tracer=self._tracer)
            return results
        result, value = made[0]
        if result is not None:
            set_proxy_slot(result, self._tracer, _ProxyTensor(proxy, None))
            node.meta["val"] = value
        return result

    def _made(self, result: _Result) -> tuple[Any, Any]:
        """Makes a result tensor, and another over its storage for the node's metadata."""
        if result is None:
            return None, None
        if isinstance(result, _GivenTensor):
            given = self._tensors[result.position]
            return given, fast_detach(self._mode, given)
        (dtype, device, shape, strides, offset, _), shares = result
        if shares is None:
            meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            storage = self._tensors[shares].untyped_storage()
            meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, strides)
        return FakeTensor(self._mode, meta, device), FakeTensor(self._mode, meta, device)


_NOTHING = object()


def _kind(tensor: FakeTensor) -> Kind | None:
    """The key of a tensor, or None if more than its metadata matters."""
    if tensor.layout is not torch.strided or tensor._has_symbolic_sizes_strides:
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
        return None
    return (
        tensor.dtype,
        tensor.fake_device,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
    )


def _settings() -> tuple[Any, ...]:
    """The process settings that may decide an operator's result."""
    return (
        torch.get_default_dtype(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch.is_inference_mode_enabled(),
    )


def _storage(tensor: torch.Tensor) -> int:
    return torch._C._storage_id(tensor)  # type: ignore[attr-defined,no-any-return]


def _share(results: Sequence[Any], found: Sequence[_Result]) -> bool:
    """True if two results share a storage that no argument has."""
    pairs = zip(results, found, strict=True)
    storages = [_storage(one) for one, f in pairs if isinstance(f, _NewTensor) and f.shares is None]
    return len(set(storages)) < len(storages)


def _bytes(kind: Kind) -> int:
    """The size in bytes of a tensor with memory of its own."""
    dtype, _, shape, strides, offset, _ = kind
    if 0 in shape:
        return 0
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return int((last + 1) * dtype.itemsize) if offset == 0 else -1


@lru_cache(maxsize=4096)
def name_of_operator(func: Any) -> str:
    name: str = fx.Graph()._target_to_str(func.overloadpacket.__name__)
    return name
