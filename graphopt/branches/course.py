"""The course of a call: all that it has computed so far, as one graph over all graphs it ran.

    first graph       x ─ a ─ b ─ ok? ✗
    continuation              b ─ c ─ ok? ✗          course:  x ─ a ─ b ─ c

Courses are written to be compared: inputs and constants that are the same have the same name, in
whatever graph they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.graph_utils import get_output
from graphopt.host import is_host_call
from graphopt.ir.metadata import known_value, set_value
from graphopt.verify.checks.module_constants import attribute, same_object
from graphopt.verify.symbolic.evaluation import evaluate_graph
from graphopt.verify.symbolic.evaluation_outcome import Evaluation
from graphopt.verify.values.terms import Terms


class CourseNames:
    """The names of inputs and constants that all courses of one call share."""

    def __init__(self) -> None:
        self._inputs = count()
        self._constants: list[Any] = []

    def of_input(self) -> str:
        """Returns an unused input name."""
        return f"course_input_{next(self._inputs)}"

    def of_constant(self, value: Any) -> str:
        """The name of a module's constant, the same for equal constants."""
        known = (i for i, other in enumerate(self._constants) if same_object(other, value))
        index = next(known, len(self._constants))
        if index == len(self._constants):
            self._constants.append(value)
        return f"course_constant_{index}"


class Course:
    """The nodes that one call has run, over all graphs, in order.

    Args:
        names: shared by all courses that are compared.

    Attributes:
        graph: of all nodes, without an output; it is not to be run.
        names: of its inputs and constants.
    """

    def __init__(self, names: CourseNames) -> None:
        self.graph, self.names = fx.Graph(), names

    def forked(self) -> tuple[Course, dict[fx.Node, fx.Node]]:
        """A copy that can be extended separately, and the copy of each node."""
        fork, copies = Course(self.names), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            copies[node] = _compat.copy_node(fork.graph, node, copies.__getitem__)
        return fork, copies

    def add_input(self, like: fx.Node, name: str | None = None) -> fx.Node:
        """Adds an input of the call, under the `name` that it has in another course if given."""
        node = self.graph.placeholder(name or self.names.of_input())
        set_value(node, known_value(like))
        return node

    def run(
        self, nodes: Iterable[fx.Node], values: Mapping[fx.Node, fx.Node], *, decided: bool = False
    ) -> dict[fx.Node, fx.Node]:
        """Appends copies of a graph's nodes.

        Args:
            nodes: in order; inputs and the output among them are left out.
            values: what stands for its inputs.
            decided: leave out what the host is told as well: no assumption has failed.

        Returns:
            What stands for each node.
        """
        found = dict(values)
        for node in nodes:
            if node.op in ("placeholder", "output") or (decided and is_host_call(node)):
                continue
            found[node] = _compat.copy_node(self.graph, node, found.__getitem__)
            if node.op == "get_attr":
                owner = node.graph.owning_module
                assert isinstance(owner, fx.GraphModule)
                found[node].target = self.names.of_constant(attribute(owner, node))
        return found

    def evaluated_with(
        self, graph: fx.Graph, values: Mapping[fx.Node, fx.Node], terms: Terms
    ) -> tuple[Evaluation, dict[fx.Node, fx.Node]]:
        """Appends a whole graph as `run` does, and evaluates the course with its outputs."""
        nodes = self.run(graph.nodes, values)
        outputs = fx.node.map_arg(get_output(graph).args[0], nodes.__getitem__)
        return self.evaluated(terms, outputs), nodes

    def evaluated(self, terms: Terms, outputs: Any = ((), (), ())) -> Evaluation:
        """Evaluates the course symbolically.

        Args:
            outputs: what it leaves, by the output convention.

        Raises:
            NotDecidedError: terms cannot speak of it.
        """
        output = self.graph.output(outputs)
        try:
            return evaluate_graph(self.graph, terms)
        finally:
            self.graph.erase_node(output)
