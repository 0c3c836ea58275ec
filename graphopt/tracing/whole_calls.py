"""Functions of the program's that each call of a step calls as a whole, when its graph has run.

    self.meters.update(time=time.time() - begin, **losses)
    logger.logkv_mean(f"loss_q{int(4 * t.item() / steps)}", loss.item())

A step is followed into the functions that it calls, and what they do with numbers of the graph is
done again in each call. Where such a function does what cannot be followed, and nobody uses its
result, it is called itself instead, in the order of the program, with the values of each call, as
`graphopt.callback` calls functions. It may keep what it likes in objects of its own; not so a
function that may use what the step trains, draw random numbers or communicate, or behind which the
step reads what it may have changed: these are followed, and refused for what they do.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.untraced import without_overrides
from graphopt.errors import GraphOptError
from graphopt.host import HostCall
from graphopt.host.functions import name_of
from graphopt.host.seen import ReadBehind
from graphopt.tracing.besides import Besides
from graphopt.tracing.generators import is_same_state, saved_states
from graphopt.tracing.known_functions import is_of_torch
from graphopt.tracing.later import is_constant
from graphopt.tracing.later_values import is_later
from graphopt.tracing.named_calls import Named
from graphopt.tracing.nests import containers_within, leaves_in
from graphopt.tracing.numbers import SYMBOLIC, refusal
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.own_containers import OwnContainers
from graphopt.tracing.reachable import DRAWING_OR_COMMUNICATING, codes_in, names_in, reached_from
from graphopt.tracing.said import found, hand_on
from graphopt.tracing.shared_memory import SharedMemory, refuse_written
from graphopt.tracing.source import is_around_step, is_library_file

Site = tuple[CodeType, int]
"""Where a call stands: the code, and the offset of its instruction."""
_WITH_CACHES = 10
"""So many bytes behind that a frame is, at most, while the call runs."""


class WholeCalls:
    """The calls of one trace whose results nobody uses.

    Args:
        besides: says which are made as a whole.
        is_worked_on: whether a tensor is an input of the step, or a value lies in its memory.
    """

    def __init__(
        self, record: Record, besides: Besides, is_worked_on: Callable[[Any], bool]
    ) -> None:
        self._record, self._is_worked_on = record, is_worked_on
        self._tried, self._sites = besides.whole, besides.whole - besides.followed
        self._seen: set[Site] = set()
        self._showing: dict[Site, bool] = {}
        self._made: list[tuple[Site, HostCall, Uses]] = []
        self._given: list[tuple[Site, SharedMemory]] = []
        self._own: dict[Site, OwnContainers] = {}

    def instead(self, site: Site, callee: Any, args: Sequence[Any]) -> Callable[..., None] | None:
        """What is called in place of a function whose result nobody uses; None: itself.

        Args:
            args: positional and keyword values, the object of a method first.
        """
        if not _is_of_program(callee):
            return None
        self._seen.add(site)
        if site not in self._tried and site not in self._showing and _shows(callee):
            containers = [each for value in args for each in containers_within(value)]
            fit = all(map(self._record.is_outside, containers))  # it may change one of the step's
            self._showing[site] = fit and self._used_by(callee, args) is not None
        uses = self._used_by(callee, args) if site in self._sites else None
        if uses is None:
            return None

        def call(*args: Any, **options: Any) -> None:
            made = hand_on(self._record, _whole, callee, *args, **options)
            self._made.append((site, made, uses))
            graph, given = _compat.current_tracer().graph, [*args, *options.values()]
            tensors = filter(_is_tensor, leaves_in(given))
            self._given += [(site, SharedMemory(tensor, graph)) for tensor in tensors]
            outside = self._record.is_outside
            self._own.setdefault(site, OwnContainers()).add(e for e in given if not outside(e))

        return call

    def around(self, error: BaseException) -> frozenset[Site]:
        """The innermost call in which a trace was refused and which is not to be made as a whole
        yet."""
        within: list[Site] = []
        cause: BaseException | None = error
        while cause is not None:
            within += self._sites_in(cause.__traceback__)
            cause = cause.__cause__
        return frozenset([site for site in within if site not in self._tried][-1:])

    def asked(self, found: Besides) -> None:
        """The step asks for a value, for which its graph would hold alone. Where it does so in a
        function that shows something, that may be called as a whole, whatever the value is.

        Raises:
            CaptureError: it is to be.
        """
        site = self._site_of(sys._getframe(1)) if self._showing else None
        if site is not None and self._showing[site]:
            found.whole |= {site}
            raise refusal("it is to be traced with a function that is called as a whole", "")

    def _site_of(self, frame: FrameType | None) -> Site | None:
        """The innermost call of a function that shows something which is running."""
        while frame is not None and not is_around_step(frame):
            for site in self._showing:
                if site[0] is frame.f_code and 0 <= frame.f_lasti - site[1] <= _WITH_CACHES:
                    return site
            frame = frame.f_back
        return None

    def others(self) -> frozenset[Site]:
        """All calls that are not to be made as a whole yet."""
        return frozenset(self._seen - self._tried)

    def settle(self, found: Besides, graph: fx.Graph) -> None:
        """The step is over. Calls cannot be made as a whole behind which it reads what they may
        change, unless another one does that which may be, or where it changes in place what they
        have been given.

        Args:
            found: takes note of it.
            graph: of the trace.
        """
        read = {
            site
            for site, call, uses in self._made
            if any(self._may_change(uses, each) for each in call.outside.read)
        }
        if read and self.others():
            found.whole |= self.others()
        elif read:
            found.followed |= read
        refuse_written([memory for _, memory in self._given], graph)
        found.followed |= {site for site, memory in self._given if memory.is_written}
        found.followed |= {site for site, own in self._own.items() if not own.are_alone()}
        self._given.clear()  # which hold what the step has computed
        self._own.clear()

    def _may_change(self, uses: Uses, read: ReadBehind) -> bool:
        """Whether a function may change what the step reads behind its call."""
        place = read.place
        if not isinstance(place, OutsidePlace) or uses.sets_anything:
            return True
        if isinstance(place.holder, FunctionType):
            return False
        owner = self._record.owner(place.holder)
        is_cell = isinstance(place.holder, CellType)
        if not is_cell and owner is None and not isinstance(place.holder, type):
            return True
        name = read.path if is_cell else place.key  # all functions call a variable alike
        return name is None or name in uses.changed

    def _sites_in(self, trace: TracebackType | None) -> Iterator[Site]:
        """Where the calls stand that an exception has come through, outermost first."""
        while trace is not None:
            code, offset = trace.tb_frame.f_code, trace.tb_lasti
            for site in self._seen:
                if site[0] is code and 0 <= offset - site[1] <= _WITH_CACHES:
                    yield site
            trace = trace.tb_next

    def _used_by(self, callee: Any, args: Sequence[Any]) -> Uses | None:
        """What a function uses that may be called later; None of others."""
        leaves = list(leaves_in(list(args)))
        if not all(map(self._may_be_given, leaves)) or not all(map(self._is_left, args)):
            return None
        outside = [each for each in leaves if not (is_constant(each) or _is_of_graph(each))]
        with without_overrides():
            reach = reached_from(callee, [*outside, *containers_within(list(args))])
            worked_on = any(map(self._is_worked_on, reach.memories))
        if reach.is_trained or worked_on:
            return None
        uses = Uses.of(callee, reach.functions)
        return uses if DRAWING_OR_COMMUNICATING.isdisjoint(uses.names) else None

    def _is_left(self, argument: Any) -> bool:
        """Whether the step only reads the containers outside in an argument, which are no parts of
        one that each call makes anew."""
        containers = [each for each in containers_within(argument) if self._record.is_outside(each)]
        if any(map(self._record.is_changed, containers)):
            return False
        return not containers or self._record.is_outside(argument)

    def _may_be_given(self, value: Any) -> bool:
        """Whether a function may be given a value later: a tensor that the step has computed, or
        what was there before."""
        if isinstance(value, torch.Tensor):
            own = id(value) not in self._record.stands_for and not value.requires_grad
            return own and _compat.is_fake(value)
        return _is_of_graph(value) or is_constant(value) or self._record.is_outside(value)


def _whole(function: Any, names: tuple[str, ...], *args: Any) -> None:
    """Call a function with names for its last arguments.

    Raises:
        GraphOptError: it does what only a function may do that is followed.
    """
    tensors = [each for each in leaves_in(list(args)) if isinstance(each, torch.Tensor)]
    versions, states = [_compat.version_of(each) for each in tensors], saved_states()
    Named(function, names)(*found(args))
    pairs = zip(saved_states(), states, strict=True)
    drawn = not all(is_same_state(now[1], then[1]) for now, then in pairs)
    if drawn or versions != [_compat.version_of(each) for each in tensors]:
        what = "draws random numbers" if drawn else "changes a tensor in place that it is given"
        raise GraphOptError(
            f"{name_of(function)}, which the step calls as a whole, {what}, which the captured step"
            " would not see\n  hint:  call it behind the step"
        )


def is_whole(call: HostCall) -> bool:
    """Whether a function of the program's is called as a whole."""
    return isinstance(call.fn, partial) and call.fn.func is _whole


