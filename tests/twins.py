"""The same training run twice, once eagerly and once captured, compared bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import graphopt
from zoo import MODELS, OPTIMIZERS, train_step

SEED = 20


@dataclass
class World:
    """All that one training run owns. `step` takes the models, the optimizers, then a batch."""

    step: Callable[..., Any]
    models: list[nn.Module]
    optimizers: list[Optimizer]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    def state(self) -> dict[str, Any]:
        """Everything a step may change, as nested dicts and lists of live tensors."""
        return {
            "models": [_module_state(model) for model in self.models],
            "optimizers": [_optimizer_state(optimizer) for optimizer in self.optimizers],
        }


def world(
    step: Callable[..., Any] = train_step, model: str = "mlp", optimizer: str = "adamw-foreach"
) -> World:
    """One model of the zoo under one optimizer of the zoo."""
    built = MODELS[model].make()
    return World(step, [built], [OPTIMIZERS[optimizer](built.parameters())])


def _module_state(module: nn.Module) -> dict[str, Any]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
        "gradients": {name: p.grad for name, p in parameters.items()},
        "buffers": dict(module.named_buffers(remove_duplicate=False)),
        "training": {name: m.training for name, m in module.named_modules()},
    }


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    members = [group["params"] for group in optimizer.param_groups]
    return {
        "groups": groups,
        # `.get`: reading a missing key of the state would create it.
        "state": [[optimizer.state.get(p) for p in group] for group in members],
    }


def assert_same(actual: Any, expected: Any, where: str) -> None:
    """Equal structure and equal bits (one NaN equals another)."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: {actual!r} instead of a tensor"
        assert type(actual) is type(expected), f"{where}: {type(actual)} and {type(expected)}"
        _assert_same_tensor(actual.detach(), expected.detach(), where)
        return
    assert type(actual) is type(expected), f"{where}: {actual!r} instead of {expected!r}"
    if isinstance(expected, Mapping):
        assert set(actual) == set(expected), f"{where}: keys {set(actual)} and {set(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{where}: {len(actual)} and {len(expected)} entries"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, e, f"{where}[{i}]")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(actual), f"{where}: {actual!r} instead of nan"
    else:
        assert actual == expected, f"{where}: {actual!r} instead of {expected!r}"


def _assert_same_tensor(actual: Tensor, expected: Tensor, where: str) -> None:
    kinds = [(t.dtype, t.device, tuple(t.shape)) for t in (actual, expected)]
    assert kinds[0] == kinds[1], f"{where}: {kinds[0]} instead of {kinds[1]}"
    if torch.equal(actual, expected):
        return
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    if bool(same.all()):
        return
    gap = float((actual.double() - expected.double()).abs().nan_to_num(math.inf).max())
    raise AssertionError(f"{where}: {int((~same).sum())} elements differ, the largest by {gap}")


def largest_difference(actual: Any, expected: Any) -> float:
    """The largest absolute difference between the tensors of two equal structures."""
    if isinstance(expected, Tensor):
        gap = (actual.detach().double() - expected.detach().double()).abs()
        return float(gap.max()) if gap.numel() else 0.0
    if isinstance(expected, Mapping):
        return max((largest_difference(actual[k], expected[k]) for k in expected), default=0.0)
    if isinstance(expected, (list, tuple)):
        pairs = zip(actual, expected, strict=True)
        return max((largest_difference(a, e) for a, e in pairs), default=0.0)
    assert actual == expected
    return 0.0


class Twins:
    """An eager and a captured run of the world that `build` makes.

    `build` is called once for each twin, after the same `torch.manual_seed(seed)`. `ddp=True` runs
    the eager twin under DistributedDataParallel on the default group. `exact=False` records the
    largest difference instead of asserting that there is none. `ignore` names parts of the models'
    state that are not compared.
    """

    def __init__(
        self,
        build: Callable[[], World],
        *,
        ddp: bool = False,
        ddp_options: Mapping[str, Any] | None = None,
        seed: int = SEED,
        exact: bool = True,
        ignore: Collection[str] = (),
        **options: Any,
    ) -> None:
        self.eager, self.captured = (self._build(build, seed) for _ in range(2))
        self.exact, self.largest_gap = exact, 0.0
        self._ignore = ignore
        self.compiled = graphopt.compile(self.captured.step, **{"pipeline": "none", **options})
        self._outputs: list[tuple[Any, Any]] = []
        self._eager_models = self.eager.models
        if ddp:
            self._eager_models = [_wrap(m, ddp_options or {}) for m in self.eager.models]
        torch.manual_seed(seed)

    @staticmethod
    def _build(build: Callable[[], World], seed: int) -> World:
        torch.manual_seed(seed)
        return build()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the steps inside local, in both twins."""
        with ExitStack() as stack:
            for model in self._eager_models:
                if isinstance(model, DistributedDataParallel):
                    stack.enter_context(model.no_sync())
            stack.enter_context(self.compiled.no_sync())
            yield

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step in both twins, compare everything, return the captured one's output."""
        actual = self.step_unseen(*args, **kwargs)
        self.compare_state()
        return actual

    def step_unseen(self, *args: Any, **kwargs: Any) -> Any:
        """`step`, but nobody reads parameters or state afterwards: late work stays in flight."""
        copies, copied = copy.deepcopy((args, kwargs))
        eager = [*self._eager_models, *self.eager.optimizers]
        captured = [*self.captured.models, *self.captured.optimizers]
        expected, actual = self._with_same_rng(
            lambda: self.eager.step(*eager, *args, **kwargs),
            lambda: self.compiled(*captured, *copies, **copied),
        )
        # What the user keeps must not change later, so every output is looked at again at the end.
        self._outputs.append((actual, expected))
        self._compare(actual, expected, "output")
        self._compare(_with_gradients(copies, copied), _with_gradients(args, kwargs), "arguments")
        return actual

    def both(self, action: Callable[[World], Any]) -> None:
        """Do something between steps to both twins, and compare its results."""
        expected, actual = self._with_same_rng(
            lambda: action(self.eager), lambda: action(self.captured)
        )
        self._compare(actual, expected, "result")
        self.compare_state()

    def compare_state(self) -> None:
        captured, eager = self.captured.state(), self.eager.state()
        for model in (*captured["models"], *eager["models"]):
            for part in self._ignore:
                del model[part]
        self._compare(captured, eager, "state")

    def finish(self, captures: int | None = None) -> None:
        """Flush, compare once more, and check how often the step was captured."""
        self.compiled.flush()
        self.compare_state()
        for i, (actual, expected) in enumerate(self._outputs):
            self._compare(actual, expected, f"output kept from step {i}")
        if captures is not None:
            assert len(self.compiled.captures) == captures

    def _compare(self, actual: Any, expected: Any, where: str) -> None:
        if self.exact:
            assert_same(actual, expected, where)
        else:
            self.largest_gap = max(self.largest_gap, largest_difference(actual, expected))

    @staticmethod
    def _with_same_rng(eager: Callable[[], Any], captured: Callable[[], Any]) -> tuple[Any, Any]:
        before = torch.get_rng_state()
        expected = eager()
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        actual = captured()
        assert torch.equal(torch.get_rng_state(), after), "the final RNG state differs"
        return expected, actual


def _with_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    leaves = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
    return [args, kwargs, [leaf.grad for leaf in leaves if leaf.is_leaf]]


def _wrap(model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    return DistributedDataParallel(model, **{"find_unused_parameters": True, **options})
