"""The declaration of a pass: a function on graph modules, with a name, options and constraints."""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from graphopt.errors import PassDefinitionError
from graphopt.iter_graph import IterGraphModule
from graphopt.manager.options import (
    Option,
    PassArgumentError,
    graph_annotation,
    is_class,
    options_of,
)

if TYPE_CHECKING:
    from graphopt.manager.records import PassRecord


class Pass:
    """A declared pass: callable by itself, and an entry of pipelines.

    Attributes:
        name: by which pipelines, constraints and `disable` know it.
        function: what was decorated.
        module: where the function is defined; module and function name identify a pass.
        prerequisites: names of passes that must have been applied to the graph before.
        apply_after: names of passes that come first if both are applied.
        apply_before: names of passes that come later if both are applied.
        repeatable: whether it may be applied to a graph more than once.
        changes_numerics: whether it may change the bits of the results.
        changes_communication: whether collectives may send other amounts, or be of other kinds.
        needs_iterations: whether it takes an `IterGraphModule` alone: its annotation says so.
        whole_step: whether it needs a whole training step; inside `torch.compile` it is left out.
        bakes_rank: whether what it leaves holds on this rank alone, so that ranks share no cache.
        options: its options by name, in the order of the signature.
        doc: first line of the function's docstring.
        source: ``file:line`` of the function.

    >>> pass_ = graphopt.registry.get("schedule_comm_wait")
    >>> pass_.name, pass_.changes_numerics
    ('schedule_comm_wait', False)
    """

    def __init__(
        self,
        function: Callable[..., int | None],
        run: Callable[[Pass, fx.GraphModule, Mapping[str, Any]], PassRecord],
        *,
        name: str | None = None,
        prerequisites: Iterable[Pass | str] = (),
        apply_after: Iterable[Pass | str] = (),
        apply_before: Iterable[Pass | str] = (),
        repeatable: bool = False,
        changes_numerics: bool = False,
        changes_communication: bool = False,
        whole_step: bool = False,
        bakes_rank: bool = False,
    ) -> None:
        _check_function(function)
        self.name = function.__name__ if name is None else name
        _check_name(self.name)
        self.prerequisites = _names(prerequisites, "prerequisites", self.name)
        self.apply_after = _names(apply_after, "apply_after", self.name)
        self.apply_before = _names(apply_before, "apply_before", self.name)
        self.options: dict[str, Option] = options_of(function, self.name)
        annotation = _check_graph_annotation(function, self.name)
        self.function = function
        self.repeatable = repeatable
        self.changes_numerics = changes_numerics
        self.changes_communication = changes_communication
        self.needs_iterations = is_class(annotation) and issubclass(annotation, IterGraphModule)
        self.whole_step = whole_step or self.needs_iterations
        self.bakes_rank = bakes_rank
        self.doc = (inspect.getdoc(function) or "").partition("\n")[0]
        code = inspect.unwrap(function).__code__
        self.module: str = function.__module__ or code.co_filename  # None where the code is exec'ed
        self.source = f"{code.co_filename}:{code.co_firstlineno}"
        self._run = run
        functools.update_wrapper(self, function)

    @property
    def identity(self) -> tuple[str, str]:
        """The pass's module and function name; a second declaration of the same replaces the
        first."""
        return self.module, self.function.__name__

    def __call__(self, gm: fx.GraphModule, /, *args: Any, **options: Any) -> PassRecord:
        """Applies the pass alone, with the checks and the record of a `PassManager`."""
        if len(args) > len(self.options):
            raise PassArgumentError(
                f"pass {self.name!r} takes {len(self.options)} options, not {len(args)}"
            )
        given = dict(zip(self.options, args, strict=False))
        if twice := given.keys() & options.keys():
            raise PassArgumentError(f"option {min(twice)!r} of pass {self.name!r} is given twice")
        return self._run(self, gm, {**given, **options})

    def __reduce__(self) -> str:
        return self.function.__qualname__

    def __repr__(self) -> str:
        return f"<pass {self.name} of {self.module}>"


def _check_function(function: object) -> None:
    if isinstance(function, Pass):
        raise PassDefinitionError(f"pass {function.name!r} is decorated twice")
    if not inspect.isfunction(function):
        raise PassDefinitionError(
            f"a pass is a function, not {function!r}; write the decorator with parentheses:\n"
            "    @graph_optimization_pass()\n"
            "    def my_pass(gm): ..."
        )
    for is_kind, kind in (
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isgeneratorfunction, "a generator"),
        (inspect.isasyncgenfunction, "a generator"),
    ):
        if is_kind(function):
            raise PassDefinitionError(
                f"pass {function.__name__!r} is {kind}, whose body would not run: write a plain"
                " function"
            )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise PassDefinitionError(
            f"{name!r} cannot name a pass in a pipeline text: use name=, with an identifier"
        )


def _names(passes: object, what: str, name: str) -> tuple[str, ...]:
    if isinstance(passes, (str, Pass)) or not isinstance(passes, Iterable):
        raise PassDefinitionError(f"{what} of pass {name!r} is a list: write {what}=[…]")
    names = []
    for entry in passes:
        if not isinstance(entry, (str, Pass)):
            raise PassDefinitionError(
                f"{what} of pass {name!r} holds {entry!r}, which is neither a pass nor a name"
            )
        names.append(entry.name if isinstance(entry, Pass) else entry)
    return tuple(dict.fromkeys(names))


def _check_graph_annotation(function: Callable[..., Any], name: str) -> Any:
    annotation = graph_annotation(function)
    if not is_class(annotation):
        return annotation
    if issubclass(annotation, fx.GraphModule) or issubclass(fx.GraphModule, annotation):
        return annotation
    raise PassDefinitionError(
        f"the first parameter of pass {name!r} is annotated {annotation.__qualname__}; a pass takes"
        " an fx.GraphModule or an IterGraphModule, and edits its graph"
    )
