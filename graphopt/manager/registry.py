"""The registry of passes by name, and the constraints between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from graphopt.errors import PassDefinitionError, PipelineSyntaxError
from graphopt.graph_utils.ordering import earliest_order, shortest_cycle
from graphopt.manager.declaration import Pass
from graphopt.manager.names import suggestion

if TYPE_CHECKING:
    import networkx as nx


class PassRegistry:
    """A registry of passes by name. `PassRegistry()` is empty and isolated.

    Attributes:
        pipelines: makers of the pipelines that have a name.

    >>> import graphopt
    >>> graphopt.PassRegistry().names()
    []
    >>> graphopt.registry.order(["schedule_comm_wait", "comm_fusion_with_concat"])
    ['comm_fusion_with_concat', 'schedule_comm_wait']
    """

    def __init__(self) -> None:
        self._passes: dict[str, Pass] = {}
        self._loaders: list[Callable[[], None]] = []
        self._running: list[Callable[[], None]] = []
        self.pipelines: dict[str, Callable[[], list[Any]]] = {"none": list}

    def add_loader(self, loader: Callable[[], None]) -> None:
        """Adds a function that declares passes; it runs once, before the registry's first use."""
        self._loaders.append(loader)

    def register(self, pass_: Pass) -> Pass:
        """Adds a pass.

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
        """Returns the names of all passes, sorted."""
        self._load()
        return sorted(self._passes)

    def get(self, name: str) -> Pass:
        """Returns the pass of that name.

        Raises:
            PipelineSyntaxError: there is none; names the nearest.
        """
        self._load()
        if name not in self._passes:
            raise PipelineSyntaxError(f"there is no pass {name!r}" + suggestion(name, self._passes))
        return self._passes[name]

    @property
    def graph(self) -> nx.DiGraph:
        """The graph of all constraints: an edge from each pass to those that must come after it.

        Its attribute `kind` is "prerequisite", "apply_after" or "apply_before". A name that a
        constraint mentions and nobody declares is a node as well.
        """
        import networkx as nx  # a tenth of a second that declaring passes need not wait for

        self._load()
        graph = nx.DiGraph()
        for pass_ in self._passes.values():
            graph.add_node(pass_.name)
            for first, second, kind in _constraints([pass_]):
                graph.add_edge(first, second, kind=kind)
        return graph

    def order(self, names: Iterable[str]) -> list[str]:
        """Returns `names` in a stable order that satisfies all constraints between them.

        It is stable: a name moves back only as far as it must.

        Raises:
            PipelineSyntaxError: a name is unknown.
            PassDefinitionError: a prerequisite of one of the passes is an unknown pass.
        """
        wanted = list(names)
        passes = {name: self.get(name) for name in wanted}
        self.check_known(list(passes.values()))
        places: dict[str, list[int]] = {}
        for place, name in enumerate(wanted):
            places.setdefault(name, []).append(place)
        followers: dict[int, set[int]] = {place: set() for place in range(len(wanted))}
        for first, second, _ in _constraints(passes.values()):
            for place in places.get(first, ()):
                followers[place].update(places.get(second, ()))
        return [wanted[place] for place in earliest_order(followers)]

    def check_known(self, passes: Sequence[Pass]) -> None:
        """Raises `PassDefinitionError` if a prerequisite of `passes` is unknown; unknown names in
        the other constraints are ignored."""
        mentioned = [(p, n) for p in passes for n in p.prerequisites]
        here = {p.name for p in passes}
        if all(name in here for _, name in mentioned):
            return
        self._load()
        known = here | self._passes.keys()
        for pass_, name in mentioned:
            if name not in known:
                raise PassDefinitionError(
                    f"prerequisites of pass {_place(pass_)} names {name!r}, which is not a pass"
                    + suggestion(name, known - {pass_.name})
                )

    def unknown(self, pass_: Pass) -> list[str]:
        """Returns names in a pass's `apply_after` and `apply_before` that are no passes yet; none
        during discovery."""
        mentioned = dict.fromkeys((*pass_.apply_after, *pass_.apply_before))
        if self._running or mentioned.keys() <= self._passes.keys():
            return []
        self._load()
        return [name for name in mentioned if name not in self._passes]

    def _load(self) -> None:
        while self._loaders:
            loader = self._loaders.pop(0)
            self._running.append(loader)
            try:
                loader()
            except BaseException:
                self._loaders.insert(0, loader)
                raise
            finally:
                self._running.remove(loader)


_DEFAULT = PassRegistry()


def default_registry() -> PassRegistry:
    """Returns the registry in which `graph_optimization_pass` declares passes by default.

    >>> from graphopt.manager import default_registry
    >>> default_registry() is graphopt.registry
    True
    """
    return _DEFAULT


def _place(pass_: Pass) -> str:
    return f"{pass_.name!r} ({pass_.source})"


def _function(pass_: Pass) -> str:
    return f"{pass_.function.__name__} ({pass_.source})"


def _constraints(passes: Iterable[Pass]) -> Iterator[tuple[str, str, str]]:
    """Yields all constraints of passes as (pass, later pass, kind)."""
    for pass_ in passes:
        yield from ((pass_.name, name, "apply_before") for name in pass_.apply_before)
        yield from ((name, pass_.name, "apply_after") for name in pass_.apply_after)
        yield from ((name, pass_.name, "prerequisite") for name in pass_.prerequisites)


def _refuse_circle(constraints: Iterable[tuple[str, str, str]], pass_: Pass) -> None:
    followers: dict[str, list[str]] = {}
    for first, second, _ in constraints:
        followers.setdefault(first, []).append(second)
    circle = shortest_cycle(followers, pass_.name)
    if circle == [pass_.name, pass_.name]:
        raise PassDefinitionError(f"pass {_place(pass_)} is to come after itself")
    if circle is not None:
        raise PassDefinitionError(
            f"pass {_place(pass_)} closes a circle of constraints, which no order can keep:\n    "
            + " -> ".join(circle)
        )
