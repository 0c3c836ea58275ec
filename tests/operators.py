"""Calls of operators in many layouts: random ones, in-place ones, and all of torch's database."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from layouts import LAYOUTS, Case, laid_out

SHAPES = ((4, 6), (5, 4, 6), (2, 3, 4, 5), (0, 3))

RANDOM: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda t: t.normal_(1, 2),
    "uniform_": lambda t: t.uniform_(-1, 2),
    "exponential_": lambda t: t.exponential_(2.0),
    "bernoulli_.float": lambda t: t.bernoulli_(0.3),
    "bernoulli_.Tensor": lambda t: t.bernoulli_(torch.full_like(t, 0.4)),
    "cauchy_": lambda t: t.cauchy_(),
    "geometric_": lambda t: t.geometric_(0.3),
    "log_normal_": lambda t: t.log_normal_(),
    "random_": lambda t: t.random_(),
    "random_.to": lambda t: t.random_(7),
    "random_.from": lambda t: t.random_(2, 9),
    "dropout": lambda t: torch.dropout(t, 0.4, True),
    "dropout_": lambda t: torch.dropout_(t, 0.4, True),
    "alpha_dropout": lambda t: torch.alpha_dropout(t, 0.4, True),
    "alpha_dropout_": lambda t: torch.alpha_dropout_(t, 0.4, True),
    "feature_dropout": lambda t: torch.feature_dropout(t, 0.4, True),
    "feature_dropout_": lambda t: torch.feature_dropout_(t, 0.4, True),
    "feature_alpha_dropout": lambda t: torch.feature_alpha_dropout(t, 0.4, True),
    "feature_alpha_dropout_": lambda t: torch.feature_alpha_dropout_(t, 0.4, True),
    "native_dropout": lambda t: torch.native_dropout(t, 0.4, True),
    "rrelu": lambda t: torch.rrelu(t, 0.1, 0.4, True),
    "rrelu_": lambda t: torch.rrelu_(t, 0.1, 0.4, True),
    "bernoulli": lambda t: torch.bernoulli(t.sigmoid()),
    "bernoulli.p": lambda t: torch.bernoulli(t, 0.3),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 9),
    "poisson": lambda t: torch.poisson(t.abs()),
    "normal.Tensor_float": lambda t: torch.normal(t, 1.0),
    "normal.Tensor_Tensor": lambda t: torch.normal(t, t.abs()),
    "normal.float_Tensor": lambda t: torch.normal(0.0, t.abs()),
    "multinomial": lambda t: torch.multinomial(t.abs() + 0.1, 2),
    "binomial": lambda t: torch.binomial(t.abs().round() + 1, torch.full_like(t, 0.3)),
    "_standard_gamma": lambda t: torch._standard_gamma(t.abs() + 0.1),
    "_sample_dirichlet": lambda t: torch._sample_dirichlet(t.abs() + 0.1),
    "through detach": lambda t: (t.detach().normal_(), t)[1],
    "through views": lambda t: (t.transpose(0, -1)[1:].normal_(), t)[1],
    "through as_strided": lambda t: _of_base(t.clone()),
    "after clone": lambda t: t.clone().normal_(),
    "in a chain": lambda t: t.exp().normal_().sigmoid_().mul_(3).bernoulli_(0.5),
}
"""Random operators, and ways to draw through views. They may write to their argument."""


def _of_base(tensor: Tensor) -> Tensor:
    tensor.as_strided((2, 3), (1, 2), 1).uniform_()
    return tensor


def random_cases(
    name: str, dtype: torch.dtype, layouts: tuple[str, ...], seed: int
) -> Iterator[Case]:
    """One random operator on every shape, in each of `layouts`."""
    generator = torch.Generator().manual_seed(seed)
    for shape in SHAPES:
        values = torch.randn(shape, generator=generator).to(dtype)
        for layout, tensor in laid_out(values, layouts):
            yield Case(f"{name} {dtype} {list(shape)} {layout}", RANDOM[name], [tensor])


@cache
def database() -> dict[str, Any]:
    """torch's own database of operators, with sample inputs, by name and variant."""
    if "expecttest" not in sys.modules:  # its test cases want it, the database does not
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        stand_in.assert_expected_inline = None
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


