"""`IterGraphModule`: a training step as one graph, part of which runs one iteration late."""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import fx

from graphopt import _compat
from graphopt.errors import GraphOptError
from graphopt.graph_utils import follows_output_convention, get_output, is_collective
from graphopt.iter_graph.derive import Derivation, LatePlan, plan
from graphopt.iter_graph.derived_programs import DerivedProgram, WorkInFlight, reads_of
from graphopt.iter_graph.graph import IterGraph, copy_graph

logger = logging.getLogger("graphopt")

Transform = Callable[[fx.GraphModule], fx.GraphModule]

_notebook_view: Callable[[fx.GraphModule], str] | None = None
"""The function that renders graphs in notebooks, registered by a higher layer."""

DERIVED = "derived"
"""Metadata of a derived graph: "setup", "main", "drain" or "cleanup"."""


def register_notebook_view(view: Callable[[fx.GraphModule], str]) -> None:
    """Registers a function that renders every `IterGraphModule` as HTML in notebooks."""
    global _notebook_view
    _notebook_view = view


class IterGraphModule(fx.GraphModule):
    """A training step as one graph, of which some nodes run in the next iteration.

    Passes edit `graph`, where `IterGraph.move_to_next_iter_before` marks nodes as late. What runs
    is derived from it: `setup_gm` in the first iteration, `main_gm` in every other, `drain_gm` on
    `flush`; `cleanup_gm` is main with nothing left in flight.

    Called like the module it was made from, it returns the same. State that late nodes update is
    exact after `flush` or a call with ``last_iter=True``.

    Args:
        graph_module: copied; left as it is.

    >>> import graphopt, torch
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = graphopt.IterGraphModule(captured.graph_module)
    >>> (result,), updates, carried = gm(torch.ones(2))
    >>> result, gm.in_flight
    (tensor([1., 1.]), False)
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        graph, _ = copy_graph(graph_module.graph, into=IterGraph)
        super().__init__(graph_module, graph)
        self.meta.update(graph_module.meta)
        self._frozen = False
        self._transform: Transform | None = None
        self._forget_derived()

    def _forget_derived(self) -> None:
        self._plan: LatePlan | None = None
        self._programs: dict[tuple[Any, ...], DerivedProgram] = {}
        self._returns_lists: bool | None = None
        self._given: dict[str, fx.GraphModule] = {}
        self._flight: WorkInFlight | None = None

    @property
    def graph(self) -> IterGraph:
        """The step as one graph."""
        return cast(IterGraph, _compat.graph_in(self))

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        if not isinstance(graph, IterGraph):
            graph, _ = copy_graph(graph, into=IterGraph)
        _compat.set_graph(self, graph)
        graph.owning_module = self
        self.recompile()

    @property
    def frozen(self) -> bool:
        """True if the graph is final, so that passes refuse it."""
        return self._frozen

    def finalize_setup(
        self,
        transform: Transform | None = None,
        derived: Mapping[str, fx.GraphModule] | None = None,
    ) -> None:
        """Makes the graph final: it may be run but no longer rewritten.

        Args:
            transform: applied to each derived graph before it runs, such as
                `graphopt.executable.finalize`.
            derived: what `derive` has given, to be used in place of graphs that are derived anew.
        """
        plan_of_given = self._plan if derived else None
        self._forget_derived()
        self._plan, self._given = plan_of_given, dict(derived or {})
        self._transform = transform
        self._frozen = True

    def recompile(self) -> Any:
        """Records that `graph` has changed; code is generated on demand.

        Raises:
            GraphOptError: an iteration is in flight: the old graph has to finish it first.
        """
        if self.__dict__.get("_flight") is not None:
            raise GraphOptError(
                "the graph was changed while an iteration is in flight; call flush() first"
            )
        self._plan = None
        self._returns_lists = None
        self._programs = {}
        self._given = {}
        return None

    @property
    def code(self) -> str:
        """Python code of the step, with late nodes in their own iteration."""
        return self.graph.python_code("self").src

    def _repr_html_(self) -> str | None:
        return None if _notebook_view is None else _notebook_view(self)

    @property
    def setup_gm(self) -> fx.GraphModule:
        """The graph of the first iteration."""
        return self._derived("setup")

    @property
    def main_gm(self) -> fx.GraphModule:
        """The graph of every iteration but the first. It takes the carried values after the
        inputs."""
        return self._derived("main")

    @property
    def drain_gm(self) -> fx.GraphModule:
        """The graph that `flush` runs: the late nodes alone."""
        return self._derived("drain")

    @property
    def cleanup_gm(self) -> fx.GraphModule:
        """The graph of the last iteration: main, followed by its own late nodes."""
        return self._derived("cleanup")

    @property
    def in_flight(self) -> bool:
        """True if late work of the last iteration is still to be done."""
        return self._flight is not None

    @property
    def resumable(self) -> bool:
        """True if late work in flight can still be done; False if it failed halfway."""
        flight = self._flight
        return flight is None or (not flight.begun and self._can_resume(flight))

    @property
    def flush_communicates(self) -> bool:
        """True if `flush` launches collectives, so that all ranks must call it together."""
        return any(is_collective(node) for node in self.graph.late)

    def forward(self, *args: Any, last_iter: bool = False) -> Any:
        """Runs one iteration.

        Args:
            *args: one value per placeholder of `graph`.
            last_iter: leave nothing in flight.

        Returns:
            What `graph` returns. A late state update is returned as the state it updates.
        """
        if not self.graph.late:
            return self._packed(self._program("setup").run(args, None)[0])
        flight = self._flight
        if flight is not None and flight.done:
            self.flush()
            flight = None
        if flight is None:
            results, carried = self._program("setup").run(args, None)
        else:
            results, carried = self._finishing(flight, "main", args)
        self._flight = WorkInFlight(carried, self._state_for_drain(args))
        if last_iter:
            self.flush()
        return self._packed(results)

    def go_on(self, args: Sequence[Any], there: list[Any]) -> Any:
        """Runs a graph without late nodes that resumes from values of another graph.

        Args:
            args: one value per input of the step.
            there: the values, by their `carried_index`; taken out as they are needed.

        Returns:
            What `graph` returns.
        """
        return self._packed(self._program("setup").run(args, WorkInFlight(there, ()))[0])

    def derive(self) -> dict[str, fx.GraphModule]:
        """Returns the graphs that run, by name: "setup" and, with late nodes, "main" and
        "drain"."""
        names = ("setup", "main", "drain") if self.graph.late else ("setup",)
        return {name: self._derived(name) for name in names}

    def prepare(self, *, once: bool = False) -> None:
        """Derives the graphs now that calls would otherwise derive at their first use.

        Args:
            once: those alone that a single call runs.
        """
        self._program("setup")
        if self.graph.late and not once:
            self._program("main")
        if self.graph.late:
            self._program("drain", 0)

    def flush(self) -> None:
        """Runs the late work of the last iteration, if there is any, so that state is exact.

        Raises:
            GraphOptError: an iteration failed in the middle of an update, so that its state is
                lost.
        """
        flight = self._flight
        if flight is None:
            return
        if flight.done < len(self._current_plan().groups):
            self._finishing(flight, "drain", flight.state, flight.done)
        self._flight = None

    def failed_at(self, error: BaseException) -> fx.Node | None:
        """Returns the node of a derived graph that was running when `error` was raised, or None."""
        found = None
        for frame, line in traceback.walk_tb(error.__traceback__):
            for program in self._programs.values():
                found = program.node_at(frame.f_code, line) or found
        return found

    def _finishing(
        self, flight: WorkInFlight, name: str, args: tuple[Any, ...], *options: int
    ) -> tuple[tuple[list[Any], list[Any], list[Any]], list[Any]]:
        """Runs a graph that completes the work of `flight`."""
        flight.check(self._can_resume(flight))
        try:
            return self._program(name, *options).run(args, flight)
        except BaseException:
            if flight.lost:
                self._flight = None
                logger.error(
                    "the last update of a training step is lost: parameters and optimizer state are"
                    " those of the step before, since waiting for the gradients failed"
                )
            raise

    def _can_resume(self, flight: WorkInFlight) -> bool:
        """True if the remaining groups need no values of the finished ones."""
        plan = self._current_plan()
        return plan.separate or flight.done in (0, len(plan.groups))

    def drop_flight(self) -> None:
        """Discards late work that is still to be done: state stays one update behind."""
        self._flight = None

    def _state_for_drain(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments that drain reads, with None for the others so that they can be
        freed."""
        return tuple(
            value if needed else None
            for value, needed in zip(args, self._program("drain", 0).reads, strict=True)
        )

    def _packed(self, results: tuple[list[Any], list[Any], list[Any]]) -> Any:
        """Returns the results of a derived graph in the nesting of `graph`."""
        if self._returns_lists is None:
            self._returns_lists = follows_output_convention(self.graph)
        if self._returns_lists:
            return results
        _, spec = _compat.tree_flatten(get_output(self.graph).args[0])
        return _compat.tree_unflatten(results[0], spec)

    def _current_plan(self) -> LatePlan:
        if self._plan is None:
            self._plan = plan(self.graph)
        return self._plan

    @property
    def first_executable(self) -> fx.Graph:
        """Returns the executable graph that runs when nothing is in flight."""
        return self._program("setup").graph

    def _derived(self, name: str, *options: Any) -> fx.GraphModule:
        derivation = Derivation(self.graph, self._current_plan())
        derived = _compat.lazy_graph_module(self, getattr(derivation, name)(*options))
        derived.meta.update(self.meta)
        derived.meta[DERIVED] = name
        return derived

    def _program(self, name: str, *options: Any) -> DerivedProgram:
        key = (name, *options)
        if key not in self._programs:
            carried = len(self._current_plan().carried) if name in ("setup", "main") else 0
            given = None if any(options) else self._given.pop(name, None)
            derived = self._derived(name, *options) if given is None else given
            reads = reads_of(derived.graph)
            if self._transform is not None:
                derived = self._transform(derived)
            self._programs[key] = DerivedProgram(self._loaded(derived), carried, reads)
        return self._programs[key]

    def _loaded(self, executable: fx.GraphModule) -> fx.GraphModule:
        """Returns the callable form of an executable graph."""
        return executable

    def __deepcopy__(self, memo: dict[int, Any]) -> IterGraphModule:
        """Copies the program, with nothing in flight."""
        plain, _ = copy_graph(self.graph, into=fx.Graph)
        constants = copy.deepcopy(fx.GraphModule(self, plain), memo)
        twin = IterGraphModule(self)
        fx.GraphModule.__init__(twin, constants, twin.graph)
        twin.meta.update(copy.deepcopy(self.meta, memo))
        return twin

    def __copy__(self) -> IterGraphModule:
        return IterGraphModule(self)

    def __reduce__(self) -> Any:
        raise TypeError(
            "an IterGraphModule cannot be pickled; graphopt.saved.save_graph(module, path) saves it"
        )
