"""Operators and features of torch that no capture supports: their names and cures.

An exception that torch raises while a step is traced often says nothing of the cause. Here it is
told by the function of torch that was running, or by a part of the text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx
from torch.quasirandom import SobolEngine

from graphopt import _compat
from graphopt._compat.storages import REFERENCE, STORAGES, VERSION
from graphopt.errors import CaptureError
from graphopt.ir.metadata import source_line
from graphopt.ir.user_frames import own_location, running_in_step

_ORIGINAL = "call the original function or module; graphopt captures it with the rest"
_LOOP = "write the loop in Python, which a step may do: for part in x: …"

_CALLS: tuple[tuple[str, str, str], ...] = (
    (
        "torch/_higher_order_ops/cond.py",
        "torch.cond",
        "decide in Python, which a step may do: if condition: …; or use torch.where",
    ),
    (
        "torch/_higher_order_ops/while_loop.py",
        "while_loop",
        "write the loop in Python, which a step may do: while condition: …",
    ),
    ("torch/_higher_order_ops/scan.py", "scan", _LOOP),
    ("torch/_higher_order_ops/associative_scan.py", "associative_scan", _LOOP),
    ("torch/_higher_order_ops/map.py", "map", f"use torch.func.vmap, or {_LOOP}"),
    (
        "torch/nn/attention/flex_attention.py",
        "flex_attention",
        "use torch.nn.functional.scaled_dot_product_attention, with the mask as a tensor",
    ),
)
"""By the file of torch that was running: an operator that takes functions, and the cure."""

_OF_MEMORY = (
    "it asks where the memory of a tensor is (data_ptr, is_set_to, _cdata, or the id or the hash of"
    " a storage), which a tensor has only while the graph runs",
    "compare tensors with `is`, or by id(tensor); or ask before the call",
)
_TEXTS: tuple[tuple[str, str, str], ...] = (
    ("Cannot access data pointer of Tensor", *_OF_MEMORY),
    (
        "QuantizedMeta",
        "it computes with quantized tensors, which no graph has",
        "quantize outside the step; or compute with the rounded values as"
        " torch.fake_quantize_per_tensor_affine gives them",
    ),
    (
        r"Sparse (CSR|CSC|BSR|BSC) tensors do not have strides",
        r"it makes a sparse tensor of the layout \1, which no graph has",
        "make it outside the step, and pass it; or compute with the dense one",
    ),
    (
        "Values and compressed tensor instance need to be on the same device",
        "it makes a sparse tensor of a compressed layout of its indices, which no graph has",
        "make it outside the step, and pass it; or compute with the dense one",
    ),
    (
        "OpaqueTensorImpl",
        "it makes a tensor of the layout of MKL-DNN, which no graph has",
        "leave out to_mkldnn(): operators choose their kernels by themselves",
    ),
    (
        "_nested_tensor_from|NestedTensorImpl|aten\\._nested_",
        "it makes a nested tensor, which no graph has",
        "pad the parts to one length, torch.nn.utils.rnn.pad_sequence, and mask the loss",
    ),
    (
        r"Creating a new Tensor subclass Uninitialized",
        "it makes a lazy module, whose parameters have no shapes yet",
        "make it outside the step, and run it once before the first step",
    ),
    (
        r"Creating a new Tensor subclass (\w+)",
        r"it makes a tensor of the class \1 of one that is traced",
        "compute with plain tensors: leave out as_subclass and the like",
    ),
    (
        r"'TracedWork' object has no attribute '(\w+)'",
        r"it uses \1 of a collective in flight (async_op=True), which no graph has",
        "wait for it, work.wait(), and compute with the tensor behind that",
    ),
    (
        "_share_(fd|filename)",
        "it moves a tensor into memory that processes share (share_memory_), which no graph does",
        "share it before the first step, model.share_memory(); the step writes to it there",
    ),
    (
        "in the TorchScript interpreter",
        "it calls a TorchScript function that decides by values or makes what no trace sees",
        "call the Python function it was made from",
    ),
    (
        "Not available for 'meta' device type",
        "it reads the memory of a tensor, which has none while it is traced",
        "compute with tensor operations; or read it in a function that every step calls:"
        " graphopt.callback(function, tensor)",
    ),
    (
        r"Could not run '(\S+)' with arguments from the '(\w+)' backend",
        r"it calls the operator \1, which has no form that a trace can follow (\2)",
        "use another operator, or call it outside the step",
    ),
)
"""By the text of the exception: the reason and the cure."""


def unknown_feature(error: Exception) -> tuple[str, str] | None:
    """The reason and cure if an unsupported operator or feature raised an exception, else None."""
    running = running_in_step(error)
    compiled = ("torch/_dynamo/eval_frame.py", "compile_wrapper")
    for ending, name, cure in _CALLS:
        if any(file.endswith(ending) for file, _ in running) and _is_inside(running, compiled):
            return f"it calls {name}, an operator on functions that no graph has", cure
    if _is_inside(running, compiled):
        return "it calls something that torch.compile compiled", _ORIGINAL
    if any(file.endswith("torch/jit/_trace.py") for file, _ in running):
        return "it calls torch.jit.trace", "call the function itself; graphopt captures it"
    text = str(error)
    for pattern, reason, cure in _TEXTS:
        found = re.search(pattern, text)
        if found is not None:
            return found.expand(reason), cure
    return None


ADDRESSES = frozenset({torch.Tensor.data_ptr, torch.Tensor.is_set_to})
"""Functions of a tensor that say where its memory is."""

MEMORY = frozenset({*ADDRESSES, VERSION})
"""Functions of a tensor that say where its memory is, or what has become of it."""

_ADDRESSES = frozenset(function.__name__ for function in ADDRESSES)
_MEMORY = (torch.Tensor, *STORAGES)
_LOOPS = frozenset({"run", "run_until_complete", "run_forever"})


def _asks_for_address(callee: Any, owner: Any) -> bool:
    if not isinstance(owner, _MEMORY):
        return False
    return callee is REFERENCE or getattr(callee, "__name__", "") in _ADDRESSES


def _asks_for_version(callee: Any, owner: Any) -> bool:
    return bool(callee == VERSION)


def _runs_event_loop(callee: Any, owner: Any) -> bool:
    of_asyncio = str(getattr(callee, "__module__", "")).startswith("asyncio")
    return of_asyncio and getattr(callee, "__name__", "") in _LOOPS


def _uses_sobol_engine(callee: Any, owner: Any) -> bool:
    return callee is SobolEngine or isinstance(owner, SobolEngine)


_UNKNOWN_CALLS: tuple[tuple[Callable[[Any, Any], bool], str, str], ...] = (
    (_asks_for_address, *_OF_MEMORY),
    (
        _asks_for_version,
        "it asks how often a tensor has been written (_version), which only tensors outside count",
        "count it in an attribute, self.writes += 1; or ask before the call",
    ),
    (
        _runs_event_loop,
        "it runs an event loop of asyncio, whose tasks no graph has",
        "let the step be a plain function, and await around it: loss = step(x)",
    ),
    (
        _uses_sobol_engine,
        "it draws from a SobolEngine, which counts its points on the host",
        "draw before the call, and pass the points: step(x, engine.draw(n))",
    ),
)
"""By a function and the object that it belongs to: what the call does, and the cure."""


def refuse_unknown_call(callee: Any, args: Sequence[Any]) -> None:
    """Refuses a call whose result no trace can know.

    Args:
        args: positional values, the object of a method first, and those of keywords.

    Raises:
        CaptureError: it is such a call.
    """
    owner = getattr(callee, "__self__", args[0] if args else None)
    for holds, reason, cure in _UNKNOWN_CALLS:
        if holds(callee, owner):
            for coroutine in filter(inspect.iscoroutine, args):
                coroutine.close()  # else Python warns that it was never awaited
            raise CaptureError(reason, location=own_location(), hint=cure)


def refuse_address() -> NoReturn:
    """Refuses a question for the address of memory.

    Raises:
        CaptureError: always.
    """
    reason, cure = _OF_MEMORY
    raise CaptureError(reason, location=own_location(), hint=cure)


def _is_inside(running: list[tuple[str, str]], function: tuple[str, str]) -> bool:
    return any(file.endswith(function[0]) and name == function[1] for file, name in running)


_LAYOUTS: tuple[tuple[Callable[[torch.Tensor], bool], str, str], ...] = (
    (lambda tensor: tensor.is_quantized, "quantized", "pass tensor.dequantize()"),
    (lambda tensor: tensor.is_nested, "nested", "pass a padded tensor and a mask"),
    (lambda tensor: tensor.is_mkldnn, "of the layout of MKL-DNN", "pass tensor.to_dense()"),
)


def check_layout(name: str, tensor: torch.Tensor) -> None:
    """Refuses an input without a fake counterpart.

    Raises:
        CaptureError: it is quantized, nested or opaque.
    """
    for holds, what, cure in _LAYOUTS:
        if holds(tensor):
            raise CaptureError(f"{name} is {what}, and no graph has such tensors", hint=cure)


def refuse_unseen_results(graph: fx.Graph) -> None:
    """Refuses a graph that holds a fake tensor, computed unseen by the trace, for example in
    another thread.

    Raises:
        CaptureError: it does.
    """
    module = graph.owning_module
    for node in graph.nodes:
        if node.op == "get_attr" and _compat.is_fake(getattr(module, node.target, None)):
            users = filter(None, map(source_line, node.users))
            raise CaptureError(
                "it uses a tensor that it has computed where no trace sees it, as in a thread",
                location=next(users, None),
                hint="compute it in the thread of the step; or before the call, and pass it",
            )
