"""Operators and modules of torch's databases in a step: results and gradients of eager code, to the
bit, where gradients are asked for and where they are not."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import graphopt
from layouts import Case, Found, compare
from operators import database

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch calls deprecated of its own

SOME = (
    "linalg.svdvals",
    "linalg.eigvalsh",
    "norm.nuc",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.ctc_loss",
    "cumprod",
    "view_as_complex",
    "index_put",
    "prod",
    "masked_fill",
    "masked.median",
    "ormqr",
)
NOT_HERE = ("jiterator", "to_sparse")
"""Only on CUDA, or of a layout that is not compared."""
NOT_CAPTURED = (
    "the random number generator is seeded",  # as the database does
    "Python code depends on the value of a tensor",
    "an operator has no shape rule",
    "the size of a tensor depends on values",
    "argument ",  # of a layout that no argument may have
    "a function of torch takes the values",
    "it differentiates a gradient",
)


def cases_of(name: str, dtype: torch.dtype, count: int) -> Iterator[Case]:
    """The first samples of an operator, with gradients and without; what gives other values when it
    is called once more (memory that nobody has written to) is none."""
    entry = database()[name]
    if not entry.supports_dtype(dtype, "cpu") or "empty" in name:
        return
    differentiable = entry.supports_autograd
    try:
        samples = list(islice(entry.sample_inputs("cpu", dtype, differentiable), count))
    except ImportError:  # the database wants a package that is not installed
        return
    for number, sample in enumerate(samples):
        leaves, nest = tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(tensor.layout is not torch.strided for tensor in tensors):
            continue
        for gradients in (True, False) if differentiable else (False,):
            function = _called(entry.op, leaves, nest, gradients)
            yield Case(f"{name} {dtype} {number} {gradients}", function, tensors)


def _called(op: Any, leaves: list[Any], nest: Any, gradients: bool) -> Callable[..., Any]:
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> Any:
        own = [
            tensor.detach().requires_grad_(leaf.requires_grad)
            for tensor, leaf in zip(tensors, wanted, strict=True)
        ]
        each = iter(own)
        given = [next(each) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        value, args, kwargs = tree_unflatten(given, nest)
        with nullcontext() if gradients else torch.no_grad():
            found = op(value, *args, **kwargs)
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        ends = [each.abs().square().sum() for each in results if each.requires_grad and gradients]
        starts = [tensor for tensor in own if tensor.requires_grad]
        if not ends or not starts:
            return results
        return results, torch.autograd.grad(sum(ends[1:], ends[0]), starts, allow_unused=True)

    return function


def assert_exact(found: Found) -> None:
    assert not found.different, f"{len(found.different)} of {found.tried}: {found.different}"
    unknown = {each for each in found.refused.values() if not each.startswith(NOT_CAPTURED)}
    assert not unknown, f"{len(found.refused)} refused: {unknown}"


@pytest.mark.parametrize("name", SOME)
def test_some_operators(name: str) -> None:
    found = compare(list(cases_of(name, torch.float32, 2)))
    assert found.tried
    assert_exact(found)


@pytest.mark.full
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", range(8))
def test_all_operators(part: int, dtype: torch.dtype) -> None:
    found = Found()
    for name in sorted(database())[part::8]:
        if not name.startswith(NOT_HERE):
            found.add(compare(list(cases_of(name, dtype, 3))))
    assert found.tried > 100
    assert_exact(found)


# ---------------------------------------------------------------------------- modules


def modules() -> list[Any]:
    """torch's own database of modules, with sample inputs, but for those without parameters yet."""
    database()  # which lets it be imported
    name = "torch.testing._internal.common_modules"
    found = importlib.import_module(name).module_db
    return [each for each in found if not issubclass(each.module_cls, LazyModuleMixin)]


def trained(module: nn.Module, optimizer: Any, args: Any, kwargs: Any) -> Any:
    found = module(*args, **kwargs)
    ends = [each.abs().square().sum() for each in tree_leaves(found) if _is_traceable(each)]
    if ends:
        sum(ends[1:], ends[0]).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in tree_leaves(found) if isinstance(each, Tensor)]


def evaluated(module: nn.Module, optimizer: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        found = module(*args, **kwargs)
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def _is_traceable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def left_by(step: Any, module: nn.Module, given: Any, compiled: bool) -> list[Tensor]:
    module = copy.deepcopy(module)
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.9) if parameters else None
    run = graphopt.compile(step, pipeline="none") if compiled else step
    torch.manual_seed(1)
    left: list[Tensor] = []
    for _ in range(2):
        args, kwargs = copy.deepcopy((given.args, given.kwargs))
        left += [each.clone() for each in run(module, optimizer, args, kwargs)]
    return [*left, *module.state_dict().values()]


def check(entry: Any, training: bool, count: int) -> None:
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False}
    for sample in entry.module_inputs_func(entry, training=training, **options)[:count]:
        torch.manual_seed(0)
        made = sample.constructor_input
        module = entry.module_cls(*made.args, **made.kwargs).train(training)
        step, given = trained if training else evaluated, sample.forward_input
        try:
            expected = left_by(step, module, given, False)
        except (RuntimeError, ValueError, TypeError):
            continue
        found = left_by(step, module, given, True)
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), entry.module_cls


@pytest.mark.parametrize("name", ["Transformer", "LSTM", "BatchNorm2d", "MultiheadAttention"])
@pytest.mark.parametrize("training", [True, False])
def test_some_modules(name: str, training: bool) -> None:
    for entry in modules():
        if entry.module_cls.__name__ == name:
            check(entry, training, 2)


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("part", range(8))
def test_all_modules(part: int, training: bool) -> None:
    for entry in modules()[part::8]:
        check(entry, training, 3)
