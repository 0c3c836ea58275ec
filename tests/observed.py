"""What operators really do, seen from outside, beside what `graphopt.ir` says of them.

`Observer` is a dispatch mode: of each operator that runs under it, storages, versions, the state of
the generator and results are compared with its row, as a node about which nothing else is known:
its metadata has tensors of the right number and shapes, none of which share memory.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from graphopt.graph_utils import is_dense
from graphopt.ir.effects import Effects
from graphopt.ir.inplace import inplace_form
from graphopt.ir.operators import draws, is_wait, operator_of, overwritten, row

MOST_BYTES = 2**20


class Observer(TorchDispatchMode):
    """Compares every operator with its row.

    Attributes:
        problems: what was seen that a row does not say, by operator and kind.
        seen: names of the operators that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: dict[str, set[str]] = defaultdict(set)
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator, and note what its row does not say."""
        tensors = {id(t): t for t in tensors_of((args, kwargs))}
        before = {index: _Memory(t) for index, t in tensors.items()}
        generator = torch.get_rng_state()
        copies = _copies(func, args, kwargs)
        refilled = _refilled(func, args) if row(func).copies else None
        result = func(*args, **kwargs)
        self.seen.add(func._schema.name)
        drew = not torch.equal(generator, torch.get_rng_state())
        call = _Node(func, args, kwargs, result)
        problems = [
            *self._writes(call, tensors, before),
            *self._aliases(call, result, tensors),
            *(["draws random numbers"] if drew and not draws(call.node) else []),
        ]
        if refilled is not None and not same_bits(func(*refilled, **kwargs), result):
            problems.append("it reads what it is said to replace")
        problems += _mixed(func, args, kwargs, result)
        if copies is not None:
            after = torch.get_rng_state()
            problems += _twin(func, copies, result, generator)
            torch.set_rng_state(after)
        for problem in problems:
            self.problems[func._schema.name].add(problem)
        return result

    def _writes(
        self, call: _Node, tensors: dict[int, Tensor], before: dict[int, _Memory]
    ) -> Iterator[str]:
        if is_wait(call.node):
            return  # its collective writes, until then
        expected = {storage(call.tensors[node]) for node in overwritten(call.node)}
        for index, tensor in tensors.items():
            if storage(tensor) in expected or not before[index].changed(tensor):
                continue
            yield f"writes argument {call.names[index]}"

    def _aliases(self, call: _Node, result: Any, tensors: dict[int, Tensor]) -> Iterator[str]:
        known = operator_of(call.node)
        effects = Effects(call.graph)
        for node, tensor in call.tensors.items():
            for other, its in call.tensors.items():
                if storage(tensor) == storage(its):
                    effects.join(node, other)
        pairs = list(call.results(result))
        for node, value in pairs:
            inputs = [n for n, t in call.tensors.items() if storage(t) == storage(value)]
            for source in inputs:
                if not effects.same(source, node):
                    yield f"a result shares memory with {call.names[id(call.tensors[source])]}"
            if known.view and not inputs:
                yield "a result is no view"
        for i, (node, value) in enumerate(pairs):
            for other, its in pairs[:i]:
                if storage(its) == storage(value) and not effects.same(node, other):
                    yield "two results share memory"


class _Memory:
    """What a tensor and its storage hold at one time."""

    def __init__(self, tensor: Tensor) -> None:
        self.version = 0 if tensor.is_inference() else tensor._version
        strided = tensor.layout is torch.strided and tensor.device.type == "cpu"
        small = strided and tensor.untyped_storage().nbytes() <= MOST_BYTES
        self.data = tensor.untyped_storage().clone() if small else None

    def changed(self, tensor: Tensor) -> bool:
        now = _Memory(tensor)
        if now.version != self.version:
            return True
        if self.data is None or now.data is None:
            return False
        return not torch.equal(*(_bytes(data) for data in (self.data, now.data)))


def _bytes(data: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(data)


class _Node:
    """A call as a node of a graph of its own. Its metadata shares no memory."""

    def __init__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.graph = fx.Graph()
        self.tensors: dict[fx.Node, Tensor] = {}
        self.names: dict[int, str] = {}
        inputs: dict[int, fx.Node] = {}

        def taken(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None if isinstance(value, torch.Generator) else value
            if id(value) not in inputs:
                inputs[id(value)] = self.graph.placeholder(f"input_{len(inputs)}")
                self.names[id(value)] = str(len(inputs) - 1)
                self.tensors[inputs[id(value)]] = value
            return inputs[id(value)]

        given = tree_map(taken, (tuple(args), dict(kwargs)))
        self.node = self.graph.call_function(func, *given)
        self.node.meta["val"] = tree_map(_apart, result)
        self._result = result
        self._items = {path: self._item(path) for path, _ in _paths(result)}
        self.graph.output(list(self._items.values()))

    def _item(self, path: tuple[int, ...]) -> fx.Node:
        node, value = self.node, self.node.meta["val"]
        for index in path:
            node, value = self.graph.call_function(operator.getitem, (node, index)), value[index]
            node.meta["val"] = value
        return node

    def results(self, result: Any) -> Iterator[tuple[fx.Node, Tensor]]:
        """The nodes of the results that are tensors with storage, with those."""
        for path, value in _paths(result):
            if value.layout is torch.strided:
                yield self._items[path], value


def _paths(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _paths(entry, (*path, index))


def _apart(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a nest."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storage(tensor: Tensor) -> object:
    """The same for tensors over one storage."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def _copies(func: Any, args: Any, kwargs: Any) -> Any:
    """Copies of the arguments of an operator that has an in-place form; None for others."""
    if inplace_form(func) is None or func.namespace != "aten":
        return None
    first = tensors_of(args[0])
    if not first or not all(t.layout is torch.strided and is_dense(t) for t in first):
        return None

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)

    with torch.no_grad():
        return tree_map(copy, (tuple(args), dict(kwargs)))