def samples(name: str, dtype: torch.dtype, count: int) -> Iterator[tuple[Tensor, Any, Any]]:
    """Input, arguments and keyword arguments of the first `count` samples with a matrix or more."""
    operator = database()[name]
    if not operator.supports_dtype(dtype, "cpu"):
        return
    for sample in operator.sample_inputs("cpu", dtype, requires_grad=False):
        given = sample.input
        if isinstance(given, Tensor) and given.dim() > 1 and given.layout is torch.strided:
            yield given, sample.args, sample.kwargs
            count -= 1
        if not count:
            return


def in_layouts(
    name: str, dtype: torch.dtype, count: int, layouts: tuple[str, ...], shares: int = 1
) -> Iterator[tuple[str, Tensor, Any]]:
    """Samples in each layout, once with the other arguments in that layout, too; with several
    `shares`, each sample in every so many-th layout, by turns."""
    for number, (given, args, kwargs) in enumerate(samples(name, dtype, count)):
        others = any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        for layout, tensor in laid_out(given, layouts[number % shares :: shares]):
            for alike in (False, True) if others else (False,):
                arguments = _laid_out(args, kwargs, layout) if alike else (args, kwargs)
                yield f"{name} {dtype} {number} {layout} {alike}", tensor, arguments


def _laid_out(args: Any, kwargs: Any, layout: str) -> Any:
    def change(leaf: Any) -> Any:
        strided = isinstance(leaf, Tensor) and leaf.layout is torch.strided
        return LAYOUTS[layout](leaf) if strided else leaf

    return tree_map(change, (args, kwargs))


def inplace_cases(
    name: str, dtype: torch.dtype, count: int, layouts: tuple[str, ...]
) -> Iterator[Case]:
    """The in-place form of an operator: on the step's argument, on a value of the step that is read
    through another view afterwards, and on a slice of a larger tensor."""
    function = database()[name].get_inplace()
    for label, tensor, arguments in in_layouts(name, dtype, count, layouts):
        leaves, nest = tree_flatten(arguments)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for way in (_argument, _value, _slice):
            call = _Call(way, function, leaves, nest, places)
            others = [leaves[i] for i in places]
            yield Case(f"{label} {way.__name__}", call, [tensor, *others])


class _Call:
    """`way(function, tensor, args, kwargs)` with tensors in the places of those in the sample."""

    def __init__(self, way: Any, function: Any, leaves: list[Any], nest: Any, places: list[int]):
        self.way, self.function = way, function
        self.leaves, self.nest, self.places = leaves, nest, places

    def __call__(self, tensor: Tensor, *others: Tensor) -> Any:
        leaves = list(self.leaves)
        for place, other in zip(self.places, others, strict=True):
            leaves[place] = other
        args, kwargs = tree_unflatten(leaves, self.nest)
        return self.way(self.function, tensor, args, kwargs)


def _argument(function: Any, tensor: Tensor, args: Any, kwargs: Any) -> None:
    function(tensor, *args, **kwargs)


def _value(function: Any, tensor: Tensor, args: Any, kwargs: Any) -> Any:
    value = tensor.clone()
    view = value.transpose(0, -1)
    function(value, *args, **kwargs)
    return value, view, view.sum()


def _slice(function: Any, tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
    larger = tensor.new_zeros((tensor.shape[0] + 1, *tensor.shape[1:], 2))
    view = larger[1:, ..., 1]
    view.copy_(tensor)
    function(view, *args, **kwargs)
    return larger


_FOREACH = (
    *("abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min"),
    *("copy", "cos", "cosh", "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "log"),
    *("lgamma", "log10", "log1p", "log2", "maximum", "minimum", "mul", "neg", "pow", "reciprocal"),
    *("round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub", "tan", "tanh", "trunc"),
    *("zero", "norm", "max"),
)


def list_operators() -> Iterator[Any]:
    """Every overload of the `_foreach_*`, in place and not."""
    for name in (f"_foreach_{short}{end}" for short in _FOREACH for end in ("", "_")):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            if not overload.endswith("out"):
                yield getattr(packet, overload)


def list_arguments(tensors: list[Tensor], others: list[Tensor]) -> Iterator[tuple[Any, ...]]:
    """Arguments of the kinds that list operators take, for two entries."""
    yield (tensors,)
    for second in (others, 2.0, [2.0, 3.0], torch.tensor(2.0)):
        yield tensors, second
    for third in (0.5, [0.5, 0.25], others):
        yield tensors, others, third
    for last in (0.5, [0.5, 0.25]):
        yield tensors, others, others, last


def cloned(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with tensors of their own."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, args)
