"""Ways in which a step reads, sets, deletes or writes gradients, and steps that do so between any
two of their backward passes, the clipping and the update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Three layers of one size, one that only some ranks use, and one that none uses."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.spare = nn.Linear(3, 3) if spare else None
        self.never = nn.Linear(3, 3) if spare else None

    def forward(self, x: Tensor, uses_spare: bool) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(x)))
        if self.spare is not None and uses_spare:
            hidden = hidden + self.spare(x)
        result: Tensor = self.last(hidden)
        return result


@dataclass
class Trained:
    """What a step works on.

    Attributes:
        held: gradients that an earlier part of the step has got hold of.
    """

    model: Net
    optimizer: torch.optim.Optimizer
    rank: int
    held: dict[str, Tensor] = field(default_factory=dict)

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    @property
    def own(self) -> float:
        """A number that each rank has for itself."""
        return 0.25 * (self.rank + 1)


Access = Callable[[Trained], Any]
"""Gives what it has read, if anything."""

ACCESSES: dict[str, Access] = {}


def _access(function: Access) -> Access:
    ACCESSES[function.__name__] = function
    return function


@_access
def none_by_named_parameters(t: Trained) -> None:
    for name, parameter in t.model.named_parameters():
        if name.startswith("second."):
            parameter.grad = None


@_access
def none_by_parameters(t: Trained) -> None:
    for parameter in list(t.model.parameters())[:2]:
        parameter.grad = None


@_access
def none_by_get_parameter(t: Trained) -> None:
    t.model.get_parameter("second.weight").grad = None


@_access
def none_by_param_groups(t: Trained) -> None:
    for parameter in t.optimizer.param_groups[0]["params"][2:4]:
        parameter.grad = None


@_access
def none_by_attribute(t: Trained) -> None:
    t.model.second.bias.grad = None


@_access
def none_by_setattr(t: Trained) -> None:
    setattr(t.model.first.weight, "grad", None)  # noqa: B010 - the way is what is tried


@_access
def none_by_descriptor(t: Trained) -> None:
    torch.Tensor.grad.__set__(t.model.first.weight, None)  # type: ignore[attr-defined]


@_access
def deleted(t: Trained) -> None:
    del t.model.second.weight.grad


@_access
def deleted_by_delattr(t: Trained) -> None:
    for parameter in t.model.last.parameters():
        delattr(parameter, "grad")


@_access
def all_none(t: Trained) -> None:
    for parameter in t.model.parameters():
        parameter.grad = None


@_access
def zeroed_part_to_none(t: Trained) -> None:
    t.model.second.zero_grad()


@_access
def zeroed_part(t: Trained) -> None:
    t.model.second.zero_grad(set_to_none=False)


@_access
def zeroed_by_optimizer(t: Trained) -> None:
    t.optimizer.zero_grad(set_to_none=False)


@_access
def none_by_optimizer(t: Trained) -> None:
    t.optimizer.zero_grad()


@_access
def zeroed_in_place(t: Trained) -> None:
    for parameter in t.model.second.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


@_access
def own_values(t: Trained) -> None:
    t.model.first.weight.grad = torch.full((3, 3), t.own)


@_access
def own_values_of_all(t: Trained) -> None:
    for parameter in t.model.parameters():
        parameter.grad = torch.full_like(parameter, t.own)


@_access
def own_values_of_unused(t: Trained) -> None:
    for module in (t.model.spare or t.model.first, t.model.never):
        if module is not None:
            module.bias.grad = torch.full((3,), t.own)


@_access
def swapped(t: Trained) -> None:
    one, two = t.model.first.weight, t.model.second.weight
    one.grad, two.grad = two.grad, one.grad


@_access
def moved_on(t: Trained) -> None:
    t.model.first.weight.grad, t.model.second.weight.grad = t.model.second.weight.grad, None


@_access
def scaled_anew(t: Trained) -> None:
    for parameter in t.model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * t.own


@_access
def data_replaced(t: Trained) -> None:
    if t.model.first.weight.grad is not None:
        t.model.first.weight.grad.data = torch.full((3, 3), t.own)


@_access
def data_written(t: Trained) -> None:
    if t.model.first.weight.grad is not None:
        t.model.first.weight.grad.data.mul_(t.own)


@_access
def scaled_in_place(t: Trained) -> None:
    for gradient in t.gradients:
        gradient.mul_(t.own)


@_access
def part_written(t: Trained) -> None:
    if t.model.last.weight.grad is not None:
        t.model.last.weight.grad[0] = t.own


@_access
def view_written(t: Trained) -> None:
    if t.model.last.weight.grad is not None:
        t.model.last.weight.grad.view(-1)[1:3].add_(t.own)


@_access
def foreach_scaled(t: Trained) -> None:
    if t.gradients:
        torch._foreach_mul_(t.gradients, t.own)


@_access
def foreach_zeroed(t: Trained) -> None:
    if t.gradients:
        torch._foreach_zero_(t.gradients)


@_access
def clipped_by_value(t: Trained) -> None:
    if t.model.second.weight.grad is not None:
        nn.utils.clip_grad_value_(t.model.second.parameters(), 0.01)


@_access
def norm_read(t: Trained) -> Tensor:
    return torch.stack([gradient.norm() for gradient in t.gradients] or [torch.zeros(())])


@_access
def asked_for_none(t: Trained) -> Tensor:
    return torch.tensor([float(p.grad is None) for p in t.model.parameters()])


@_access
def copied(t: Trained) -> Tensor | None:
    gradient = t.model.second.weight.grad
    return None if gradient is None else gradient.clone()


@_access
def returned(t: Trained) -> Tensor | None:
    return t.model.second.weight.grad


@_access
def frozen(t: Trained) -> None:
    for parameter in t.model.second.parameters():
        if parameter.grad is not None:
            parameter.grad.requires_grad_(False)


@_access
def held_written(t: Trained) -> None:
    """A gradient is got hold of, and written to without anything being asked of its parameter."""
    held = t.held.get("second")
    if held is not None:
        held.mul_(t.own)
    elif t.model.second.weight.grad is not None:
        t.held["second"] = t.model.second.weight.grad


@_access
def held_read(t: Trained) -> Tensor | None:
    held = t.held.get("second")
    if held is not None:
        return held * 2
    if t.model.second.weight.grad is not None:
        t.held["second"] = t.model.second.weight.grad
    return None


@_access
def held_returned(t: Trained) -> Tensor | None:
    held = t.held.pop("second", None)
    if held is None and t.model.second.weight.grad is not None:
        t.held["second"] = t.model.second.weight.grad
    return held


@_access
def flat_written(t: Trained) -> None:
    """All gradients of a layer are parts of one tensor, which is written to as a whole."""
    flat = t.held.get("flat")
    if flat is not None:
        flat.mul_(t.own)
        return
    flat = t.held["flat"] = torch.zeros(12)
    t.model.second.weight.grad = flat[:9].view(3, 3)
    t.model.second.bias.grad = flat[9:]


@_access
def held_all_scaled(t: Trained) -> None:
    held = [value for key, value in t.held.items() if key.startswith("all")]
    if held:
        torch._foreach_mul_(held, t.own)
    t.held.update((f"all {number}", each) for number, each in enumerate(t.gradients))


@_access
def held_part_written(t: Trained) -> None:
    """A view of a gradient outlives the backward that comes next."""
    if "row" in t.held:
        t.held["row"].fill_(t.own)
    elif t.model.last.weight.grad is not None:
        t.held["row"] = t.model.last.weight.grad[0]


@_access
def held_in_a_loss(t: Trained) -> Tensor | None:
    held = t.held.get("second")
    if held is None and t.model.second.weight.grad is not None:
        t.held["second"] = t.model.second.weight.grad
    return None if held is None else (held * t.model.second.weight).sum().detach()


@_access
def norm_clipped_of_a_part(t: Trained) -> Tensor:
    return nn.utils.clip_grad_norm_(t.model.second.parameters(), 0.01)


@_access
def norm_clipped_of_one(t: Trained) -> Tensor:
    return nn.utils.clip_grad_norm_(t.model.last.weight, 0.01, foreach=False)


@_access
def only_those_with_gradients(t: Trained) -> None:
    for parameter in filter(lambda p: p.grad is not None, t.model.parameters()):
        parameter.grad = parameter.grad + t.own * parameter.detach()


@_access
def large_ones_none(t: Trained) -> None:
    for name, parameter in t.model.named_parameters():
        if parameter.dim() > 1 and not name.startswith("last"):
            parameter.grad = None


@_access
def shared_by_two(t: Trained) -> None:
    t.model.first.bias.grad = t.model.second.bias.grad


@_access
def copied_over(t: Trained) -> None:
    one, two = t.model.first.weight.grad, t.model.second.weight.grad
    if one is not None and two is not None:
        one.copy_(two)


@_access
def put_aside_and_back(t: Trained) -> None:
    weight = t.model.second.weight
    kept, weight.grad = weight.grad, None
    weight.grad = kept


@_access
def taken_by_getattr(t: Trained) -> list[Tensor]:
    found = (getattr(p, "grad", None) for p in t.model.first.parameters())
    return [gradient * 1.0 for gradient in found if gradient is not None]


@_access
def no_more_trained(t: Trained) -> None:
    """A layer's gradients are dropped by its name, as where it is frozen for some epochs."""
    for name, module in t.model.named_children():
        if name == "last":
            for parameter in module.parameters():
                parameter.grad = None


