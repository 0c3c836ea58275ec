"""The parts of guards, alone and together: they say what their slow definitions say."""

from __future__ import annotations

import gc
import random
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree

import graphopt
from graphopt import _compat
from graphopt.graph_utils import environment
from graphopt.guards.modules import ModuleGuards
from graphopt.guards.optimizers import OptimizerGuard
from graphopt.guards.snapshots.joined_snapshots import JoinedSnapshots
from graphopt.guards.snapshots.snapshot import StateSnapshot
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.implicit import ImplicitInputs

Pair = namedtuple("Pair", ["first", "second"])


LEAVES = st.one_of(st.integers(), st.none(), st.text(max_size=3), st.builds(object))


KEYS = st.one_of(st.text(max_size=2), st.integers(0, 1), st.booleans())


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers of all kinds that arguments are."""
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.just(torch.Size([2, 3])),
    )


ARGUMENTS = st.recursive(LEAVES, containers, max_leaves=12)


@given(st.lists(ARGUMENTS, max_size=4), st.dictionaries(st.text(max_size=2), ARGUMENTS, max_size=2))
def test_arguments_are_taken_apart_as_torch_does(args: list[Any], kwargs: dict[str, Any]) -> None:
    expected, specification = _pytree.tree_flatten((tuple(args), kwargs))
    leaves, found = _compat.flatten_arguments(tuple(args), kwargs)
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))
    assert found == specification
    again, wanted = (
        _pytree.tree_unflatten(*each) for each in ((leaves, found), (expected, specification))
    )
    assert repr(again) == repr(wanted)  # 1 and True are equal, and are not the same


def optimizer_of(kind: str) -> torch.optim.Optimizer:
    """An optimizer with something that is held by identity."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    if kind == "attribute":
        optimizer.scale = Scale()  # type: ignore[attr-defined]
    elif kind == "setting":
        optimizer.param_groups[0]["scale"] = Scale()
    elif kind == "method":
        optimizer.step = Scale().apply  # type: ignore[method-assign]
    elif kind == "hook":
        optimizer.register_step_post_hook(Scale())
    else:
        optimizer.param_groups[0]["alpha"] = 0.5 * len(parameters)
    return optimizer


class Scale:
    """Something of a user's."""

    __slots__ = ("__weakref__",)

    def apply(self, *args: Any) -> None:
        """Does nothing."""

    __call__ = apply


