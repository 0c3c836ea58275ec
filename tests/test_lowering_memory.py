"""The memory that compiled regions keep: where things lie in it, and that nobody else sees it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import graphopt
from graphopt import _compat
from graphopt._compat import inductor
from graphopt._compat.inductor import empty_strided as empty_strided_cpu
from graphopt.lowering import LoweredSubgraph, Options
from graphopt.lowering.memory import MemoryLifetime, StaticMemory, Workspace, place
from zoo import MODELS, OPTIMIZERS, train_step

SIZE = (64, 64)
BYTES = 4 * 64 * 64


@st.composite
def lifetimes(draw: st.DrawFn) -> list[MemoryLifetime]:
    """Blocks as a call makes them, one after the other."""
    count = draw(st.integers(0, 20))
    return [
        MemoryLifetime(
            64 * draw(st.integers(1, 30)), first, draw(st.integers(first + 1, count + 1))
        )
        for first in range(count)
    ]


@given(lifetimes())
def test_what_is_in_use_at_the_same_time_lies_apart(blocks: list[MemoryLifetime]) -> None:
    offsets, total = place(blocks)
    for now in range(len(blocks) + 1):
        used = [
            (offset, offset + block.size)
            for offset, block in zip(offsets, blocks, strict=True)
            if block.first <= now < block.end
        ]
        used.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(used))
        assert all(start >= 0 and end <= total for start, end in used)
        assert sum(end - start for start, end in used) <= total
    assert total <= sum(block.size for block in blocks)


def test_what_fits_into_a_gap_is_put_there() -> None:
    blocks = [MemoryLifetime(128, 0, 2), MemoryLifetime(256, 1, 5), MemoryLifetime(128, 3, 5)]
    offsets, total = place(blocks)
    assert total == 384
    assert offsets[0] == offsets[2]


class Code:
    """What Inductor makes of a region, in outline: a method that makes its tensors itself."""

    def __init__(self, fail: bool = False) -> None:
        self.fail = fail
        self.current_callable = self.call
        self.pointers: list[int] = []

    def __call__(self, args: list[Any]) -> Sequence[Tensor]:
        return self.current_callable(args)

    def call(self, args: list[Any]) -> Sequence[Tensor]:
        (x,) = args
        args.clear()
        first = empty_strided_cpu(SIZE, (64, 1), torch.float32)
        torch.mul(x, 2, out=first)
        self.pointers.append(first.data_ptr())
        second = empty_strided_cpu(SIZE, (64, 1), torch.float32)
        torch.add(first, 1, out=second)
        del first
        if self.fail:
            raise ValueError("in the middle")
        third = empty_strided_cpu((32, 64), (64, 1), torch.float32)
        torch.sum(second.view(2, 32, 64), 0, out=third)
        del second
        result = empty_strided_cpu((32, 64), (64, 1), torch.float32)
        torch.neg(third, out=result)
        return [result]


def expected(x: Tensor) -> Tensor:
    return -(2 * x + 1).view(2, 32, 64).sum(0)


def check(run: Callable[[list[Any]], Sequence[Tensor]], times: int = 3) -> None:
    """Results are right, and stay so."""
    inputs = [torch.randn(SIZE) for _ in range(times)]
    results = [run([x])[0] for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, expected(x))


def test_later_calls_find_the_same_memory() -> None:
    code = Code()
    run = StaticMemory(code, Workspace())
    check(run, 4)
    noise = [torch.empty(SIZE) for _ in range(8)]
    check(run)
    del noise
    assert len(set(code.pointers[1:])) == 1


def test_a_larger_region_and_a_smaller_one_share_memory() -> None:
    workspace = Workspace()
    codes = [Code(), Code()]
    runs = [StaticMemory(code, workspace) for code in codes]
    for _ in range(3):
        for run in runs:
            check(run, 2)
    assert codes[0].pointers[-1] == codes[1].pointers[-1]


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    code = Code()
    run = StaticMemory(code, Workspace())
    check(run)
    code.fail = True
    with pytest.raises(ValueError, match="in the middle") as failure:
        run([torch.randn(SIZE)])
    code.fail = False
    check(run)
    del failure
    check(run)


def test_a_first_call_that_fails() -> None:
    code = Code(fail=True)
    run = StaticMemory(code, Workspace())
    with pytest.raises(ValueError, match="in the middle"):
        run([torch.randn(SIZE)])
    code.fail = False
    check(run, 5)
    assert len(set(code.pointers[-3:])) == 1


def test_code_of_another_form_runs_as_it_is() -> None:
    run = StaticMemory(lambda args: [expected(*args)], Workspace())
    check(run)


def check_in_threads(runs: Sequence[Callable[[list[Any]], Sequence[Tensor]]]) -> None:
    """Each is right in a thread of its own, all at the same time."""
    barrier, failures = Barrier(len(runs)), []

    def work(run: Callable[[list[Any]], Sequence[Tensor]]) -> None:
        barrier.wait()
        try:
            check(run, 200)
        except AssertionError as error:
            failures.append(error)

    threads = [Thread(target=work, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_that_call_one_region_at_the_same_time() -> None:
    run = StaticMemory(Code(), Workspace())
    check(run)
    check_in_threads([run] * 4)


def test_a_copy_has_memory_of_its_own() -> None:
    run = StaticMemory(Code(), Workspace())
    check(run)
    check_in_threads([run, copy.deepcopy(run), pickle.loads(pickle.dumps(run))])


def test_memory_that_is_not_to_be_had() -> None:
    workspace = Workspace()
    with pytest.raises(RuntimeError, match=r"allocate|memory"):
        workspace.take(1 << 60)
    slab = workspace.take(64)
    assert slab is not None
    assert slab.size == 64


def chain(x: Tensor, w: Tensor) -> list[Tensor]:
    for _ in range(4):
        x = (x @ w).sin()
    return [x.cos(), x.sum()]


def region(options: Options) -> LoweredSubgraph:
    body = _compat.make_fx(chain)(torch.ones(SIZE), torch.ones(SIZE))
    return LoweredSubgraph(body, "region", options)


def test_only_results_are_allocated_in_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counting(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = empty_strided_cpu(size, stride, dtype)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(inductor, "empty_strided", counting)
    compiled = region(Options())
    x, w = torch.randn(SIZE), torch.randn(SIZE) / 8
    compiled(x, w)
    assert sizes.count(BYTES) > 1
    sizes.clear()
    compiled(x, w)
    assert sizes == [BYTES, 4] or sizes == [4, BYTES]
    torch.testing.assert_close(list(compiled(x, w)), chain(x, w))


def test_memory_is_given_up_with_its_region() -> None:
    compiled = region(Options())
    for _ in range(3):
        compiled(torch.randn(SIZE), torch.randn(SIZE))
    slab = compiled._workspace.take(0)
    assert slab is not None
    assert slab.size >= BYTES
    gone = weakref.ref(slab)
    del compiled, slab
    gc.collect()
    assert gone() is None


def test_training_is_bit_for_bit_the_same() -> None:
    case = MODELS["convnet"]
    models = []
    for static in (False, True):
        torch.manual_seed(0)
        model = case.make()
        optimizer = OPTIMIZERS["adamw-foreach"](model.parameters())
        step = graphopt.compile(train_step, lower=Options(static_memory=static))
        for index in range(5):
            step(model, optimizer, *case.batch(index))
        models.append(model)
    for a, b in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(a, b)
