"""Draws from a copy of torch's default generator of the CPU, which is one for all threads.

What a capture computes for itself may draw, too: the values that a step decides by, a kernel whose
result shows its layout. Nothing that is put back afterwards could tell what other threads have
drawn meanwhile. So the default generator stays as it is, and operators are given another one.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphopt._compat.fakes import is_fake, is_fake_mode_on
from graphopt._compat.tracers import is_recording


class CopiedGenerator(TorchDispatchMode):
    """While active, operators on the CPU that would draw from the default generator draw from a
    copy of it: the same numbers, also those that kernels draw by calling other operators.

    Args:
        seed: of what is drawn instead; None: as the default generator would draw now.

    Attributes:
        generator: the copy.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator()
        if seed is None:
            self.generator.set_state(torch.random.default_generator.get_state())
        else:
            self.generator.manual_seed(seed)

    @property
    def state(self) -> torch.Tensor:
        """The state of the copy, which decides the next numbers drawn."""
        return self.generator.get_state()

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if not _may_draw(func) or is_fake_mode_on() or is_recording():
            return func(*args, **given)  # a compiler traces: nothing is drawn
        if not _is_plainly_on_cpu((args, given)):
            return func(*args, **given)
        if func.namespace == "graphopt":
            return self.of_state(args)
        if not _takes_generator(func):
            with self:  # for the operators that the kernel calls
                return func.redispatch(_CPU, *args, **given)
        return func(*map(self.instead_of, args), **self.options(func, args, given))

    def of_state(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """The results of the operators by which a graph reads and writes a generator's state."""
        if len(args) == 1:
            return self.state
        self.state = args[0]
        return None

    def instead_of(self, value: Any) -> Any:
        """The copy in place of the default generator; any other value unchanged."""
        return self.generator if value is torch.random.default_generator else value

    def options(self, func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by keyword, with the generator if `args` have none."""
        names = [argument.name for argument in func._schema.arguments]
        if names.index("generator") < len(args):
            return dict(given)
        return {**given, "generator": self.instead_of(given.get("generator")) or self.generator}


_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_STATE = frozenset({"graphopt::get_rng_state", "graphopt::set_rng_state"})


@lru_cache(maxsize=4096)
def _may_draw(func: Any) -> bool:
    """True if an operator's kernel may draw random numbers, as any kernel that is not torch's
    own."""
    if not isinstance(func, OpOverload):
        return False  # it runs graphs or kernels of others
    if func.namespace == "graphopt":
        return func._schema.name in _STATE
    foreign = func.namespace not in ("aten", "prims", "prim", "_c10d_functional", "c10d")
    return foreign or _takes_generator(func) or torch.Tag.nondeterministic_seeded in func.tags


@lru_cache(maxsize=4096)
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _is_plainly_on_cpu(values: Any) -> bool:
    leaves = tree_leaves(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(map(is_fake, tensors)):
        return False
    devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    devices += [leaf.device for leaf in leaves if isinstance(leaf, (torch.Tensor, torch.Generator))]
    plain = all(each.layout is torch.strided and not each.is_quantized for each in tensors)
    return plain and all(device.type == "cpu" for device in devices)
