"""Parts of a graph that a pass replaced on purpose by parts with other rounding.

    a, b ─ pattern ─ c          a, b ─ replacement ─ c'

The graph around them is proven: as if `c` and `c'` were one unknown function of `a` and `b`. The
parts themselves are run, before and after, on random inputs, and compared with a tolerance.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import tensors_in, without_autocast
from graphopt.ir.generators import generators_apart
from graphopt.ir.metadata import fake_value, known_value, set_value
from graphopt.ir.rewritten_places import RewrittenPlace
from graphopt.verify.problems import Problem
from graphopt.verify.values.terms import layout_of

logger = logging.getLogger("graphopt")

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE = 3e-2
"""The relative tolerance for smaller floating dtypes."""

_LARGEST = 2**25
"""The most elements that a value may have in a part that is run."""


@dataclass(frozen=True)
class Region:
    """The rewritten part in one of the two graphs.

    Attributes:
        inputs: nodes outside the part that it reads.
        outputs: nodes of the part that are used outside.
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class UnknownPlace:
    """An unknown function that stands for a rewritten node in a proof.

    Attributes:
        key: the function's identity.
        inputs: the function's arguments.
        like: a node with the layout of the result.
    """

    key: tuple[Any, ...]
    inputs: tuple[fx.Node, ...]
    like: fx.Node


