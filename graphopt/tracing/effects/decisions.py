"""Data-dependent branches in a trace, such as `if torch.isfinite(loss):`, recorded as assumptions.

The trace asks what the values are: all that has been recorded so far runs, on copies of the live
tensors, and gives the answer that this call would find. The branch that it leads to is captured,
behind an assumption (`graphopt.host.decisions`). Traces of the same call get the same answers.

    recorded so far ──run on copies──▶ True ──▶ assumption(ok) is a node, the trace goes on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.sizes import (
    AnsweredQuestions,
    Place,
    backed,
    number_at,
    unknown_places,
    with_sizes,
)
from graphopt.errors import CaptureError
from graphopt.host.decisions.assumptions import Answer, Assumption, ValuesAssumption
from graphopt.host.decisions.sizes import Relations, SizeAssumption, Sizes
from graphopt.host.decisions.used import UsedParameters, UsedParametersQuestion
from graphopt.ir.metadata import set_value
from graphopt.ir.user_frames import current_location, current_user_line
from graphopt.parallel.markers import Group
from graphopt.runtime.recaptures import WITHOUT_BRANCHES
from graphopt.tracing.call import SizesKept
from graphopt.tracing.functional.constant_values import ConstantValues
from graphopt.tracing.functional.values import TracedValues, ValuesBeforeCollectives
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.ranks.uniformity import own_values

SIZED = "sized"
"""The key of a node's metadata that says that its sizes were given."""

LIMIT = 1000
"""Decisions in one step."""


