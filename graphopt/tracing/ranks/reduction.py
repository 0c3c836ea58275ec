"""Markers on gradients and buffers that ranks share, inserted during a trace as DDP would.

Which values that is, and when, is what DistributedDataParallel does. A gradient is marked once its
accumulation is complete: when the step first reads, sets or deletes any gradient, or uses the
memory of one, or is over. Buffers are marked before each forward of a module. What becomes of the
markers is said by a kind of parallelism (`graphopt.parallel`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import nn

from graphopt import _compat
from graphopt._compat.tensors import count_hooks_on_sum
from graphopt.errors import CaptureError, GraphOptError
from graphopt.ir.user_frames import current_location
from graphopt.parallel import OverRanks
from graphopt.parallel.data_parallel import put_received
from graphopt.parallel.markers import Group, reduce_gradient, sync_buffers
from graphopt.tracing.functional.tagging import Tagger
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.layouts.parts_of_storage import overlap


class UnagreedParameterError(GraphOptError):
    """A parameter gets a gradient that the ranks have not agreed to average."""


Use = tuple[str, int]
"""A parameter by its name, and the round of averages of its module in which it is averaged: 0 for
the first in a call. A step that looks at gradients between two backwards has two rounds."""

Ask = Callable[[Sequence[Use], Sequence[torch.Tensor]], Sequence[int]]
"""Tells which parameters any rank has used before a round, given what was sent for them."""


@dataclass(frozen=True)
class AgreedOrder:
    """The parameters that all ranks average in one call, in the agreed order.

    Attributes:
        names: of the parameters that all ranks mark, in launch order.
        used: by this rank in this call, or accumulated before it.
        anywhere: what any rank uses; None where that is not known before the call.
        every_round: ranks use different parameters from one round to the next. Each round averages
            all parameters of its modules then, as DDP does.
        rounds: else, those in which the ranks average a parameter, by its name.
    """

    names: tuple[str, ...]
    used: frozenset[str]
    anywhere: frozenset[Use] | None = None
    every_round: bool = False
    rounds: Mapping[str, Collection[int]] = field(default_factory=dict)

    def position(self, use: Use) -> int:
        """A number for a parameter in a round, the same on all ranks."""
        name, number = use
        return number * len(self.names) + self.names.index(name)


def differ_in_rounds(uses: Sequence[Collection[Use]]) -> bool:
    """True if steps with several rounds of averages use different parameters in them.

    Args:
        uses: what each rank uses.
    """
    several = any(number for theirs in uses for _, number in theirs)
    return several and any(set(theirs) != set(uses[0]) for theirs in uses)


def differ_within_modules(rounds: Mapping[str, Collection[int]], roots: Mapping[str, int]) -> bool:
    """True if a module's parameters are averaged in different rounds.

    Args:
        rounds: by the name of a parameter; empty for one that no rank uses.
        roots: by the same names; see `roots_of_parameters`.
    """
    found: dict[int, Collection[int]] = {}
    used = ((name, each) for name, each in rounds.items() if each)
    return any(found.setdefault(roots[name], each) != each for name, each in used)


@dataclass(frozen=True)
class MarkedCommunication:
    """The communication that a trace marks for a kind of parallelism to expand.

    Attributes:
        parallel: the kind.
        group: ranks that share gradients.
        buffers: the same ranks, as a group that shares buffers.
        agreed: what the ranks average in this call; None before they have agreed.
        accumulated: whether gradients of earlier calls alone are averaged as well.
    """

    parallel: OverRanks
    group: Group
    buffers: Group
    agreed: AgreedOrder | None
    accumulated: bool = True


@dataclass
class GradientMarker:
    """Marks the gradients of one traced step.

    Args:
        parameters: traced parameter by qualified name.
        roots: by the same names, the module that was given which they belong to.
        group: ranks that share gradients.
        agreed: what the ranks have agreed on; None while they have not yet, then every gradient is
            marked in the order it is ready.
        ask: which parameters are used by any rank.
        accumulated: whether gradients of earlier calls alone are marked as well.
        look: is told of each parameter whose gradient is looked at for a round of averages.

    Attributes:
        used: the rounds in which each parameter was marked, in the order they were ready.
    """

    parameters: dict[str, torch.Tensor]
    roots: Mapping[str, int]
    group: Group
    tagger: Tagger
    agreed: AgreedOrder | None
    ask: Ask
    look: Callable[[torch.Tensor], None]
    accumulated: bool = True
    ready: dict[str, None] = field(default_factory=dict)
    earlier: frozenset[str] = frozenset()
    used: dict[str, list[int]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    rounds: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        traced = self.parameters.items()
        self._left_before = {name for name, each in traced if each.grad is not None}
        self._added_to: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, records the gradients that backwards complete, in order."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            self.ready.pop(name, None)
            self.ready[name] = None
            self.used.setdefault(name, [])

        return accumulated

    def begin_backward(self) -> None:
        """Handles the start of a backward. What one before it has left is averaged with what this
        one adds, unless hooks of the program's look at what is accumulated."""
        if any(map(_is_watched, self.parameters.values())):
            self.mark_ready()
        self.earlier = frozenset(self.ready)
        traced = self.parameters.items()
        self._added_to.update(name for name, each in traced if each.grad is not None)

    def refuse_reading(self, tensor: torch.Tensor) -> None:
        """A hook reads the gradient of a tensor while a backward runs.

        Raises:
            CaptureError: the tensor is a parameter, and an earlier backward has left gradients.
        """
        if self.earlier and any(each is tensor for each in self.parameters.values()):
            raise CaptureError(
                "it reads a gradient while a second backward runs, before which the gradients of"
                " the first one have not been averaged over the ranks",
                location=current_location(),
                hint="let the step look at one of them between the two (`model.weight.grad`):"
                " they are averaged there, as by DistributedDataParallel",
            )

    def is_used_by(self, values: Any) -> bool:
        """True if a value shares memory with a gradient that is to be marked."""
        if not self.ready:
            return False
        used = set(_memory_of(_compat.tree_leaves(values)))
        gradients = (self.parameters[name].grad for name in self.ready) if used else ()
        return not used.isdisjoint(_memory_of(gradients))

    def mark_ready(self) -> None:
        """Marks all gradients accumulated since the last marks, in the agreed order."""
        if not self.ready:
            return
        pending, self.ready = self.ready, {}
        together = {self.roots[name] for name in pending}
        for name, parameter in self.parameters.items():
            if self.roots[name] in together:
                self.look(parameter)
        for name in self._accumulated_before(pending):
            pending[name] = None
        for name in pending:
            self.used.setdefault(name, []).append(self.rounds[self.roots[name]])
        if self.agreed is None:
            self._mark(pending)
        else:
            self._mark_agreed(pending, self.agreed)
        for root in together:
            self.rounds[root] += 1

    def _mark_agreed(self, pending: Mapping[str, None], agreed: AgreedOrder) -> None:
        foreign = [name for name in pending if name not in agreed.names]
        if foreign:
            raise UnagreedParameterError(foreign[0])
        missing = {name for name in agreed.names if self._is_missing(name, pending, agreed)}
        sent = self._mark([n for n in agreed.names if n in pending or n in missing], missing)
        if not sent:
            return
        self.asked |= sent.keys()
        uses = [(name, self.rounds[self.roots[name]]) for name in sent]
        answers = self.ask(uses, list(sent.values()))
        for (name, shared), is_used in zip(sent.items(), answers, strict=True):
            if is_used:
                self._put(name, shared)

    def _mark(
        self, names: Collection[str], missing: Container[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Marks gradients; returns what the ranks share of those that are missing here."""
        overlapping = self._overlapping(names)
        sent: dict[str, torch.Tensor] = {}
        later: dict[str, torch.Tensor] = {}
        for name in names:
            shared = self._shared(name)
            if name in missing:
                sent[name] = shared
            elif name in overlapping:
                later[name] = shared  # all are sent before one is overwritten
            else:
                self._put(name, shared)
        for name, shared in later.items():
            self._put(name, shared)
        self._added_to.clear()
        return sent

    def _overlapping(self, names: Iterable[str]) -> set[str]:
        """Returns the parameters whose gradients overlap in memory, as those of `a` and `b` in
        `a.unsqueeze(0) + b` do.

        Raises:
            CaptureError: a backward has added to such a gradient.
        """
        places: defaultdict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for name in names:
            gradient = self.parameters[name].grad
            for key in _memory_of([gradient]):
                assert gradient is not None
                places[key].append((name, gradient))
        found: set[str] = set()
        for there in places.values():
            for (one, gradient), (other, another) in combinations(there, 2):
                if not overlap(gradient, another):
                    continue
                if one in self._added_to or other in self._added_to:
                    raise _are_shared(one, other)
                found |= {one, other}
        return found

    def _accumulated_before(self, pending: Container[str]) -> list[str]:
        """Parameters of the same modules that only have gradients of earlier calls."""
        if not self.accumulated:
            return []
        roots = {self.roots[name] for name in self.parameters if name in pending}
        return [
            name
            for name, parameter in self.parameters.items()
            if name in self._left_before
            and name not in self.used
            and name not in self.asked
            and parameter.requires_grad
            and self.roots[name] in roots
            and parameter.grad is not None
        ]

    def _is_missing(self, name: str, pending: Container[str], agreed: AgreedOrder) -> bool:
        """True if this rank does not use a parameter, and sends zeros for it now: together with its
        module's others, or with the first parameter if it uses none of the module."""
        if name in pending or (name in agreed.used and not agreed.every_round):
            return False
        together = [n for n in agreed.names if self.roots[n] == self.roots[name]]
        if agreed.used.isdisjoint(together):
            return name not in self.asked
        rounds = () if agreed.every_round else agreed.rounds.get(name, ())
        if rounds and self.rounds[self.roots[name]] not in rounds:
            return False
        return any(n in pending for n in together)

    def _shared(self, name: str) -> torch.Tensor:
        """Marks a gradient, or zeros if there is none. Returns what the ranks share."""
        parameter = self.parameters[name]
        gradient = parameter.grad
        with torch.no_grad(), self.tagger.sending(name):
            if gradient is None:
                return reduce_gradient(torch.zeros_like(parameter), name, self.group)
            if gradient.layout is not torch.strided:
                raise _is_sparse(name)
            return reduce_gradient(gradient, name, self.group)

    def _put(self, name: str, shared: torch.Tensor) -> None:
        """Stores the marked gradient in its parameter."""
        parameter = self.parameters[name]
        with torch.no_grad(), self.tagger.sending(name):
            gradient = parameter.grad
            if gradient is None or gradient.requires_grad:
                parameter.grad = shared
            else:
                gradient.copy_(shared)  # in place: as DDP does, whoever holds it has the average


def _is_watched(parameter: torch.Tensor) -> bool:
    """True if the program has post-accumulate hooks on a parameter."""
    return count_hooks_on_sum(parameter) > 1


def _memory_of(values: Iterable[Any]) -> Iterator[int]:
    """Yields the storage keys of dense tensors among values."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield _compat.storage_key(value)


def _are_shared(one: str, other: str) -> CaptureError:
    return CaptureError(
        f"the gradients of {one} and {other} share memory, to which a backward has added, when they"
        " are averaged over the ranks: under DistributedDataParallel it depends on its buckets"
        " which average is left there",
        location=current_location(),
        hint="give each parameter a gradient of its own: p.grad = q.grad.clone()",
    )


def _is_sparse(name: str) -> CaptureError:
    return CaptureError(
        f"the gradient of {name} is sparse, and a graph shares dense ones between ranks",
        hint="make it dense: Embedding(sparse=False); or let the step run eagerly:"
        " graphopt.compile(fallback='eager')",
    )


def mark_buffers(module: nn.Module, group: Group) -> None:
    """Marks a module's buffers, and replaces their values by the marker's results."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.numel()}
    if not buffers:
        return
    given = list(buffers.values())
    put_received(given, sync_buffers(given, list(buffers), group))


def roots_of_parameters(modules: Sequence[torch.nn.Module], inputs: Inputs) -> dict[str, int]:
    """Maps each parameter's name to the number of its root module, or -1."""
    roots: dict[int, int] = {}
    for number, root in enumerate(modules):
        for parameter in root.parameters():
            roots.setdefault(id(parameter), number)
    return {e.fqn: roots.get(id(e.tensor), -1) for e in inputs.parameters}
