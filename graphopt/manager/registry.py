"""The passes that are known by name, and the constraints between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import networkx as nx

from graphopt.errors import PassDefinitionError, PipelineSyntaxError
from graphopt.manager.declaration import Pass
from graphopt.manager.names import suggestion


class PassRegistry:
    """Passes by name. `PassRegistry()` is empty and knows of no other."""

    def __init__(self) -> None:
        self._passes: dict[str, Pass] = {}
        self._loaders: list[Callable[[], None]] = []

    def add_loader(self, loader: Callable[[], None]) -> None:
        """Let `loader` run, once, before the registry is first asked: it declares passes."""
        self._loaders.append(loader)

    def register(self, pass_: Pass) -> Pass:
        """Make a pass known.

        The same function, by module and name, replaces itself, as when a notebook cell runs again.

        Raises:
            PassDefinitionError: another pass has the name, or the constraints form a circle.
                Nothing is registered then.
        """
        if not isinstance(pass_, Pass):
            raise PassDefinitionError(
                f"{pass_!r} is not a pass: declare it with @graph_optimization_pass()"
            )
        other = self._passes.get(pass_.name)
        if other is not None and other.identity != pass_.identity:
            raise PassDefinitionError(
                f"two passes are named {pass_.name!r}: {_function(other)} and {_function(pass_)};"
                " give one of them another name="
            )
        passes = {**self._passes, pass_.name: pass_}
        _refuse_circle(_constraints(passes.values()), pass_)
        self._passes = passes
        return pass_

    def names(self) -> list[str]:
        """Names of all passes, sorted."""
        self._load()
        return sorted(self._passes)

    def get(self, name: str) -> Pass:
        """The pass of that name.

        Raises:
            PipelineSyntaxError: there is none; names the nearest.
        """
        self._load()
        if name not in self._passes:
            raise PipelineSyntaxError(f"there is no pass {name!r}" + suggestion(name, self._passes))
        return self._passes[name]

    @property
    def graph(self) -> nx.DiGraph:
        """All constraints: an edge from each pass to those that come after it.

        Its attribute `kind` is "prerequisite" or "apply_after". A name that a constraint mentions
        and nobody declares is a node as well.
        """
        self._load()
        return _constraints(self._passes.values())

    def order(self, names: Iterable[str]) -> list[str]:
        """`names` in an order that all constraints between them allow.

        It is stable: a name moves back only as far as it must.

        Raises:
            PipelineSyntaxError: a name is unknown.
            PassDefinitionError: one of the passes mentions an unknown pass.
        """
        wanted = list(names)
        passes = {name: self.get(name) for name in wanted}
        self.check_known(list(passes.values()))
        allowed = nx.DiGraph()
        allowed.add_nodes_from(range(len(wanted)))
        places: dict[str, list[int]] = {}
        for place, name in enumerate(wanted):
            places.setdefault(name, []).append(place)
        for name, own in places.items():
            for first in (*passes[name].prerequisites, *passes[name].apply_after):
                allowed.add_edges_from((i, j) for i in places.get(first, ()) for j in own)
        return [wanted[place] for place in nx.lexicographical_topological_sort(allowed)]

    def check_known(self, passes: Sequence[Pass]) -> None:
        """Raise `PassDefinitionError` if a constraint of `passes` mentions an unknown pass."""
        mentioned = [(p, n) for p in passes for n in (*p.prerequisites, *p.apply_after)]
        here = {p.name for p in passes}
        if all(name in here for _, name in mentioned):
            return
        self._load()
        known = here | self._passes.keys()
        for pass_, name in mentioned:
            if name not in known:
                kind = "prerequisites" if name in pass_.prerequisites else "apply_after"
                raise PassDefinitionError(
                    f"{kind} of pass {_place(pass_)} names {name!r}, which is not a pass"
                    + suggestion(name, known - {pass_.name})
                )

    def _load(self) -> None:
        while self._loaders:
            loader = self._loaders.pop(0)
            try:
                loader()
            except BaseException:
                self._loaders.insert(0, loader)
                raise


_DEFAULT = PassRegistry()


def default_registry() -> PassRegistry:
    """The registry in which `graph_optimization_pass` declares passes unless told otherwise."""
    return _DEFAULT


def _place(pass_: Pass) -> str:
    return f"{pass_.name!r} ({pass_.source})"


def _function(pass_: Pass) -> str:
    return f"{pass_.function.__name__} ({pass_.source})"


def _constraints(passes: Iterable[Pass]) -> nx.DiGraph:
    graph = nx.DiGraph()
    for pass_ in passes:
        graph.add_node(pass_.name)
        graph.add_edges_from(((n, pass_.name) for n in pass_.apply_after), kind="apply_after")
        graph.add_edges_from(((n, pass_.name) for n in pass_.prerequisites), kind="prerequisite")
    return graph


def _refuse_circle(constraints: nx.DiGraph, pass_: Pass) -> None:
    if constraints.has_edge(pass_.name, pass_.name):
        raise PassDefinitionError(f"pass {_place(pass_)} is to come after itself")
    circle = _circle_through(constraints, pass_.name)
    if circle is not None:
        raise PassDefinitionError(
            f"pass {_place(pass_)} closes a circle of constraints, which no order can keep:\n    "
            + " -> ".join(circle)
        )


def _circle_through(constraints: nx.DiGraph, name: str) -> list[str] | None:
    for successor in constraints.successors(name):
        if nx.has_path(constraints, successor, name):
            return [name, *nx.shortest_path(constraints, successor, name)]
    return None