class RewrittenRegions:
    """The rewritten parts of two graphs.

    Args:
        places: as noted while the graph was rewritten.
        copies: node of the graph after -> node of the graph before, of all that were there.
    """

    def __init__(self, places: Sequence[RewrittenPlace], copies: Mapping[fx.Node, fx.Node]) -> None:
        self.places = places
        self._old = dict(copies)
        self._problem: Problem | None = None
        self._pairs: list[tuple[RewrittenPlace, Region, Region]] = []
        self._later = {w: n for p in places for w, n in zip(p.before, p.after, strict=True)}
        for place in places:
            self._add(place)

    def _add(self, place: RewrittenPlace) -> None:
        for was, now in zip(place.before, place.after, strict=True):
            if was not in self._old:
                self._problem = self._problem or Problem(
                    f"%{now.name}: {place.pattern} was rewritten within nodes of the same pass",
                    (now,),
                    hint="put the two rewrites into two passes",
                )
                return
            self._old[now] = self._old[was]
        inputs = tuple(self._old[node] for node in place.inputs if node in self._old)
        before = Region(inputs, tuple(self._old[node] for node in place.before))
        after = Region(self._now(place.inputs), self._now(place.after))
        self._pairs.append((place, before, after))

    def _now(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """Returns the final replacements of nodes; a replacement may itself have been rewritten
        later."""
        found = list(nodes)
        for index, node in enumerate(found):
            while node in self._later:
                node = self._later[node]
            found[index] = node
        return tuple(found)

    def problems(self) -> Iterator[Problem]:
        """Yields the problems of the rewritten parts themselves."""
        if self._problem is not None:
            yield self._problem
            return
        compared: set[str] = set()
        for place, before, after in self._pairs:
            if len(before.inputs) != len(after.inputs):
                yield Problem(
                    f"{place.pattern} reads nodes that the pass itself has made", place.after[:1]
                )
                continue
            yield from _laid_out_otherwise(place, before, after)
            parts = [_extracted(region) for region in (before, after)]
            for part in parts:
                if isinstance(part, fx.Node):
                    yield Problem(
                        f"the replacement of {place.pattern} reads %{part.name} besides its inputs",
                        (place.after[0], part),
                    )
            graphs = [part for part in parts if isinstance(part, fx.Graph)]
            text = "\n".join([*map(_text, graphs), str(place.tolerance)])
            if len(graphs) == 2 and text not in compared:
                compared.add(text)
                yield from _compared(place, *graphs)

    def unknowns(self) -> tuple[dict[fx.Node, UnknownPlace], dict[fx.Node, UnknownPlace]]:
        """Returns unknown functions for the outputs of all rewritten parts, before and after."""
        old: dict[fx.Node, UnknownPlace] = {}
        new: dict[fx.Node, UnknownPlace] = {}
        for number, (_, before, after) in enumerate(self._pairs):
            inputs = dict(zip(before.inputs, after.inputs, strict=True))
            for index, (was, now) in enumerate(zip(before.outputs, after.outputs, strict=True)):
                needed = _needed(was, before.inputs)
                key = ("rewritten", number, index)
                old[was] = UnknownPlace(key, tuple(needed), was)
                new[now] = UnknownPlace(key, tuple(inputs[node] for node in needed), was)
        return old, new


def _laid_out_otherwise(place: RewrittenPlace, before: Region, after: Region) -> Iterator[Problem]:
    """Yields a problem for each output whose memory layout changed, since readers' bits depend on
    it."""
    for was, now in zip(before.outputs, after.outputs, strict=True):
        old, new = (list(map(layout_of, tensors_in(fake_value(node)))) for node in (was, now))
        if old != new:
            text = f"the replacement of {place.pattern} gives another kind of tensor"
            yield Problem(text, (now,))


def _between(outputs: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns all nodes that the outputs are computed from, up to and including the inputs."""
    ends, found = set(inputs), set[fx.Node]()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [] if node in ends else node.all_input_nodes
    return found


def _needed(output: fx.Node, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    within = _between([output], inputs)
    return [node for node in inputs if node in within]


def _extracted(region: Region) -> fx.Graph | fx.Node:
    """Returns a part as a graph of its own, or the node outside its inputs that it reads."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(region.inputs):
        copies[node] = graph.placeholder(f"input_{index}")
        set_value(copies[node], fake_value(node))
    for node in sorted(_between(region.outputs, region.inputs) - set(region.inputs)):
        if node.op != "call_function":
            return node
        given = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.call_function(cast(Any, node.target), *given)
        copies[node].meta = node.meta
    graph.output([copies[node] for node in region.outputs])
    return graph


def _text(graph: fx.Graph) -> str:
    """Returns a text that is equal for graphs with the same computation and kinds of tensors."""
    held = [known_value(node) for node in graph.find_nodes(op="placeholder")]
    return f"{graph} {list(map(layout_of, tensors_in(held)))}"


def _compared(place: RewrittenPlace, before: fx.Graph, after: fx.Graph) -> Iterator[Problem]:
    values = [v for g in (before, after) for n in g.nodes for v in tensors_in(known_value(n))]
    if not _can_run(values):
        logger.info("%s is too large to be compared, or not of this machine", place.pattern)
        return
    runs = _runs(before, after, positive=False)
    if not all(map(_has_numbers, runs[0])):
        runs = _runs(before, after, positive=True)
    if not all(map(_has_numbers, runs[0])):
        logger.info("%s gives no finite numbers on random inputs: not compared", place.pattern)
    for name, output, was, now in zip(place.outputs, place.after, *runs, strict=True):
        allowed = place.tolerance or _TOLERANCES.get(was.dtype, _TOLERANCE)
        gap, size = _largest_gap(was, now)
        if not gap <= allowed * size:
            yield Problem(
                f"{name} of the replacement of {place.pattern} differs on random inputs by"
                f" {gap:.3g}, where the largest element is {size:.3g}",
                (output,),
                hint=f"the tolerance is {allowed:g} of that; graphopt.rewrite(…, tolerance=…) sets"
                " another",
            )


def _can_run(values: Sequence[torch.Tensor]) -> bool:
    if any(_compat.has_symbolic_shape(v) or v.numel() > _LARGEST for v in values):
        return False
    return all(v.device.type == "cpu" or torch.cuda.is_available() for v in values)


def _runs(before: fx.Graph, after: fx.Graph, *, positive: bool) -> list[list[torch.Tensor]]:
    """Runs both parts on the same random inputs and returns their results."""
    found = []
    held = [fake_value(n) for n in before.find_nodes(op="placeholder")]
    devices = {tensor.device for tensor in tensors_in(held)}
    with torch.no_grad(), without_autocast():
        for graph in (before, after):
            with generators_apart(devices, seed=0):
                inputs = [_random(value, positive) for value in held]
            with generators_apart(devices, seed=1):
                found.append(list(fx.GraphModule(torch.nn.Module(), graph)(*inputs)))
    return found


def _has_numbers(value: torch.Tensor) -> bool:
    return not value.numel() or bool(value.isfinite().any())


def _random(held: Any, positive: bool) -> Any:
    """Returns a random value of the kind and layout of a fake one."""
    if not isinstance(held, torch.Tensor):
        return 0.5
    if not held.numel():
        return torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)
    reach = zip(held.shape, held.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in reach)
    if held.is_floating_point() or held.is_complex():
        values = torch.randn(length, dtype=torch.float64)
        values = values.abs() if positive else values
    elif held.dtype == torch.bool:
        values = torch.rand(length) < 0.5
    else:
        values = torch.zeros(length)
    laid = values.to(device=held.device, dtype=held.dtype)
    return laid.as_strided(held.shape, held.stride())


def _largest_gap(was: torch.Tensor, now: torch.Tensor) -> tuple[float, float]:
    """Returns the largest difference and the largest element, ignoring elements that were not
    finite."""
    if not was.numel():
        return 0.0, 1.0
    known = torch.isfinite(was)
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (was, now)]
    gap = (wide[0] - wide[1]).abs()[known].nan_to_num(torch.inf)
    size = wide[0].abs()[known]
    return (float(gap.max()), float(size.max())) if gap.numel() else (0.0, 1.0)