def _twin(func: Any, copies: Any, result: Any, generator: Tensor) -> Iterator[str]:
    """Where the in-place form gives other bits; it is used on tensors that are like results."""
    args, kwargs = copies
    firsts, results = tensors_of(args[0]), tensors_of(result)
    if len(firsts) != len(results) or not all(map(_alike, firsts, results)):
        return
    written = inplace_form(func, result)
    if written is None:
        return
    torch.set_rng_state(generator)
    with torch.no_grad():
        written(*args, **kwargs)
    if not all(map(same_bits, firsts, results)):
        yield "its in-place form gives other bits"


def _refilled(func: Any, args: Any) -> Any:
    """The arguments, with other numbers in the first one."""
    first = args[0].clone()
    return torch.ones_like(first).logical_xor(first).to(first.dtype), *args[1:]


def _mixed(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[str]:
    """Whether the last element of a result is not computed from the last ones of all operands."""
    known = row(func)
    if not known.pointwise or known.random or known.writes or not isinstance(result, Tensor):
        return
    if not result.numel() or result.is_complex() or result.layout is not torch.strided:
        return

    def last(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return value.expand(result.shape)[(slice(-1, None),) * result.dim()].clone()

    try:
        with torch.no_grad():
            found = func(*tree_map(last, (tuple(args))), **tree_map(last, dict(kwargs)))
    except Exception:
        return  # its operands are not broadcast
    if found.shape != (1,) * result.dim():
        return
    if not torch.allclose(found.flatten()[0], result.detach().flatten()[-1], 1e-2, 1e-3, True):
        yield "an element is computed from several of an operand"


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; any NaN is as good as another."""
    return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def run(call: Callable[[], Any], observer: Observer, backward: bool = False) -> None:
    """Run a function under observation, and its backward; what it raises is of no interest here."""
    try:
        with observer:
            result = call()
            if backward:
                ends = [t for t in tensors_of(result) if t.requires_grad]
                torch.autograd.backward([t.abs().sum() for t in ends])
    except Exception:
        return
