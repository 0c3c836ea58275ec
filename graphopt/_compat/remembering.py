"""Operators of a trace whose results are known already, recorded without asking torch again.

What `make_fx` does for one operator takes half a millisecond: it looks for a decomposition, runs
the shape rule behind two more modes, follows constants. Most operators of a step are met again with
arguments of the same kinds: in the next layer, in the next of the traces that a capture makes. What
they give has the same kind then, and what is left to do is to make a tensor of it and a node.

An operator is remembered only where its result follows from the kinds of its arguments and from
settings of torch that are part of the question. Everything else goes torch's own way: values that
are known (`torch.tensor(1.0)`), sizes that depend on values, composite operators, subclasses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    _ProxyTensor,
    get_proxy_mode,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.fx.traceback import has_preserved_node_meta

aten = torch.ops.aten

_DEVICE = torch.ops.prim.device.default

_ASKING = frozenset(
    {
        *(aten.size.default, aten.stride.default, aten.storage_offset.default),
        *(aten.is_nonzero.default, aten.lift_fresh.default, aten.lift_fresh_copy.default),
        aten.lift.default,
    }
)
"""Operators that torch records, or answers, in a way of their own."""

_OWN_WAY = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.needs_exact_strides,  # whose nodes keep more
)
_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}
    | {torch.memory_format, complex}
)

Kind: TypeAlias = tuple[Any, ...]
"""Data type, device, sizes, strides, offset, conjugate and negative bits of a tensor."""


class _Given(NamedTuple):
    """A result that is one of the tensors given."""

    position: int


class _Fresh(NamedTuple):
    """A result in memory of its own, or in that of a tensor given."""

    kind: Kind
    shares: int | None


_Result: TypeAlias = _Given | _Fresh | None


class _Answer:
    """What an operator gives for arguments of some kinds.

    Attributes:
        asked: there has been such a call.
        results: what it gave; None where that does not follow from the kinds.
        container: the class that holds several results.
    """

    __slots__ = ("asked", "container", "results")

    def __init__(self) -> None:
        self.asked = False
        self.results: list[_Result] | None = None
        self.container: type | None = None


@lru_cache(maxsize=1 << 14)
def _answer(question: tuple[Any, ...]) -> _Answer:
    """The answer to a question, which is filled in when it is known: the same whenever it is asked,
    and so kept for later captures."""
    return _Answer()


class _UnknownError(Exception):
    """A call that has to go torch's own way."""


class RememberingMode(ProxyTorchDispatchMode):
    """Torch's recording mode, which answers what has been asked before by itself."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        question = None
        if _is_remembered(func) and func not in self.decomposition_table:
            with torch._C.DisableTorchFunction():
                question = _Question.of(self.tracer, func, args, kwargs or {})
        if question is None or has_preserved_node_meta():
            return super().__torch_dispatch__(func, types, args, kwargs)
        answer = _answer(question.key)
        if answer.results is not None:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return question.answered(answer, func)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not answer.asked:
            with torch._C.DisableTorchFunction():
                question.learn(answer, result)
        return result


class _QuickTracer(PythonKeyTracer):
    """Torch's tracer, which makes the nodes of operators without looking for what few of them
    have."""

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        if kind != "call_function" or not _is_remembered(target) or has_preserved_node_meta():
            return super().create_node(kind, target, args, kwargs, name, type_expr)
        return self.graph.create_node(kind, target, args, kwargs, name, type_expr)


@contextmanager
def remembered() -> Iterator[None]:
    """While active, the `make_fx` that runs records operators from memory where it can."""
    mode: Any = get_proxy_mode()
    if not _is_usual(mode):
        yield
        return
    tracer = mode.tracer
    mode.__class__, tracer.__class__ = RememberingMode, _QuickTracer
    try:
        yield
    finally:
        mode.__class__, tracer.__class__ = ProxyTorchDispatchMode, PythonKeyTracer


def _is_usual(mode: Any) -> bool:
    """Whether a mode is torch's own, and records operators as they are."""
    if type(mode) is not ProxyTorchDispatchMode or type(mode.tracer) is not PythonKeyTracer:
        return False
    return not mode.pre_dispatch and not getattr(mode, "emulate_precision_casts", False)


