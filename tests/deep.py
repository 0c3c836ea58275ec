"""Everything that a step can reach, value by value, to be compared with later: what the tests hold
against the product's promise that a refused capture changes nothing."""

from __future__ import annotations

import functools
import importlib
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import ANY

import numpy
import pytest
import torch

import graphopt
from graphopt._compat.threads import other_threads_run
from graphopt.tracing.call import Call
from graphopt.tracing.rollback.generators import global_generators

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range)
_NOT_ENTERED = ("graphopt", "_pytest", "logging", "threading", "torch.fx", "torch._sub", "sympy",
                "torch.amp")  # fmt: skip
_GLOBAL_GENERATORS = global_generators()
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def deep(step: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    """What is found at each path from a step and its arguments."""
    found: dict[str, Any] = {"modes": _modes()}
    seen: dict[int, Any] = {}
    pending: list[tuple[str, Any]] = [("step", step), *_indexed("arguments", arguments)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, _PLAIN):
            found[path] = (type(value), value)
            continue
        found[path] = (type(value), id(value))
        if id(value) in seen or isinstance(value, (types.ModuleType, type)):
            continue
        seen[id(value)] = value  # keeps it alive, and with it the id
        found[path] = (*found[path], _own(value))
        pending += _parts(path, value)
    found["all"] = seen
    return found


def assert_same_as(before: dict[str, Any], step: Callable[..., Any], arguments: list[Any]) -> None:
    """Raise an `AssertionError` that names the first path at which something has changed."""
    now = deep(step, arguments)
    for path in before.keys() | now.keys():
        if path != "all":
            left, right = before.get(path), now.get(path)
            assert left == right, f"{path} was {left} and is {right}"


def _own(value: Any) -> Any:
    """What a value holds that is no part of its own."""
    if isinstance(value, torch.Tensor):
        hooks = [list(getattr(value, name, None) or {}) for name in _HOOKS]
        return (
            -1 if value.is_inference() else value._version,
            value.requires_grad,
            id(value.grad if value.is_leaf else None),
            hooks,
            _bits(value),
        )
    if isinstance(value, numpy.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return hash(str(value.get_state().tolist()))
    if isinstance(value, (random.Random, numpy.random.RandomState, numpy.random.Generator)):
        return _drawn_by_nobody_else(value)
    if isinstance(value, (set, frozenset)):  # of tensors, it goes by their addresses
        return sorted(map(repr, map(_key, value)))
    if isinstance(value, (Mapping, list, tuple, deque, bytearray)):
        return [_key(key) for key in value]  # in order
    return None


def _bits(tensor: torch.Tensor) -> Any:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    if tensor.device.type != "cpu" or tensor.numel() > 10_000:
        return None
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return hash(flat.view(torch.uint8).numpy().tobytes())


def _key(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else id(value)


def _indexed(path: str, values: Any) -> Iterator[tuple[str, Any]]:
    return ((f"{path}[{index}]", value) for index, value in enumerate(values))


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{_key(key)!r}]", item) for key, item in dict.items(value))
        yield from _indexed(f"{path}.keys", [k for k in value if not isinstance(k, _PLAIN)])
    elif isinstance(value, (list, tuple, deque)):
        yield from _indexed(path, value)
    elif isinstance(value, types.CellType):
        yield from _of_cell(path, value)
    elif isinstance(value, types.FunctionType):
        yield from _indexed(f"{path}.closure", value.__closure__ or ())
        yield from _indexed(f"{path}.defaults", value.__defaults__ or ())
    elif isinstance(value, types.MethodType):
        yield f"{path}.self", value.__self__
        yield f"{path}.function", value.__func__
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func
    yield from _attributes(path, value)


def _of_cell(path: str, cell: types.CellType) -> Iterator[tuple[str, Any]]:
    try:
        yield f"{path}.cell", cell.cell_contents
    except ValueError:
        return


def _attributes(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value).__module__.startswith(_NOT_ENTERED) and not isinstance(value, torch.nn.Module):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield f"{path}.__dict__", attributes
    for base in type(value).__mro__:
        for name in getattr(base, "__slots__", ()):
            if isinstance(name, str) and hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)


def _drawn_by_nobody_else(generator: Any) -> Any:
    """The state of a generator of Python or numpy; equal to all where other threads may draw."""
    if other_threads_run():
        return ANY
    if isinstance(generator, random.Random):
        return hash(generator.getstate())
    if isinstance(generator, numpy.random.RandomState):
        _, keys, *others = generator.get_state()
        return hash((keys.tobytes(), *others))
    return hash(str(generator.bit_generator.state))


def _modes() -> Any:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        hash(torch.get_rng_state().numpy().tobytes()),
        *map(_drawn_by_nobody_else, _GLOBAL_GENERATORS),
    )


def watch_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each refused capture of this process is held against what was there before."""
    from graphopt.runtime.agreement import agreed
    from graphopt.stages.calls import Calls

    capture = importlib.import_module("graphopt.tracing.capture")  # a function has its name

    def checked(original: Callable[..., Any], call_of: Callable[..., Call]) -> Callable[..., Any]:
        def capturing(*args: Any, **kwargs: Any) -> Any:
            call = call_of(*args)
            before = deep(call.fn, call.leaves)
            try:
                return original(*args, **kwargs)
            except graphopt.GraphOptError:
                assert_same_as(before, call.fn, call.leaves)
                raise

        return capturing

    alone = checked(capture.capture_call, lambda call, *_: call)
    for module in (capture, agreed):
        monkeypatch.setattr(module, "capture_call", alone)
    whole = checked(Calls._capture, lambda calls, call, *_: call)
    monkeypatch.setattr(Calls, "_capture", whole)
