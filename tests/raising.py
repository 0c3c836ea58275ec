"""Finds operators that raise for some values, or worse, unknown to the table: run as a program.

Each operator of torch's database is run on its samples; every ATen call that it makes is made again
with each of its tensors filled with numbers that a sample would not have.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from graphopt.ir.families import MAY_RAISE
from operators import database

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
SAMPLES = 6
CALLS_OF_ONE = 6
SECONDS = 100
WHOLE = (10**6, -(10**6), 0, 1, -1, 3)
REAL = (0.0, float("nan"), float("inf"), -1.0, 2.0, 1e30)


class Call(NamedTuple):
    """A call of an operator: its arguments, flat."""

    target: Any
    flat: list[Any]
    spec: Any

    def raises(self) -> bool:
        args, kwargs = tree_unflatten([_copied(x) for x in self.flat], self.spec)
        try:
            self.target(*args, **kwargs)
        except Exception:
            return True
        return False

    def others(self) -> Iterator[Call]:
        """This call, of a tensor with other numbers."""
        for index, value in enumerate(self.flat):
            if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
                for filled in _filled(value):
                    given = [*self.flat[:index], filled, *self.flat[index + 1 :]]
                    yield self._replace(flat=given)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        if len(self.calls) < 60 and func.namespace == "aten":
            self.calls.append(Call(func, [_copied(x) for x in flat], spec))
        return func(*args, **(kwargs or {}))


def _copied(value: Any) -> Any:
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    return value.detach().clone() if strided else value


def _filled(tensor: Tensor) -> Iterator[Tensor]:
    real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    for number in REAL if real else (0, 1) if tensor.dtype is torch.bool else WHOLE:
        with suppress(RuntimeError):  # the dtype has no such number
            yield torch.full_like(tensor, number)


def _calls(name: str) -> Iterator[Call]:
    entry = database()[name]
    for dtype in DTYPES:
        if not entry.supports_dtype(dtype, "cpu"):
            continue
        grad = entry.supports_autograd and dtype.is_floating_point
        with suppress(ImportError):  # the database wants a package that is not installed
            for sample in islice(entry.sample_inputs_func(entry, "cpu", dtype, grad), SAMPLES):
                with _Recorder() as recorder, suppress(Exception):
                    _run(lambda: entry.op(sample.input, *sample.args, **sample.kwargs), grad)  # noqa: B023
                yield from recorder.calls


def _run(call: Callable[[], Any], grad: bool) -> None:
    results = [x for x in tree_leaves(call()) if isinstance(x, Tensor) and x.requires_grad]
    if grad and results:
        sum(x.sum() for x in results).abs().backward()


def _look_at(name: str, path: Path, known: Collection[str]) -> None:
    """Writes the operators that raise, and each just before it is tried; not those that are known:
    what one of them has spoilt may end the process while another is tried."""
    seen: dict[str, int] = {}
    with path.open("w") as out:
        for call in _calls(name):
            operator = f"{call.target._schema.name.removesuffix('_')}.{call.target._overloadname}"
            seen[operator] = seen.get(operator, 0) + 1
            if {operator, operator.rpartition(".")[0]} & set(known):
                continue
            if seen[operator] > CALLS_OF_ONE or call.raises():
                continue
            for other in call.others():
                print("trying", operator, file=out, flush=True)
                print("raises" if other.raises() else "gives", operator, file=out, flush=True)


def found(name: str, directory: Path, known: Collection[str]) -> set[str]:
    """The unknown operators that an entry of the database calls and that raise, or end the process,
    for some values."""
    path = directory / name.replace("/", "-")
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), 2)
        signal.alarm(SECONDS)
        try:
            _look_at(name, path, known)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    lines = [line.split() for line in path.read_text().splitlines()]
    raising = {operator for what, operator in lines if what == "raises"}
    return raising | ({lines[-1][1]} if status and lines else set())


def main(part: str, parts: str, *forgotten: str) -> None:
    known = MAY_RAISE - set(forgotten)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names, raising = sorted(database())[int(part) :: int(parts)], set()
    with TemporaryDirectory() as directory:
        for name in names:
            raising |= found(name, Path(directory), known)
    print(len(names), *sorted(raising))


if __name__ == "__main__":
    main(*sys.argv[1:])