def replace(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Put another one in its place, which may well lie where the first one was."""
    if kind == "attribute":
        del optimizer.scale  # type: ignore[attr-defined]
        optimizer.scale = Scale()  # type: ignore[attr-defined]
    elif kind == "setting":
        optimizer.param_groups[0]["scale"] = None
        optimizer.param_groups[0]["scale"] = Scale()
    elif kind == "method":
        del optimizer.step
        optimizer.step = Scale().apply  # type: ignore[method-assign]
    elif kind == "hook":
        hooks = optimizer._optimizer_step_post_hooks
        (key,) = hooks
        del hooks[key]
        hooks[key] = Scale()  # type: ignore[assignment]
    else:
        del optimizer.param_groups[0]["alpha"]
        optimizer.param_groups[0]["alpha"] = 0.25 * len(optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("kind", ["attribute", "setting", "method", "hook", "number"])
def test_what_takes_the_place_of_something_else_is_a_change(kind: str) -> None:
    for _ in range(20):  # in some of them at the same address
        optimizer = optimizer_of(kind)
        guard = OptimizerGuard("optimizer", optimizer)
        assert guard.mismatch(optimizer) is None
        replace(optimizer, kind)
        assert guard.mismatch(optimizer) is not None


def test_equal_numbers_are_no_change() -> None:
    optimizer = optimizer_of("number")
    guard = OptimizerGuard("optimizer", optimizer, frozenset({"alpha"}))
    group = optimizer.param_groups[0]
    group["eps"] = float(str(group["eps"]))
    group["lr"], group["betas"] = 0.7, (0.1, 0.2)
    group["alpha"] = 7.5
    assert guard.mismatch(optimizer) is None
    group["alpha"] = 7  # a count of another type
    assert "'alpha'" in (guard.mismatch(optimizer) or "")
    group["alpha"] = 8.5
    optimizer.load_state_dict(optimizer.state_dict())  # other groups with equal contents
    assert guard.mismatch(optimizer) is None
    optimizer.param_groups[0]["amsgrad"] = True
    assert "'amsgrad'" in (guard.mismatch(optimizer) or "")


@pytest.mark.parametrize("value", [None, True, "fast", (0.9, None), torch.tensor(0.1), Scale()])
def test_what_stands_in_place_of_a_number(value: Any) -> None:
    """As `lr=None` of optimizers that find their own."""
    optimizer = optimizer_of("number")
    group = optimizer.param_groups[0]
    group["lr"] = value
    guard = OptimizerGuard("optimizer", optimizer)
    assert guard.mismatch(optimizer) is None
    group["lr"] = 0.5
    assert "'lr'" in (guard.mismatch(optimizer) or "")
    group["lr"] = value
    group["eps"] = float(str(group["eps"]))  # another object: all is looked at again
    assert guard.mismatch(optimizer) is None


def test_a_guard_keeps_nothing_of_the_user_alive() -> None:
    optimizer = optimizer_of("attribute")
    alive = torch.nn.Linear(1, 1)
    reference = torch.utils.weak.weakref.ref(alive)
    optimizer.owner = alive  # type: ignore[attr-defined]
    guard = OptimizerGuard("optimizer", optimizer)
    del optimizer.owner, alive  # type: ignore[attr-defined]
    gc.collect()
    assert reference() is None
    assert guard.mismatch(optimizer) is not None


def test_modes_are_those_that_torch_names() -> None:
    before = environment()
    kept = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(not kept)  # as `torch.backends.mkldnn.enabled = …`
    try:
        assert environment() != before
    finally:
        torch._C._set_mkldnn_enabled(kept)
    for enable in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_math_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
        torch.use_deterministic_algorithms,
    ):
        was = environment()
        enable(enable is torch.use_deterministic_algorithms)
        assert environment() != was, enable
        enable(enable is not torch.use_deterministic_algorithms)
        assert environment() == was, enable
    with torch.device("meta"):
        assert environment() != before
    torch.set_default_device("meta")
    try:
        assert environment() != before
    finally:
        torch.set_default_device(None)
    assert environment() == before


def test_a_call_decides_anew_with_what_it_uses_besides() -> None:
    model = nn.Linear(1, 1)
    besides = ImplicitInputs(objects=[("model", torch.utils.weak.weakref.ref(model))])
    call = Call(print, (1,), {})
    first = call.using(besides)
    assert first is not None and call.using(besides) is first
    decided = call.deciding((True,))
    again = decided.using(besides)
    assert again is not None and again.decided == (True,) and first.decided == ()
    assert again.leaves[-1] is model


def test_numbers_are_those_of_the_call() -> None:
    """A call that was looked at is not run with numbers of one that was looked at afterwards."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)

    def step(optimizer: torch.optim.Optimizer, scale: float) -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.sum() * scale
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = graphopt.compile(step)
    for scale in (1.5, 2.5, 3.5):
        compiled(optimizer, scale)
    (entry,) = compiled._entries
    first, second = (Call(step, (optimizer, scale), {}) for scale in (4.5, 5.5))
    mode = compiled._communication.mode()
    bound = [call.using(entry.captured.besides) for call in (first, second)]
    for call in bound:
        assert call is not None
        assert entry.guards.structure_mismatch(call, mode) is None
        assert entry.guards.local_mismatch(call) is None
    assert bound[0] is not None and bound[1] is not None
    assert entry.guards.numbers_of(bound[0])[-1] == 4.5
    assert entry.guards.numbers_of(bound[1])[-1] == 5.5


def test_a_function_with_a_closure_variable_that_has_no_value() -> None:
    def doubled(x: torch.Tensor, deep: bool = False) -> torch.Tensor:
        return later(x) if deep else x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        return doubled(x)

    if doubled.__closure__ is None:
        later = step
    compiled = graphopt.compile(step)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), step(torch.ones(2)))
    assert len(compiled.captures) == 1