@lru_cache(maxsize=4096)
def _is_remembered(func: Any) -> bool:
    """Whether what an operator gives may follow from the kinds of its arguments."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    if func in _ASKING or any(tag in func.tags for tag in _OWN_WAY):
        return False
    if any(argument.is_out for argument in func._schema.arguments):
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)


class _Question:
    """A call of an operator.

    Attributes:
        key: everything that decides what it gives.
    """

    __slots__ = ("_args", "_func", "_kwargs", "_mode", "_parts", "_tensors", "_tracer", "key")

    def __init__(self, tracer: Any, func: Any) -> None:
        self._tracer, self._func = tracer, func
        self._mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self._tensors: list[FakeTensor] = []
        self._parts: list[Any] = [func, *_settings()]
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self.key: tuple[Any, ...] = ()

    @staticmethod
    def of(tracer: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> _Question | None:
        """The question; None where an answer would not follow from it."""
        question = _Question(tracer, func)
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
        """Adds a value to the question, and gives what stands for it in the graph."""
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
        self._parts.append(kind)
        self._tensors.append(tensor)
        node: fx.Node = slot.proxy.node
        return node

    def _number(self, number: torch.SymFloat) -> fx.Node:
        """Of a number that is not known, element by element, only the type counts."""
        slot = self._tracer.symnode_tracker.get(number)
        if slot is None:
            raise _UnknownError
        self._parts.append(torch.SymFloat)
        node: fx.Node = slot.force().node
        return node

    def learn(self, answer: _Answer, result: Any) -> None:
        """Note what the operator has given."""
        answer.asked = True
        several = type(result) is list or type(result) is tuple
        results = result if several else [result]
        found = [self._described(one) for one in results]
        if any(one is _NOTHING for one in found) or _share(results, found):
            return
        answer.container = type(result) if several else None
        answer.results = found

    def _described(self, result: Any) -> Any:
        if result is None:
            return None
        for position, tensor in enumerate(self._tensors):
            if result is tensor:
                # The operator may have given the tensor other sizes.
                return _Given(position) if _kind(tensor) in self._parts else _NOTHING
        kind = _kind(result) if type(result) is FakeTensor else None
        if kind is None or result.constant is not None or result.requires_grad:
            return _NOTHING
        storage = _storage(result)
        shares = [i for i, tensor in enumerate(self._tensors) if _storage(tensor) == storage]
        if not shares:
            own = result.untyped_storage().nbytes() == _bytes(kind)
            return _Fresh(kind, None) if own else _NOTHING
        return _Fresh(kind, shares[0]) if len(shares) == 1 else _NOTHING

    def answered(self, answer: _Answer, func: Any) -> Any:
        """What the operator gives, recorded."""
        assert answer.results is not None
        results = [self._made(result) for result in answer.results]
        call = ("call_function", func, self._args, self._kwargs)
        node = self._tracer.create_node(*call, _name(func))
        proxy = self._tracer.proxy(node)
        if answer.container is not None:
            made = answer.container(results)
            track_tensor_tree(made, proxy, constant=None, tracer=self._tracer)
            return made
        result = results[0]
        if result is not None:
            set_proxy_slot(result, self._tracer, _ProxyTensor(proxy, None))
            node.meta["val"] = self._as_value(result)
        return result

    def _made(self, result: _Result) -> Any:
        if result is None:
            return None
        if isinstance(result, _Given):
            return self._tensors[result.position]
        (dtype, device, shape, strides, offset, *_), shares = result
        if shares is None:
            meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            storage = self._tensors[shares].untyped_storage()
            meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, strides)
        return FakeTensor(self._mode, meta, device)

    def _as_value(self, result: FakeTensor) -> FakeTensor:
        """The metadata of a node: another tensor over the same storage."""
        return fast_detach(self._mode, result)


_NOTHING = object()


def _kind(tensor: FakeTensor) -> Kind | None:
    """What counts of a tensor; None where that is not all."""
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
    )


def _settings() -> tuple[Any, ...]:
    """Settings that may decide what an operator gives."""
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
    """Whether two results lie in one storage, which is none of the tensors given."""
    pairs = zip(results, found, strict=True)
    storages = [_storage(one) for one, f in pairs if isinstance(f, _Fresh) and f.shares is None]
    return len(set(storages)) < len(storages)


def _bytes(kind: Kind) -> int:
    """Of a tensor with memory of its own."""
    dtype, _, shape, strides, offset = kind
    if 0 in shape:
        return 0
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return int((last + 1) * dtype.itemsize) if offset == 0 else -1


@lru_cache(maxsize=4096)
def _name(func: Any) -> str:
    name: str = fx.Graph()._target_to_str(func.overloadpacket.__name__)
    return name
