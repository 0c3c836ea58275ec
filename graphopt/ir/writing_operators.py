"""Functional forms of the user's custom operators that write to their arguments.

    largest = lib::round_(x, s)    ==>    largest, x_1 = graphopt_functional::lib__round_(x, s)

The form takes what the operator takes. It gives the results that have memory of their own, and
after them what each written argument holds then: a list where the argument is a list, or may be
left out. A result that is a written argument itself is not among them. The form is defined when it
is first asked for, from the schema of the operator. The last stage of a pipeline calls the operator
again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.inplace import uninitialised_like
from graphopt.ir.metadata import known_value, set_value
from graphopt.ir.operators import argument_at, arguments_by_name, row

NAMESPACE = "graphopt_functional"
_OF_TORCH = frozenset(
    {"aten", "prims", "prim", "c10d", "quantized", "inductor", "fsdp", "symm_mem"}
)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_MARK = re.compile(r"Tensor\([^)]*\)")
"""Matches a tensor with an alias annotation in a schema's text."""


class FunctionalForm(NamedTuple):
    """A functional operator and the original that it stands for.

    Attributes:
        written: positions of the arguments that the original writes to.
        fresh: positions of those of its results that are no arguments.
        returned: by position of its other results, the position of the argument that it is.
    """

    functional: _compat.OpOverload
    original: _compat.OpOverload
    written: tuple[int, ...]
    fresh: tuple[int, ...]
    returned: dict[int, int]

    @property
    def single(self) -> bool:
        """True if the form returns one value instead of several."""
        return len(self.fresh) + len(self.written) == 1

    @property
    def is_callable_again(self) -> bool:
        """True if a graph may call the original in place of the form, because its own results come
        first and keep their indices."""
        return self.fresh == tuple(range(len(self.fresh)))

    @property
    def gives_one(self) -> bool:
        """True if the original returns one value, with memory of its own."""
        return len(self.fresh) == 1 and not self.returned

    def split(self, results: Any) -> tuple[list[Any], list[Any]]:
        """Splits the form's results into those with memory of their own and the new contents of
        written arguments."""
        several = [results] if self.single else list(results)
        return several[: len(self.fresh)], several[len(self.fresh) :]

    def given(self, args: Sequence[Any], kwargs: dict[str, Any], position: int) -> Any:
        """Returns the argument at a position of a call."""
        if position < len(args):
            return args[position]
        return kwargs.get(_compat.schema_of(self.original).arguments[position].name)

    def results(self, fresh: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Assembles the original's results from `fresh` values and written arguments."""
        own = iter(fresh)
        count = len(self.fresh) + len(self.returned)
        found = tuple(
            self.given(args, kwargs, self.returned[i]) if i in self.returned else next(own)
            for i in range(count)
        )
        return found if count > 1 else next(iter(found), None)

    def value_for(self, node: fx.Node) -> Any:
        """Returns the metadata that the form would have in place of a call of the original."""
        known = known_value(node)
        several = [known] if len(self.fresh) + len(self.returned) == 1 else list(known or ())
        found = [several[i] for i in self.fresh]
        for position in self.written:
            value = argument_at(node, position)
            if not _is_listed(self.original, position):
                found.append(_known(value))
                continue
            entries = value if isinstance(value, (list, tuple)) else [value]
            found.append([_known(each) for each in entries if each is not None])
        return found[0] if self.single else tuple(found)

    def entries(self, node: fx.Node) -> Iterator[tuple[tuple[int, ...], fx.Node]]:
        """Yields each tensor that a call writes, with the indices of its new value among the form's
        results."""
        for number, position in enumerate(self.written, len(self.fresh)):
            value = argument_at(node, position)
            path = () if self.single else (number,)
            if _is_listed(self.original, position):
                entries = value if isinstance(value, (list, tuple)) else [value]
                present = [each for each in entries if isinstance(each, fx.Node)]
                yield from (((*path, index), each) for index, each in enumerate(present))
            elif isinstance(value, fx.Node):
                yield path, value

    def holders(self, node: fx.Node, path: tuple[int, ...]) -> list[fx.Node]:
        """Returns the nodes that pick the result with these indices from a call of the form."""
        found = [node]
        for index in path:
            found = [user for each in found for user in each.users if user.args[1:] == (index,)]
        return found

    def is_read_by_entry(self, node: fx.Node) -> bool:
        """True if every reader of a call of the form picks single tensors."""
        if self.single and not _is_listed(self.original, self.written[0]):
            return True
        lists = [node] if self.single else list(node.users)
        picks = [*node.users]
        if not self.single:
            listed = {
                number
                for number, position in enumerate(self.written, len(self.fresh))
                if _is_listed(self.original, position)
            }
            picks += [user for item in lists if item.args[1] in listed for user in item.users]
        return all(user.target is operator.getitem for user in picks)


def form_of(target: Any) -> FunctionalForm | None:
    """Returns the functional form of a custom operator that writes to its arguments, or None (also
    for torch's operators)."""
    if not isinstance(target, _compat.OpOverload) or target.namespace in _OF_TORCH:
        return None
    known = row(target)
    if (
        not known.writes
        or known.collective
        or known.wait
        or target.namespace.startswith("graphopt")
    ):
        return None
    return _defined(target)


def form_behind(target: Any) -> FunctionalForm | None:
    """Returns the `FunctionalForm` whose functional operator is `target`, or None."""
    return _FORMS.get(target) if isinstance(target, _compat.OpOverload) else None


_FORMS: dict[_compat.OpOverload, FunctionalForm] = {}
_names: set[str] = set()


def call_original(node: fx.Node, form: FunctionalForm, own: Mapping[fx.Node, fx.Node]) -> None:
    """Replaces a call of a form by a call of the original, which writes to its arguments.

    Args:
        own: what the call may overwrite, by what is given to the form. Whoever reads what it holds
            then goes on reading it as a result of the node.
    """
    fresh, _ = form.split(known_value(node))
    args, kwargs = list(node.args), dict(node.kwargs)
    for position in form.written:
        given = fx.map_arg(argument_at(node, position), lambda each: own.get(each, each))
        if position < len(args):
            args[position] = given
        elif given is not None:
            kwargs[_compat.schema_of(form.original).arguments[position].name] = given
    node.target, node.args, node.kwargs = form.original, tuple(args), kwargs
    given = [tuple(map(_known, args)), {name: _known(value) for name, value in kwargs.items()}]
    set_value(node, form.results(fresh, *given))
    if form.gives_one:
        for item in [user for user in node.users if user.args[1:] == (0,) and not form.single]:
            item.replace_all_uses_with(node)


def _known(value: Any) -> Any:
    return known_value(value) if isinstance(value, fx.Node) else value


@cache
def _defined(original: _compat.OpOverload) -> FunctionalForm | None:
    schema = _compat.schema_of(original)
    if _compat.has_functionalization(original):
        return None
    written = row(original).writes
    returned = {i: _argument_returned(r, schema) for i, r in enumerate(schema.returns)}
    if any(position is not None and position not in written for position in returned.values()):
        return None  # a view of what it does not write
    fresh = tuple(i for i, position in returned.items() if position is None)
    name = _free_name(original)
    takes = _MARK.sub("Tensor", str(schema).partition("(")[2].rpartition(") -> ")[0])
    every = str(schema).rpartition(" -> ")[2].removeprefix("(").removesuffix(")").split(", ")
    gives = [every[i] for i in fresh]
    gives += ["Tensor[]" if _is_listed(original, i) else "Tensor" for i in written]
    tags = tuple(tag for tag in original.tags if tag == torch.Tag.nondeterministic_seeded)
    _library.define(f"{name}({takes}) -> ({', '.join(gives)})", tags=tags)
    positions = {i: each for i, each in returned.items() if each is not None}

    def compute(*args: Any, **kwargs: Any) -> Any:
        given = arguments_by_name(original, args, kwargs)
        names = [argument.name for argument in schema.arguments]
        for position in written:
            if names[position] in given:
                given[names[position]] = _copied(given[names[position]])
        return _called(form, given)

    form = FunctionalForm(_registered(name, compute), original, written, fresh, positions)
    _FORMS[form.functional] = form
    return form


def _registered(name: str, compute: Any) -> _compat.OpOverload:
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", compute, lib=_library)
    found: _compat.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return found


def _called(form: FunctionalForm, given: dict[str, Any]) -> Any:
    """Calls the original on copies of the arguments that it writes."""
    args = []
    for argument in _compat.schema_of(form.original).arguments:
        if argument.kwarg_only or argument.name not in given:
            break
        args.append(given.pop(argument.name))
    found = form.original(*args, **given)
    count = len(form.fresh) + len(form.returned)
    several = (found,) if count == 1 else found or ()
    results: list[Any] = [several[i] for i in form.fresh]
    for position in form.written:
        value = form.given(args, given, position)
        if _is_listed(form.original, position):
            entries = value if isinstance(value, (list, tuple)) else [value]
            value = [each for each in entries if each is not None]
        results.append(value)
    return results[0] if form.single else tuple(results)


def _copied(value: Any) -> Any:
    """Copies a tensor, or each tensor of a list, with its strides."""
    if isinstance(value, torch.Tensor):
        return uninitialised_like(value).copy_(value)
    return [_copied(each) for each in value] if isinstance(value, (list, tuple)) else value


def _is_listed(original: _compat.OpOverload, position: int) -> bool:
    """True if an argument is a list of tensors, or optional."""
    return str(_compat.schema_of(original).arguments[position].type) != "Tensor"


def _argument_returned(result: Any, schema: Any) -> int | None:
    """Returns the position of the argument that a result aliases, or None if it has memory of its
    own."""
    if result.alias_info is None:
        return None
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and not info.before_set.isdisjoint(result.alias_info.before_set):
            return position
    return -1


def _free_name(original: _compat.OpOverload) -> str:
    """Returns an unused operator name: `lib__round_` for `lib::round_`, with a number if that is
    taken."""
    name = _compat.operator_name(original).replace("::", "__")
    overload = _compat.overload_name(original)
    name = wanted = name if overload == "default" else f"{name}__{overload}"
    number = 1
    while name in _names:
        number += 1
        name = f"{wanted}__{number}"
    _names.add(name)
    return name
