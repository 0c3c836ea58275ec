"""Takes values from iterators outside a step while it is traced.

    batch = next(self.loader)      the graph takes what is in the batch, as if it were an argument

The iterator is advanced before the graph of a call runs, and between two traces of a step rather
than within one: its code is neither observed nor undone. So it is to have nothing to do with what
the step has done by then: what the step computes is computed when the graph runs.
"""

from __future__ import annotations

import functools
import io
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.host import HostCall
from graphopt.ir.operators import draws, written
from graphopt.tracing.call import Call
from graphopt.tracing.draws.arguments import Known
from graphopt.tracing.draws.memory import OfTensors
from graphopt.tracing.draws.parts import ItemAt, made_like, parts_of, said_key, structure_of
from graphopt.tracing.draws.program import ArgumentAt
from graphopt.tracing.draws.reaching import may_be_apart, reaches
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.draws.taken import NeedsValueError, PlaceOf, TakenValues, Taking, saved_states
from graphopt.tracing.inputs import Inputs
from graphopt.tracing.number_expressions import Application, Leaf
from graphopt.tracing.outside.native import is_iterator
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.said import only_says
from graphopt.tracing.source import current_user_line
from graphopt.tracing.substitute import Traced
from graphopt.tracing.whole_calls import is_whole

_HINT = "take it outside the step, and pass it as an argument"
_BEHIND_DRAWS = "behind random numbers that the step draws with torch, where it draws as well"
_DEPTH, _MANY = 8, 1000
_MOST = 32
_GOING_OVER = (enumerate, zip, list, tuple, itertools.islice)
_FUNCTIONS: dict[int, Callable[[Any], Any]] = {id(next): next, id(iter): iter}
_METHODS: dict[str, Callable[[Any], Any]] = {"__next__": next, "__iter__": iter, "send": next}