def _hook(install: Callable[[Trained], None]) -> Callable[[Trained], None]:
    HOOKS[install.__name__] = install
    ACCESSES[install.__name__] = _nothing
    return install


def _nothing(t: Trained) -> None:
    """The hook does it."""


HOOKS: dict[str, Callable[[Trained], None]] = {}
"""Hooks that are there from the beginning, by their access."""


@_hook
def hook_scales(t: Trained) -> None:
    t.model.second.weight.register_hook(lambda gradient: gradient * t.own)


@_hook
def hook_writes_what_is_accumulated(t: Trained) -> None:
    def write(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(t.own)

    t.model.second.weight.register_post_accumulate_grad_hook(write)


@_hook
def hook_reads_what_is_accumulated(t: Trained) -> None:
    """A norm is taken in the backward, and added to a gradient that comes later."""

    def read(parameter: Tensor) -> None:
        if parameter.grad is not None:
            t.held["norm"] = parameter.grad.norm()

    t.model.last.weight.register_post_accumulate_grad_hook(read)
    t.model.first.weight.register_hook(lambda gradient: gradient + t.held["norm"])


@_hook
def hook_reads_the_gradient_before(t: Trained) -> None:
    def add(gradient: Tensor) -> Tensor:
        before = t.model.second.weight.grad
        return gradient if before is None else gradient + 0.5 * before

    t.model.second.weight.register_hook(add)


@_hook
def hook_of_a_module_reads(t: Trained) -> None:
    def read(module: nn.Module, given: Any, gradients: Any) -> Any:
        before = t.model.last.weight.grad
        return None if before is None else (gradients[0] + before.sum(),)

    t.model.second.register_full_backward_pre_hook(
        lambda module, gradients: read(module, None, gradients)
    )


AVERAGED_EACH = {"hook_writes_what_is_accumulated", "hook_reads_what_is_accumulated"}
"""Hooks that look at what a backward accumulates: the gradients of each are averaged."""

PLACES = {
    "before": "A backward update",
    "to_update": "backward A update",
    "to_clip": "backward A clip update",
    "behind_clip": "backward clip A update",
    "behind": "backward clip update A",
    "between_backwards": "backward A backward update",
    "around_backwards": "backward A backward A update",
    "behind_two_backwards": "backward backward A update",
    "around_clip": "backward A clip A update",
    "around_update": "backward A update A",
}
"""Where a step accesses gradients: `A`."""


def step_of(
    trained: Trained,
    net: nn.Module,
    place: str,
    access: Access,
    local: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Callable[..., Any]:
    """A training step.

    Args:
        net: the model, or what averages its gradients.
        local: averages nothing while it is entered.
    """
    parts = [part for part in PLACES[place].split() if part != "A" or access is not _nothing]
    following = [*parts[1:], ""]

    def step(x: Tensor, uses_spare: bool) -> Any:
        read = []
        trained.held.clear()
        trained.optimizer.zero_grad()
        for number, (part, then) in enumerate(zip(parts, following, strict=True)):
            if part == "A":
                read.append(access(trained))
            elif part == "backward":
                with local() if local and then == "backward" else nullcontext():
                    net(x * (1.0 + number), uses_spare).square().mean().backward()
            elif part == "clip":
                read.append(nn.utils.clip_grad_norm_(trained.model.parameters(), 0.05))
            else:
                trained.optimizer.step()
        trained.held.clear()
        return read

    return step