def test_an_attribute_that_is_computed_when_read_is_compared_by_value() -> None:
    def helper(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale

    def step(x: torch.Tensor) -> torch.Tensor:
        names = helper.__code__.co_varnames  # another tuple each time
        return helper(x, len(names) + 0.5) * helper.__code__.co_argcount

    compiled = graphopt.compile(step)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    (entry,) = compiled._entries
    seen = entry.guards._outside._places
    assert seen.holds()
    assert torch.equal(compiled(torch.ones(2)), step(torch.ones(2)))
    assert entry.guards._outside._places is seen, "nothing was looked at one by one"

    def other(x: torch.Tensor, scale: float) -> torch.Tensor:
        more = x * scale
        return more + 1

    helper.__code__ = other.__code__
    assert torch.equal(compiled(torch.ones(2)), step(torch.ones(2)))
    assert len(compiled.captures) == 2


class TogetherScale:
    power = 1.0


class Recipe:
    """All that a step reads from outside."""

    def __init__(self) -> None:
        self.table: dict[str, Any] = {"weight": 0.5}
        self.names = ["a", "b"]
        self.scale = TogetherScale()


def default_power(x: Tensor, power: float = 1.0) -> Tensor:
    return x * power


def built() -> tuple[nn.Module, torch.optim.Optimizer, Recipe]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.LeakyReLU(0.1), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Recipe()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = default_power(model(x)).square().mean() * recipe.table["weight"]
        if "more" in recipe.table:
            loss = loss * recipe.table["more"]
        loss = loss * len(recipe.names) * recipe.scale.power
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _number(change: int) -> float:
    return 0.5 + change / 8


def _add_or_drop(table: dict[str, Any]) -> None:
    if table.pop("more", None) is None:
        table["more"] = 2


CHANGES: dict[str, Callable[[Any, torch.optim.Optimizer, Recipe, int], object]] = {
    "item": lambda model, optimizer, recipe, n: recipe.table.update(weight=_number(n)),
    "missing": lambda model, optimizer, recipe, n: _add_or_drop(recipe.table),
    "length": lambda model, optimizer, recipe, n: recipe.names.append("c"),
    "class": lambda model, optimizer, recipe, n: setattr(TogetherScale, "power", _number(n)),
    "object": lambda model, optimizer, recipe, n: setattr(recipe, "scale", TogetherScale()),
    "shadowed": lambda model, optimizer, recipe, n: setattr(recipe.scale, "power", _number(n)),
    "default": lambda model, optimizer, recipe, n: setattr(
        default_power, "__defaults__", (_number(n),)
    ),
    "mode": lambda model, optimizer, recipe, n: model.train(not model.training),
    "attribute": lambda model, optimizer, recipe, n: setattr(
        model[2], "negative_slope", _number(n)
    ),
    "submodule": lambda model, optimizer, recipe, n: setattr(model, "1", nn.Dropout(0.0)),
    "setting": lambda model, optimizer, recipe, n: optimizer.param_groups[0].update(
        momentum=_number(n)
    ),
    "rate": lambda model, optimizer, recipe, n: optimizer.param_groups[0].update(
        lr=_number(n) / 64
    ),
    "state": lambda model, optimizer, recipe, n: optimizer.state.clear(),
    "frozen": lambda model, optimizer, recipe, n: model[0].weight.requires_grad_(
        not model[0].weight.requires_grad
    ),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    yield
    TogetherScale.power, default_power.__defaults__ = 1.0, (1.0,)


def run(changes: list[str | None], compiled: bool) -> list[Tensor]:
    """What is left after a call behind each change."""
    TogetherScale.power, default_power.__defaults__ = 1.0, (1.0,)
    model, optimizer, recipe = built()
    step = step_of(model, optimizer, recipe)
    if compiled:
        step = graphopt.compile(step, max_graphs=64)
    data = torch.randn(len(changes), 4, 3, generator=torch.Generator().manual_seed(1))
    left = []
    for number, change in enumerate(changes):
        if change is not None:
            CHANGES[change](model, optimizer, recipe, number)
        left.append(step(data[number]).clone())
    momenta = [state.get("momentum_buffer") for state in optimizer.state.values()]
    return [*left, *model.parameters(), *(each for each in momenta if each is not None)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("calls", [1, 4])
def test_a_change_is_seen(change: str, calls: int) -> None:
    changes: list[str | None] = [None] * calls + [change, None, None]
    for mine, expected in zip(run(changes, True), run(changes, False), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("often", ["item", "rate", "mode", "object", "state"])
def test_what_changes_in_each_call_hides_nothing(often: str, seed: int) -> None:
    generator = random.Random(f"{often} {seed}")
    others = generator.sample([None, *CHANGES], 5)
    changes: list[str | None] = []
    for other in others:
        changes += [often, often, other]
    for mine, expected in zip(run(changes, True), run(changes, False), strict=True):
        assert torch.equal(mine, expected)


class Guard:
    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self.look()

    def look(self) -> None:
        self.unchanged = StateSnapshot()
        self.unchanged.has_items(self.table)


def test_a_guard_that_changes_again_and_again_is_left_to_itself() -> None:
    steady, moving = Guard({"a": 1}), Guard({"b": 0})
    together = JoinedSnapshots([steady, moving])
    assert not together.unchanged()
    together.note()
    for number in range(1, 5):
        assert set(together.unchanged()) == {steady, moving}
        moving.table["b"] = number
        assert not together.unchanged()
        moving.look()
        together.note()
    assert set(together.unchanged()) == {steady}
    moving.table["b"] = 17
    assert set(together.unchanged()) == {steady}
    steady.table["a"] = 2
    assert not together.unchanged()


def test_what_one_guard_forgets_is_kept_by_none() -> None:
    value = nn.Linear(1, 1)
    reference = weakref.ref(value)
    first, second = Guard({"a": value}), Guard({"b": 1})
    together = JoinedSnapshots([first, second])
    together.note()
    assert together.unchanged()
    first.table.clear()
    del value
    gc.collect()
    assert reference() is not None, "it is part of what was there"
    first.unchanged.forget()
    gc.collect()
    assert reference() is None
    assert not first.unchanged.holds()
    assert not together.unchanged()


def test_modules_that_are_forgotten_are_kept_by_none() -> None:
    module = nn.Linear(1, 1)
    weight = weakref.ref(module.weight)
    modules, other = ModuleGuards([("module", module, ())]), Guard({"a": 1})
    together = JoinedSnapshots([modules, other])
    together.note()
    assert modules in together.unchanged()
    del module
    gc.collect()
    assert weight() is not None
    modules.forget()
    gc.collect()
    assert weight() is None
    assert not together.unchanged()