class TakenInTrace:
    """What the step of one trace takes from iterators.

    Args:
        leaves: the arguments of the call.
        taken: what the call has taken.
        model: modules, optimizers and their tensors.
        others: further tensors that the step works on, each with its stand-in.
        begun: whether the step has changed a gradient.
    """

    def __init__(
        self,
        calls: HostCalls,
        record: Record,
        leaves: Sequence[Any],
        taken: TakenValues,
        model: Iterable[Any],
        others: Iterable[tuple[torch.Tensor, torch.Tensor]],
        begun: Callable[[], bool],
    ) -> None:
        self._calls, self._record, self._leaves = calls, record, leaves
        self._taken, self._model, self._begun = taken, list(model), begun
        self._tensors = [each for each in self._model if isinstance(each, torch.Tensor)]
        self._others = [(real, each, _version(each)) for real, each in others]
        self._given: list[tuple[torch.Tensor, int]] = []
        self._iterators: list[tuple[Any, str]] = []

    def __call__(self, callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What is called in place of a function; None: itself."""
        if self._taken.refused:
            return None
        function, given = _FUNCTIONS.get(id(callee)), list(args)
        if any(callee is each for each in _GOING_OVER) and any(map(self._is_gone_over, given)):
            return lambda *all_given, **options: callee(*map(self.iterated, all_given), **options)
        if function is None:
            function, given = _asked_by_method(callee, given)
            if function is next and not _is_without_code(given[0]):
                return None
        few = len(given) == 1 or (len(given) == 2 and callee is next)
        if function is None or not few or not self._is_asked(function, given[0]):
            return None
        source = self._source(given[0])
        if source is None:
            return None
        take = functools.partial(self._take, function, given[0], *source)
        return lambda *_: take() if len(given) == 1 else _or_default(take, given[1])

    def given_to(self, others: Callable[[Any, Sequence[Any]], Any]) -> Callable[..., Any]:
        """What else a call is given whose function is replaced here, or by others; None for any
        other call."""

        def given(callee: Any, args: Sequence[Any]) -> Sequence[Any] | None:
            found: Sequence[Any] | None = () if self(callee, args) else others(callee, args)
            return found

        return given

    def _is_asked(self, function: Callable[[Any], Any], asked: Any) -> bool:
        """Whether a function asks an iterator or a loader that was there before."""
        if isinstance(asked, IteratorOfCall):
            return True
        if function is iter:
            return self._is_loader(asked)
        given = hasattr(asked, "__next__") and not isinstance(asked, (io.IOBase, torch.Tensor))
        outside = given and self._calls.is_outside(asked)
        return outside and not self._record.is_made_here(asked)

    def _is_gone_over(self, value: Any) -> bool:
        return self._is_loader(value) or (
            not isinstance(value, Steps) and self._is_asked(next, value)
        )

    def _is_loader(self, value: Any) -> bool:
        return isinstance(value, DataLoader) and self._calls.is_outside(value)

    def iterated(self, value: Any) -> Any:
        """What a loop goes over in place of a loader or an iterator; anything else itself."""
        if self._taken.refused:
            return value
        if self._is_loader(value):
            begin = self(iter, (value,))
            return value if begin is None else begin()
        source = self._source(value) if self._is_asked(next, value) else None
        if source is None:
            return value
        return Steps(functools.partial(self._take, next, value, *source))

    def _source(self, asked: Any) -> tuple[Any, str] | None:
        """What gives the object in each call, and how messages name it."""
        if isinstance(asked, IteratorOfCall):
            return None, asked.path
        path = self._record.path(asked, type(asked).__name__)
        for position, leaf in enumerate(self._leaves):
            if leaf is asked:
                return ArgumentAt(position), path
        places = [each for each in self._record.places_of(asked) if _is_one(each)]
        return (PlaceOf(places[0]), path) if len(places) == 1 else None

    def _take(self, function: Callable[[Any], Any], asked: Any, find: Any, path: str) -> Any:
        calls, args = self._calls, tuple[Any, ...]()
        anew = not isinstance(asked, IteratorOfCall)
        if isinstance(asked, IteratorOfCall):
            args, asked = (asked.expression,), asked.plain
        self._refuse_unlike(asked, path)
        if self._taken.is_at_end:
            self._ask(function, asked, path)
        taken, behind = self._taken.next(function, asked), self._is_behind_draws(asked, path, anew)
        if behind and taken.draws_with_torch:
            self._refuse(path, _BEHIND_DRAWS)
        for generator, state in taken.left:
            if generator is not torch.random.default_generator:
                calls.leave(generator, state)
        if taken.error is not None:
            self._taken.ended = (taken.error, self._has_begun(), _location())
        ends = isinstance(taken.error, StopIteration)
        source = Taking(function, find, type(asked), path, ends, behind)
        index = calls.taken(source, args, f"{function.__name__}({path})")
        if function is next:
            self._forget(find)
        value = source(taken)
        if isinstance(taken.error, StopIteration):
            raise taken.error
        if function is iter:
            found = IteratorOfCall(calls, source, Leaf(index), value)
            found.take = functools.partial(self._take, next, found, None, found.path)
            return found
        structure = structure_of(value)
        calls.by_value(Application(structure_of, (Leaf(index),)), structure)
        return self._nest(Known(Leaf(index), value), value, (), path)

    def _has_begun(self) -> bool:
        """Whether the step has done anything by now that others see."""
        updates = any(written(node) or draws(node) for node in self._calls.nodes())
        return updates or self._begun() or bool(self._record.changed_holders())

    def _ask(self, function: Callable[[Any], Any], asked: Any, path: str) -> None:
        """Let the value be taken, and the step be traced again."""
        if len(self._taken) == _MOST:
            raise self._calls.refused(
                f"it takes more than {_MOST} values from iterators in one call ({path})",
                "let the step be what is done with one batch, and call it for each",
            )
        states = saved_states(torch_s=False)
        reads = [(r.place, r.value, r.path) for r in self._record.reads.values()]
        error = NeedsValueError(function, asked, states, path, _location(), reads)
        raise self._calls.noted(error)

    def _forget(self, find: Any) -> None:
        """Each call may find another iterator."""
        if isinstance(find, PlaceOf):
            self._record.finds_anew(find.place)

    def _refuse_unlike(self, iterator: Any, path: str) -> None:
        """Refuse what cannot be done before the graph runs as it is done in the step."""
        calls = self._calls
        behind = [call for call in calls.functions_called() if not only_says(call)]
        called = [each for call in behind for each in (call.fn, *call.constants)]
        if called and not (all(map(_is_followed, behind)) and may_be_apart(iterator, called)):
            self._refuse(path, "behind a function on the host, which may change what it gives")
        changed = [*self._model, *self._record.changed_holders()]
        met = reaches(iterator, changed, (torch.nn.Parameter, torch.optim.Optimizer))
        if met is not None:
            self._refuse(path, f"whose code may use what the step changes ({met})")
        self._iterators.append((iterator, path))

    def _is_behind_draws(self, asked: Any, path: str, anew: bool) -> bool:
        """Whether the step has drawn random numbers by now, which torch draws when the graph runs;
        not for who draws there as well.

        Args:
            anew: a loader may begin anew, which draws.
        """
        if not any(map(draws, self._calls.nodes())):
            return False
        if anew and (_is_of_torch(asked) or reaches(asked, (), (DataLoader,))):
            self._refuse(path, f"{_BEHIND_DRAWS}, as a DataLoader that begins anew does")
        return True

    def _refuse(self, path: str, how: str) -> None:
        raise self._calls.refused(f"it takes a value from {path}, an iterator, {how}", _HINT)

    # ------------------------------------------------------------------ what the step gets

    def _nest(self, known: Known, value: Any, at: tuple[Any, ...], path: str) -> Any:
        parts = parts_of(value)
        if len(at) > _DEPTH or (parts is not None and len(parts) > _MANY):
            self._refuse(path, "which gives deep or long lists")
        if parts is not None:
            inner = [
                self._nest(known, each, (*at, key), f"{path}{said_key(key)}") for key, each in parts
            ]
            return made_like(value, parts, inner)
        part = ItemAt(at, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(part, known, value, path)
        return self._calls.apply(part, (known,))

    def _tensor(self, part: ItemAt, known: Known, value: torch.Tensor, path: str) -> torch.Tensor:
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if not plain or value.requires_grad:
            self._refuse(path, f"which gives a {_described(value)}")
        apart = ApartFrom(self._tensors)
        with _compat.without_modes():
            if not apart(value):
                self._refuse(path, "which gives a tensor in the memory of one of the model")
            if value.is_inference():
                self._refuse(path, "which gives a tensor made under torch.inference_mode()")
        stand_in = self._calls.tensor(part, (known,))
        index = self._calls.last_index()
        self._calls.by_value(Application(apart, (Leaf(index),)), True)
        self._given.append((stand_in, _version(stand_in)))
        return stand_in

    def finish(self) -> None:
        """The step is over, and has caught what iterators have raised.

        Raises:
            CaptureError: it has changed what it has been given in place.
        """
        self._taken.forget_raised()
        if any(_version(tensor) != version for tensor, version in self._given):
            raise CaptureError(
                "it changes a tensor in place that it has taken from an iterator",
                hint="change a copy: batch.clone(); or take it outside the step",
            )
        changed = [
            real
            for real, now, version in self._others
            if now.is_inference() or _version(now) != version
        ]
        for iterator, path in self._iterators if changed else ():
            if reaches(iterator, changed):
                self._refuse(path, "whose code may use a tensor that the step changes")


def _version(tensor: torch.Tensor) -> int:
    """What counts the changes of a tensor. Those of inference mode have none."""
    return -1 if tensor.is_inference() else _compat.version_of(tensor)


class Steps:
    """What a loop goes over in place of an iterator.

    Args:
        take: gives the next value.
    """

    def __init__(self, take: Callable[[], Any]) -> None:
        self.take = take

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        return self.take()


class IteratorOfCall(Known, Steps):
    """What stands for an iterator that the step makes: each call makes its own."""

    def __init__(self, calls: HostCalls, source: Taking, expression: Leaf, plain: Any) -> None:
        Known.__init__(self, expression, plain)
        self.calls, self.path = calls, f"iter({source.path})"


class ApartFrom(OfTensors):
    """Says whether a tensor has no memory in common with others."""

    __name__ = "apart"

    def __call__(self, value: torch.Tensor) -> bool:
        key = _compat.storage_key(value)
        return all(_compat.storage_key(each) != key for each in self.tensors)


def _is_followed(call: HostCall) -> bool:
    """Whether a function of the host's is one of which is known what it may change: a step of a
    scheduler, one that is called as a whole, what reads settings or writes to arrays."""
    function = call.fn
    owner = getattr(function, "__self__", function)
    if isinstance(owner, LRScheduler) or is_whole(call):
        return True
    if isinstance(function, functools.partial):
        return not hasattr(function.func, "__code__")
    return type(owner).__module__.startswith("graphopt.tracing.")


def _location() -> str | None:
    line = current_user_line()
    return None if line is None else str(line)


def _asked_by_method(callee: Any, args: list[Any]) -> tuple[Callable[[Any], Any] | None, list[Any]]:
    """The function that does what a method does, bound or not, and what that one is given; None
    where there is none."""
    name = getattr(callee, "__name__", "")
    function = _METHODS.get(name)
    owner = getattr(callee, "__self__", None)
    given = args if owner is None else [owner, *args]
    if function is None or name != "send":
        return function, given
    begins = len(given) == 2 and given[1] is None and isinstance(given[0], types.GeneratorType)
    return (function if begins else None), given[:1]


def _is_without_code(iterator: Any) -> bool:
    """Whether no code of the step's gives the values of an iterator."""
    stands_for_one = isinstance(iterator, IteratorOfCall)
    return stands_for_one or _is_of_torch(iterator) or is_iterator(iterator)


def _is_of_torch(iterator: Any) -> bool:
    return type(iterator).__module__.startswith("torch.utils.data.")


def _or_default(take: Callable[[], Any], default: Any) -> Any:
    try:
        return take()
    except StopIteration:
        return default


def taken_from_iterators(
    call: Call, inputs: Inputs, traced: Traced, calls: HostCalls, record: Record
) -> TakenInTrace:
    """What the step of one trace takes from iterators: nothing yet."""
    entries = inputs.module_tensors
    modules = [module for _, module in call.named_submodules()]
    tables = {id(t) for m in modules for t in (vars(m), *_compat.own_tables(m))}
    own = [each.tensor.requires_grad or each.is_in(tables) for each in entries]
    tensors = [each.tensor for each, is_own in zip(entries, own, strict=True) if is_own]
    others = [
        (each.tensor, traced.by_id[id(each.tensor)])
        for each, is_own in zip(entries, own, strict=True)
        if not is_own
    ]

    def begun() -> bool:
        return any(
            traced.by_id[id(each.tensor)].grad is not traced.gradients.get(id(each))
            for each in entries
        )

    model = [*modules, *call.optimizer_objects(), *tensors]
    return TakenInTrace(calls, record, call.leaves, call.drawn.taken, model, others, begun)


def _is_one(place: OutsidePlace) -> bool:
    return place.kind in ("item", "cell", "attribute")


def _described(value: torch.Tensor) -> str:
    if type(value) is not torch.Tensor:
        return type(value).__name__
    return "tensor with gradients" if value.requires_grad else f"tensor of layout {value.layout}"
