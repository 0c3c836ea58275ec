"""Compare the first call of a step, which makes optimizer state, with the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from torch import fx

from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.optimizers.creation import Creation
from graphopt.tracing.optimizers.first_momenta import FirstMomenta
from graphopt.tracing.optimizers.optimizer_state import OfNone
from graphopt.tracing.outside.places import same
from graphopt.tracing.results.comparison import NodeLabels, compute_the_same, significant
from graphopt.tracing.results.signature import (
    Computed,
    Constant,
    ContainerResult,
    Nested,
    Recipe,
    StateResult,
)
from graphopt.tracing.trace import RawTrace

_StateKey = tuple[int, str, str]
"""Optimizer, qualified name of the parameter, key: which entry of the state."""


def repeats_but_creation(
    call: Call, first: tuple[RawTrace, Inputs], following: tuple[RawTrace, Inputs], made: Creation
) -> bool:
    """Whether the first call does what the next one does, but for making state.

    Args:
        first, following: the traces of the two calls, with their inputs.
        made: how the first one makes state.
    """
    (raw, inputs), (next_raw, next_inputs) = first, following
    if next_raw.signature.states or not _same_recipes(raw, next_raw):
        return False
    states, gradients = _new_states(next_inputs, inputs), _new_gradients(next_inputs, inputs)
    before, after = list(inputs.kinds_and_names(call)), list(next_inputs.kinds_and_names(call))
    new = states.keys() | gradients
    if [name for index, name in enumerate(after) if index not in new] != before:
        return False
    if not _are_dropped(next_raw, next_inputs, gradients):
        return False
    names = {node: _key_of(inputs, state) for node, state in made.made.items()}
    if set(names.values()) != set(states.values()):
        return False
    a, b = raw.graph_module, next_raw.graph_module
    ours = _FirstLabels(a.graph, made, names, _results_of_states(raw))
    theirs = _NextLabels(b.graph, states, gradients, {names[node] for node in made.copies})
    theirs.numbers = next_inputs.numbers(call)
    nodes_a, nodes_b = significant(a.graph, ours), significant(b.graph, theirs)
    return compute_the_same(a, nodes_a, b, nodes_b) and ours.copied == theirs.copied


def _key_of(inputs: Inputs, state: StateResult) -> _StateKey:
    of = state.owner
    name = of.fqn if isinstance(of, OfNone) else inputs.module_tensors[of].fqn
    return (state.optimizer, name, state.key)


def _new_states(following: Inputs, inputs: Inputs) -> dict[int, _StateKey]:
    """Which inputs of the next call are state that the first one does not find, by position."""
    known = {(state.optimizer, state.parameter.fqn, state.key) for state in inputs.states}
    start = len(following.placeholders)
    keys = [(state.optimizer, state.parameter.fqn, state.key) for state in following.states]
    return {start + index: key for index, key in enumerate(keys) if key not in known}


def _new_gradients(following: Inputs, inputs: Inputs) -> set[int]:
    """Which inputs of the next call are gradients that the first one does not find."""
    known = {gradient.fqn for gradient in inputs.gradients}
    start = len(following.placeholders) + len(following.states)
    names = [gradient.fqn for gradient in following.gradients]
    return {start + index for index, name in enumerate(names) if name not in known}


def _are_dropped(raw: RawTrace, inputs: Inputs, gradients: set[int]) -> bool:
    """Whether a call replaces gradients that it finds, and nobody reads them before."""
    start = len(inputs.placeholders) + len(inputs.states)
    replaced = {result.owner for result in raw.signature.gradients}
    owners = {id(entry): index for index, entry in enumerate(inputs.module_tensors)}
    nodes = raw.graph_module.graph.find_nodes(op="placeholder")
    return all(
        not nodes[index].users and owners[id(inputs.gradients[index - start].owner)] in replaced
        for index in gradients
    )


def _same_recipes(first: RawTrace, following: RawTrace) -> bool:
    """Whether what is no part of the graphs is returned alike."""
    ours, theirs = first.signature.outputs, following.signature.outputs
    if first.signature.output_spec != following.signature.output_spec:
        return False
    if first.signature.stepped != following.signature.stepped:
        return False
    if _settings(first) != _settings(following):
        return False
    if not (_same_containers(first, following) and _left_alike(first, following)):
        return False
    if _owners(first) != _owners(following) or not _same_attributes(first, following):
        return False
    return len(ours) == len(theirs) and all(map(_same_recipe, ours, theirs))


def _same_attributes(first: RawTrace, following: RawTrace) -> bool:
    """Whether the next call sets the attributes that the first one sets, to the same constants. It
    need not set constants that it finds."""
    before = {(id(a.attributes), a.name): a.recipe for a in first.signature.attributes}
    for attribute in following.signature.attributes:
        recipe = before.pop((id(attribute.attributes), attribute.name), None)
        if recipe is None or not _same_recipe(recipe, attribute.recipe):
            return False
    return all(isinstance(recipe, Constant) for recipe in before.values())


def _left_alike(first: RawTrace, following: RawTrace) -> bool:
    """Whether both calls leave the same in the same places outside their arguments."""
    ours, theirs = first.signature.placed, following.signature.placed
    places = [[each.place.identity for each in placed] for placed in (ours, theirs)]
    recipes = ([each.recipe for each in placed] for placed in (ours, theirs))
    return places[0] == places[1] and all(map(_same_recipe, *recipes))


def _same_containers(first: RawTrace, following: RawTrace) -> bool:
    """Whether both calls change the lists and dictionaries among their arguments alike."""
    ours, theirs = first.signature.containers, following.signature.containers
    return len(ours) == len(theirs) and all(map(_same_container, ours, theirs))


def _same_container(a: ContainerResult, b: ContainerResult) -> bool:
    keys = [(c.change.path, c.change.removed, [k for k, _ in c.change.items]) for c in (a, b)]
    pairs = zip(a.change.items, b.change.items, strict=False)
    return keys[0] == keys[1] and all(_same_recipe(x, y) for (_, x), (_, y) in pairs)


def _settings(raw: RawTrace) -> list[Any]:
    """What else a call changes: settings of parameter groups, and the storage of parameters."""
    settings = [(s.optimizer, s.group, s.key, _known(s.recipe)) for s in raw.signature.settings]
    signature = raw.signature
    moved = [list(signature.rebound), list(signature.data)]
    return [settings, *moved, signature.flags, signature.flags_of_parameters]


def _known(recipe: Recipe) -> Any:
    if isinstance(recipe, Nested):
        return recipe.spec, *map(_known, recipe.leaves)
    return recipe if isinstance(recipe, Constant) else type(recipe)


def _owners(raw: RawTrace) -> list[tuple[int | None, int | None]]:
    """To whom a call gives gradients."""
    return [(gradient.owner, gradient.argument) for gradient in raw.signature.gradients]


def _same_recipe(a: Recipe, b: Recipe) -> bool:
    if isinstance(a, Constant) and isinstance(b, Constant):
        return same(a.value, b.value)
    if isinstance(a, Nested) and isinstance(b, Nested):
        return a.spec == b.spec and all(map(_same_recipe, a.leaves, b.leaves))
    return type(a) is type(b)


def _results_of_states(raw: RawTrace) -> set[int]:
    recipes = (state.recipe for state in raw.signature.states)
    return {recipe.index for recipe in recipes if isinstance(recipe, Computed)}


class _FirstLabels(NodeLabels):
    """Of the first call: without the nodes that make state alone, which are called after it.

    Attributes:
        copied: state that copies a value: which value, after how many nodes.
    """

    def __init__(
        self,
        graph: fx.Graph,
        creation: Creation,
        names: Mapping[fx.Node, _StateKey],
        dropped: set[int],
    ) -> None:
        super().__init__()
        self.copied: dict[_StateKey, Any] = {}
        self._copies, self._names = creation.copies, names
        self._private, self._dropped = creation.private(), dropped
        for position, node in enumerate(graph.find_nodes(op="placeholder")):
            self.of[node] = ("input", position)

    def passes_over(self, node: fx.Node, position: int) -> bool:
        if node.op == "placeholder":
            return True
        name = self._names.get(node)
        if name is None:
            return node in self._private or super().passes_over(node, position)
        self.of[node] = ("state", name)
        if node in self._copies:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            self.copied[name] = (position, self.of[source])
        return True

    def arguments(self, node: fx.Node) -> Any:
        if node.op != "output":
            return super().arguments(node)
        results = list(node.args[0])  # type: ignore[arg-type]
        return [
            self.of.get(value, value) if isinstance(value, fx.Node) else repr(value)
            for index, value in enumerate(results)
            if index not in self._dropped
        ]


class _NextLabels(NodeLabels):
    """Of the next call. State that the first call makes as a copy is taken for negative zeros until
    ``state * positive number + value`` has made it that value.

    Attributes:
        copied: as of the first call.
        numbers: values of hyperparameters, by the position of their placeholders.
    """

    def __init__(
        self,
        graph: fx.Graph,
        states: Mapping[int, _StateKey],
        gradients: set[int],
        copies: set[_StateKey],
    ) -> None:
        super().__init__()
        self.copied: dict[_StateKey, Any] = {}
        self.numbers: dict[int, float] = {}
        self._position = {
            node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))
        }
        copied = [n for n, i in self._position.items() if i in states and states[i] in copies]
        self._momenta = FirstMomenta(
            copied, lambda node: self.numbers.get(self._position.get(node, -1))
        )
        inputs = 0
        for node, index in self._position.items():
            if index in states:
                self.of[node] = ("state", states[index])
            elif index in gradients:
                self.of[node] = ("gradient", index)
            else:
                self.of[node] = ("input", inputs)
                inputs += 1

    def passes_over(self, node: fx.Node, position: int) -> bool:
        if node.op == "placeholder":
            return True
        return self._first_use(node, position) or super().passes_over(node, position)

    def arguments(self, node: fx.Node) -> Any:
        if node.op != "output":
            return super().arguments(node)
        results: Sequence[Any] = node.args[0]  # type: ignore[assignment]
        return [
            self.of.get(value, value) if isinstance(value, fx.Node) else repr(value)
            for value in results
        ]

    def _first_use(self, node: fx.Node, position: int) -> bool:
        """Whether a node only makes state that is negative zeros the value that is added."""
        before = len(self._momenta.first)
        if not self._momenta.takes(node):
            return False
        for momentum, value in islice(self._momenta.first.items(), before, None):
            self.copied[self.of[momentum][1]] = (position, self.of[value])
        if isinstance(node.args[0], fx.Node):
            self.of[node] = self.of[node.args[0]]
        return True