def _is_of_graph(value: Any) -> bool:
    kinds = (torch.Tensor, *SYMBOLIC)
    return isinstance(value, kinds) or is_later(value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_of_program(callee: Any) -> bool:
    """Whether a callee is a function in Python, of the program's or of a package's. Of the standard
    library's some give back a lock, which the next trace would wait for."""
    function = getattr(callee, "__func__", callee)
    if not isinstance(function, FunctionType) or is_of_torch(function):
        return False
    code = function.__code__
    waits = code.co_flags & (
        inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    )
    return not waits and not is_library_file(code.co_filename)


def _shows(callee: Any) -> bool:
    """Whether the code of a function says that it shows something, and nothing of exceptions."""
    code = getattr(callee, "__func__", callee).__code__
    if _SHOWING.isdisjoint(code.co_names) or not _ENDING.isdisjoint(code.co_names):
        return False
    return all(step.opname != "RAISE_VARARGS" for step in dis.get_instructions(code))


_SHOWING = frozenset({"print", "stdout", "stderr", "write"})
_ENDING = frozenset({"exit", "_exit", "quit"})


@dataclass(frozen=True)
class Uses:
    """What the code of a function names, and of those that it may call: whatever it can reach that
    has a name which is named.

    Attributes:
        names: all.
        changed: attributes and variables that it sets.
    """

    names: frozenset[str]
    changed: frozenset[str]

    @staticmethod
    def of(callee: Any, reached: Iterable[FunctionType]) -> Uses:
        """What a function uses that can reach others."""
        by_name: dict[str, list[FunctionType]] = {}
        for function in reached:
            by_name.setdefault(function.__name__, []).append(function)
        unnamed = [each for name in by_name if name.startswith("__") for each in by_name[name]]
        pending = [getattr(callee, "__func__", callee), *unnamed]
        seen = set(map(id, pending))
        names: set[str] = set()
        codes: list[CodeType] = []
        while pending:
            code = pending.pop().__code__
            codes += codes_in(code)
            new = set(names_in(code)) - names
            names |= new
            found = [each for name in new for each in by_name.get(name, ())]
            pending += [each for each in found if id(each) not in seen]
            seen.update(map(id, found))
        steps = (step for code in codes for step in dis.get_instructions(code))
        changed = {str(step.argval) for step in steps if step.opname in _SETTING}
        return Uses(frozenset(names), frozenset(changed))

    @property
    def sets_anything(self) -> bool:
        """Whether it may set attributes whose names do not stand in its code."""
        return not self.names.isdisjoint(_REFLECTING)


_SETTING = frozenset(
    {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}
)
_REFLECTING = frozenset(
    {"setattr", "delattr", "vars", "globals", "exec", "eval", "__dict__", "__setattr__",
     "__delattr__", "cell_contents"}
)  # fmt: skip
