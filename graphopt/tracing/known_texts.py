"""Texts of a trace that are known before each call, where something has to know what they are.

    f"{self.phase} {step}"        stands for a text, until it is a key, or given to other code
    rates[self.phase]             the graph holds for this phase alone

What `changing_texts` lets stand for a text goes through the step as any piece of text does that
stands for a value (`laters`): it may be joined, formatted, said, kept and returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphopt.tracing.arrays import LiveItems
from graphopt.tracing.callback import callback
from graphopt.tracing.computations import evaluated, functions_in, numbers_in
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.kept_items import KeptItems, PieceOfOutside
from graphopt.tracing.known_functions import is_followed, is_of_library, takes_apart
from graphopt.tracing.later import Later, as_later
from graphopt.tracing.later_values import holds_later, is_later, refuse_keys
from graphopt.tracing.nests import leaves_in
from graphopt.tracing.numbers import refusal
from graphopt.tracing.outside.changing_texts import TextOutside
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original
from graphopt.tracing.running_trace import BEGIN, END


class KnownTexts:
    """Finds out what a text is in this call, for which the graph holds alone then."""

    _record: Record
    _texts: list[Later]

    def _at_trace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of a function to know a value while the step is traced."""
        raise NotImplementedError

    def piece_of(self, text: TextOutside) -> str:
        """What stands for a text outside the step."""
        return PieceOfOutside(self._noted(Later(text, ())))

    def _noted(self, value: Later) -> str:
        """What stands in texts for a value."""
        self._texts.append(value)
        return f"{BEGIN}{len(self._texts) - 1}{END}"

    def key(self, text: str) -> str:
        """A key as it is in this call."""
        if not is_later(text) or self._is_exact(as_later(text)):
            return self.exact(text)  # type: ignore[no-any-return]
        refuse_keys({text: None})
        return text

    def exact(self, value: Any) -> Any:
        """A text as it is in this call, for which the graph holds alone, also where it is in a list
        or a dictionary; others themselves."""
        if type(value) is tuple and holds_later(value):
            return tuple(map(self.exact, value))
        if type(value) in (list, dict) and holds_later(value):
            return self._exact_within(value)
        if not is_later(value):
            return value
        value = as_later(value)
        if not self._is_exact(value):
            raise refusal(
                "it gives a value that only Python computes, of what the graph gives or of a list"
                " that it changes, to code that is not followed",
                "let a function do it that is called in every step: graphopt.callback(function,"
                " value)",
            )
        return evaluated(value, lambda number: number.exactly(), self._at_trace)

    def _exact_within(self, value: Any) -> Any:
        """A list or a dictionary of exact texts: itself, which may be changed, where the step has
        made it."""
        outside = self._record.is_outside(value)
        made = value.copy() if outside else value
        if outside and self._is_known(value):
            self._record.texts.note_taken_apart()  # what else is there is read unseen
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in list(items):
            made[key] = self.exact(each)
        return made

    def known(self, value: Any) -> Any:
        """A text that the program changes between calls as it is in this one, for which the graph
        holds alone; other values, and texts of what only the graph gives, themselves."""
        return self.exact(value) if self._is_known(value) else value

    def _is_known(self, value: Any) -> bool:
        """Whether all texts in a value are known before the call, and one of them is one that the
        program changes."""
        found = [as_later(each) for each in leaves_in(value) if is_later(each)]
        outside = any(isinstance(f, TextOutside) for each in found for f in functions_in(each))
        return outside and all(map(self._is_exact, found))

    def _is_exact(self, value: Later) -> bool:
        """Whether a value is known before each call."""
        found = (KeptItems, LiveItems)
        outside = any(isinstance(function, found) for function in functions_in(value))
        return not outside and all(map(is_host_number, numbers_in(value)))

    def _note_taken_apart(self, callee: Any, args: Sequence[Any]) -> None:
        if takes_apart(callee, args):
            self._record.texts.note_taken_apart()

    def not_taken(self, callee: Any, args: Sequence[Any]) -> None:
        """Refuse to give such values to a function that is not followed."""
        self._note_taken_apart(original(callee), args)
        if is_of_library(original(callee)) and any(map(self._is_known, args)):
            self._record.texts.note_taken_apart()
        if not hands_on(original(callee)) and any(self.exact(each) is not each for each in args):
            raise refusal(
                "it gives a text with numbers in it to a function by *args, which is not followed",
                "give the arguments one by one",
            )

    def _called_now(self, callee: Any, /, *args: Any, **options: Any) -> Any:
        """What a function gives for texts as they are in this call, or raises."""
        return callee(*map(self.known, args), **{k: self.known(v) for k, v in options.items()})


def hands_on(callee: Any) -> bool:
    """Whether a callee may be given what stands for a value."""
    return callee is callback or is_followed(callee) or getattr(callee, "of_later", False)