class Decider:
    """Answers the data-dependent decisions of one trace.

    Args:
        tracer: records the step.
        inputs: keep the answers.
        mode: in which the trace computes.
        values: of the inputs in this call, which decide.
        own: inputs that may have other values on other ranks; see `uniformity.own_inputs`.
        alone: no other rank runs the same step.
        group: the ranks that average gradients; None where none do. A rank then goes on with the
            graph of another branch by itself, whatever it has launched
            (`graphopt.ranks.independent_ranks`).
        all_own: every decision may be a rank's own.
    """

    def __init__(
        self,
        tracer: Any,
        inputs: Inputs,
        mode: Any,
        values: Sequence[torch.Tensor],
        own: Sequence[bool],
        alone: bool,
        group: Group | None = None,
        all_own: bool = False,
    ) -> None:
        self._group, self._own_so_far = group, all_own
        self._tracer, self._inputs = tracer, inputs
        self._own = own
        self._mode = mode
        self._relations = Relations(AnsweredQuestions(mode))
        self._count = 0
        self._fake = any(map(_compat.is_fake, values))
        known = TracedValues if alone else ValuesBeforeCollectives
        self._values = _NoValues() if self._fake else known(tracer, values)
        self._constants = ConstantValues(tracer)

    def decide(self, number: Any, kind: type) -> Answer:
        """The value of a traced number in this call, assumed by the graph from now on.

        Raises:
            CaptureError: it cannot be known.
        """
        line = self._next_line()
        unknown = kind is int and not self._knows(number)
        alone = self._is_own(unknown or not self._is_alike(number))
        assumption = Assumption(self._count, line, alone)
        asked = self._recorded(assumption, number)
        return self._assumed(assumption, self._outcome(lambda: self._answer(asked, kind, alone)))

    def _is_own(self, now: bool) -> bool:
        """True if the next decision may differ between ranks, or follows one that may."""
        self._own_so_far |= now
        return self._group is not None and self._own_so_far

    def _is_alike(self, number: Any) -> bool:
        """True if a number is the same on all ranks, given the inputs that may differ."""
        node, group = _compat.node_of(self._tracer, number), self._group
        if node is None or group is None:
            return True
        return node not in own_values(self._tracer.graph, self._own, group, node)

    @property
    def may_know(self) -> bool:
        """True if all values of this call can be computed during the trace."""
        return type(self._values) is TracedValues

    def text(self, function: Callable[..., str], args: Sequence[Any]) -> str:
        """The text that a function makes of a traced value in this call."""
        with _compat.without_modes():
            node = _compat.node_of(self._tracer, _compat.from_functional(args[0]))
            return function(self._values.of(node), *args[1:])

    def _knows(self, number: Any) -> bool:
        """True if a number's value is known during the capture."""
        values, node = self._values, _compat.node_of(self._tracer, number)
        return not isinstance(values, ValuesBeforeCollectives) or values.knows(node)

    def values(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The integers of a traced tensor in this call, assumed by the graph from now on.

        Raises:
            CaptureError: they cannot be known.
        """
        assumption = ValuesAssumption(self._count, self._next_line(), self._is_own(True))
        asked = self._recorded(assumption, tensor)
        answer = self._outcome(lambda: tuple(self._values.of(asked).tolist()))
        return cast(tuple[int, ...], self._assumed(assumption, answer))

    def used(
        self, positions: Sequence[int], sent: Sequence[torch.Tensor], likely: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The parameters that other ranks use in this call, assumed by the graph from now on.

        Args:
            positions: of parameters that this rank does not use; see `UsedParametersQuestion`.
            sent: what the ranks have sent for them.
            likely: the answer that is taken for true until the graph runs.
        """
        known = self._inputs.answers
        assumption = UsedParametersQuestion(self._count, self._next_line(), positions)
        _compat.record_call(assumption, sent)
        guess = assumption.outcome_of(likely)
        found = known[self._count] if self._count < len(known) else None
        if not isinstance(found, UsedParameters) or not found.is_of(positions):
            known.insert(self._count, guess)  # the others are answers to what comes behind
        answer = cast(UsedParameters, self._assumed(assumption, known[self._count]))
        return tuple(is_used for _, is_used in answer)

    def _recorded(self, assumption: Assumption, value: Any) -> Any:
        """Records an assumption as a node; returns the node of the value it tests."""
        _compat.record_call(assumption, [value])
        return next(iter(reversed(self._tracer.graph.nodes))).args[0]

    def _outcome(self, find: Callable[[], Answer]) -> Answer:
        """The known outcome of the next decision, which is none on what other ranks use, else the
        one that `find` gives."""
        known = self._inputs.answers
        while self._count < len(known) and isinstance(known[self._count], UsedParameters):
            del known[self._count]  # of a question that this trace does not ask
        if self._count == len(known):
            known.append(find())
        return known[self._count]

    def _assumed(self, assumption: Assumption, answer: Answer) -> Answer:
        """Ends a decision, whose assumption is recorded."""
        assumption.answer = answer
        self._count += 1
        return answer

    def sized(self, function: Any, result: Any) -> Any:
        """Gives an operator's data-dependent result sizes: symbols, or numbers on which the graph
        is specialized.

        Args:
            result: with sizes of which nothing is known.
        """
        unknown = unknown_places(result)
        if not unknown:
            return result
        places = [place for place, _ in unknown]
        node = next(iter(reversed(self._tracer.graph.nodes)))
        constant = self._constants.laid_out_like(node)
        if constant is not None:
            node.meta[SIZED] = True
            sizes = [number_at(constant, place) for place in places]
            result = with_sizes(result, [number for _, number in unknown], sizes)
            if isinstance(result, int):
                set_value(node, result)
            return result
        if self._inputs.sizes is SizesKept.UNKNOWN:
            return result
        line = self._next_line()
        answer = self._outcome(lambda: self._sizes(node, places))
        assert isinstance(answer, Sizes)
        numbers, symbols = self._known(answer, places)
        self._relations.add(self._count, answer, places, symbols)
        result = with_sizes(result, [number for _, number in unknown], numbers)
        self._assume(node, result, places, answer, line)
        return result

    def _sizes(self, node: fx.Node, places: Sequence[Place]) -> Sizes:
        real = self._values.of(node)
        return Sizes(number_at(real, place) for place in places)

    def _known(self, answer: Sizes, places: Sequence[Place]) -> tuple[list[Any], list[Any]]:
        """The numbers for sizes in the trace, and their symbols (None for plain numbers)."""
        if self._inputs.sizes is SizesKept.EXACT:
            return list(answer), [None] * len(answer)
        pairs = [
            backed(self._mode, number, place[1] is not None)
            for number, place in zip(answer, places, strict=True)
        ]
        return [number for number, _ in pairs], [symbol for _, symbol in pairs]

    def _assume(
        self, node: fx.Node, result: Any, places: Sequence[Place], answer: Sizes, line: str
    ) -> None:
        node.meta[SIZED] = True
        leaves = _compat.tree_leaves(result)
        whole = len(leaves) == 1 and not isinstance(result, (tuple, list))
        used = sorted({index for index, _ in places})
        values = []
        for index in used:
            value = fx.Proxy(node, self._tracer)
            if not whole:
                value = self._tracer.create_proxy("call_function", getitem, (value, index), {})
            values.append(value)
        where = [(used.index(index), dimension) for index, dimension in places]
        if not isinstance(leaves[0], torch.Tensor):
            set_value(node, leaves[0])
            source = cast(fx.Node, node.args[0])
            values = [fx.Proxy(source, self._tracer)]  # the number may be a constant
        counts = len(values), self._relations, self._is_own(True)
        assumption = SizeAssumption(self._count, line, where, *counts)
        self._tracer.create_proxy("call_function", assumption, tuple(values), {})
        self._assumed(assumption, answer)

    def _answer(self, number: Any, kind: type, alone: bool) -> Answer:
        """The value of a number in this call. Where it depends on collectives, a guess; of a
        uniform decision, the same on all ranks that average gradients: a wrong one is found out
        when the graph first runs. One that leads to an exception is taken back, and so is an answer
        behind collectives of a step that communicates by itself: other ranks wait for these, so
        that a graph launches them before that exception. A graph of fake tensors does not run here:
        it gets no guess."""
        values, together = self._values, self._group is not None
        if not isinstance(values, ValuesBeforeCollectives):
            return cast(Answer, kind(values.of(number)))
        known = values.knows(number)
        if kind is bool and values.needs_rows(number):
            self._inputs.guessed = self._count
            return True
        if kind is bool and not (known and (together or not values.launched)):
            self._inputs.guessed = self._count
        guessed = together and not known and not alone
        return True if guessed else cast(Answer, kind(values.of(number)))

    def _next_line(self) -> str:
        """The user's line of the next decision.

        Raises:
            CaptureError: there are too many.
        """
        line = current_user_line()
        if self._count == LIMIT:
            raise CaptureError(
                f"it takes more than {LIMIT} decisions by values of tensors",
                location=line,
                hint=WITHOUT_BRANCHES,
            )
        return str(line)


class _NoValues:
    """Stands for the values in a trace of fake tensors, which have none."""

    def of(self, wanted: Any) -> Any:
        """The value of what is no node of the graph.

        Raises:
            CaptureError: it is one.
        """
        if not isinstance(wanted, fx.Node):
            return wanted
        raise CaptureError(
            "Python code depends on the value of a tensor, and the tensors given are fake ones",
            location=current_location(),
            hint=f"{WITHOUT_BRANCHES}, or capture with real tensors; what a module asks of its mask"
            " is told it by its arguments, such as is_causal=True",
        )


class OwnDecisionError(CaptureError):
    """A step decides by a value that may differ between ranks."""


def another_on_each_rank(line: Any) -> CaptureError:
    """Builds the error for a decision that may differ between ranks."""
    return OwnDecisionError(
        "it decides by the value of a tensor, which may be another one on each rank",
        location=line,
        hint=f"{WITHOUT_BRANCHES}; decide by what all ranks have alike, such as the norm of the"
        " averaged gradients, or the value after torch.distributed.all_reduce(value); or decide"
        " outside the step",
    )
