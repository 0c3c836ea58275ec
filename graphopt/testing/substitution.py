"""Substitution of a rewritten graph's intermediate values into the untouched graph.

A pass that sends gradients in few bits changes all that follows from them, and an optimizer that
divides by the size of a gradient makes much of a small error in it. Whether the pass is right shows
where it has rounded: a reader that both graphs have reads another value, `b` in place of `a`.

    untouched                          rewritten
    %a   = wait_tensor(…)              %a = wait_tensor(…)
                                       %b = to(to(%a, bfloat16), float32)
    %mul = mul(%a, …)                  %mul = mul(%b, …)

If rounding explains the difference between `a` and `b`, over runs with several batches, then the
untouched graph runs with `b` in place of `a`, and has to give what the rewritten graph gives. This
is backward error analysis (Wilkinson, Rounding Errors in Algebraic Processes, 1963): a result is
right if it is the exact result of slightly different data. So no tolerance has to allow for what an
optimizer makes of rounding, and no error hides in such a tolerance.

Values that depend on optimizer state or hyperparameters are never substituted, nor are scalars and
new values of state: a decay that is slightly wrong looks like rounding of the weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_collective, is_operator
from graphopt.ir.metadata import input_kind, known_value, phase_of
from graphopt.iter_graph import IterGraphModule
from graphopt.testing.comparing import RunValue, Values, largest, sample, wide
from graphopt.testing.experiments import Experiment
from graphopt.testing.factors import Runs, measured, multiplied, problem_of_runs

SUBSTITUTED = "substituted"
"""The kind of a `RunValue` that was substituted."""

_RELATIVE, _ABSOLUTE = 2.0**-3, 1e-2
"""The most that rounding changes an element, relative to itself (floats with two bits of fraction)
and to the largest of its tensor (integers of eight bits)."""

ROUNDING_ALONE, _GREATER = 0.1, 2.0
"""The relative response to noise from which a tensor counts as rounding error, and how many times
larger its elements may become."""

RunGraph = Callable[[fx.GraphModule, Experiment], Values]


class _Pair(NamedTuple):
    """A node of the untouched graph, and the node that some of its readers read instead."""

    was: str
    now: str
    readers: tuple[str, ...]


class Substitution:
    """Runs two graphs, the untouched one with values of the rewritten one.

    Args:
        untouched, rewritten: graphs before and after a pass.
        run_untouched, run_rewritten: run such a graph with the inputs of an experiment.
        as_it_is: gives what `untouched` itself gives.
    """

    def __init__(
        self,
        untouched: fx.GraphModule,
        rewritten: fx.GraphModule,
        run_untouched: RunGraph,
        run_rewritten: RunGraph,
        as_it_is: Callable[[Experiment], Values],
    ) -> None:
        late = isinstance(rewritten, IterGraphModule) and bool(rewritten.graph.late)
        self._pairs = [] if late else list(_pairs(untouched, rewritten))
        self._chosen: set[int] = set()
        self._was: list[list[torch.Tensor]] = []
        self._now: list[list[torch.Tensor]] = []
        self._untouched, self._rewritten = untouched, rewritten
        self._run_untouched, self._run_rewritten = run_untouched, run_rewritten
        self._as_it_is = as_it_is
        self._actual: dict[str, tuple[Values, list[list[torch.Tensor]]]] = {}
        if self._pairs:
            self._untouched, self._rewritten = copy.deepcopy((untouched, rewritten))
            self._watch()

    def choose(self, trials: Sequence[Experiment], disturbed: Experiment) -> None:
        """Chooses the values whose differences rounding explains in several experiments.

        One may be seen to be right only when those that it depends on are substituted.

        Args:
            disturbed: the first of the trials with noise as of rounding. A value that this makes
                quite another is an error of rounding itself, and may be any other as small.
        """
        if not self._pairs:
            return
        alone = self._rounding_alone(trials[0], disturbed)
        while len(self._chosen) < len(self._pairs):
            found = self._explained(trials, alone)
            if not found:
                return
            self._chosen |= found

    def _explained(self, trials: Sequence[Experiment], alone: set[int]) -> set[int]:
        """Returns further values that rounding explains, now that the chosen are substituted."""
        samples: dict[int, Runs] = {
            number: [] for number in range(len(self._pairs)) if number not in self._chosen
        }
        for trial in trials:
            self._run(trial)
            for number in list(samples):
                values = list(zip(self._was[number], self._now[number], strict=True))
                if all(_are_near(*pair, number in alone) for pair in values):
                    samples[number] += [(sample(was), sample(now)) for was, now in values]
                else:
                    del samples[number]
        return {n for n, runs in samples.items() if n in alone or _is_right_on_average(runs)}

    def _rounding_alone(self, first: Experiment, disturbed: Experiment) -> set[int]:
        """Returns the values that noise on the inputs makes quite others."""
        shown = []
        for experiment in (first, disturbed):
            self._was = [[] for _ in self._pairs]
            self._run_untouched(self._untouched, experiment)
            shown.append(self._was)
        return {
            number
            for number, (values, noisy) in enumerate(zip(*shown, strict=True))
            if any(
                largest(other - value) > ROUNDING_ALONE * largest(value)
                for value, other in zip(values, noisy, strict=True)
            )
        }

    def run(self, experiment: Experiment) -> tuple[Values, Values]:
        """Returns what both graphs give, with the values that were substituted."""
        if not self._chosen:
            return self._as_it_is(experiment), self._run_rewritten(self._rewritten, experiment)
        expected, actual = map(dict, self._run(experiment))
        for number in sorted(self._chosen):
            was, now, _ = self._pairs[number]
            for rank, values in enumerate(zip(self._was[number], self._now[number], strict=True)):
                where = f"%{now}, which is read in place of %{was}, on rank {rank}"
                expected[where], actual[where] = (RunValue(v, kind=SUBSTITUTED) for v in values)
        return expected, actual

    def _run(self, experiment: Experiment) -> tuple[Values, Values]:
        self._was, self._now = [[] for _ in self._pairs], [[] for _ in self._pairs]
        if experiment.name in self._actual:
            actual, self._now = self._actual[experiment.name]
        else:
            actual = self._run_rewritten(self._rewritten, experiment)
            if experiment.is_kept:
                self._actual[experiment.name] = actual, self._now
        return self._run_untouched(self._untouched, experiment), actual

    def _watch(self) -> None:
        """Makes both graphs show their values of each pair, and the untouched one take others."""
        was = {node.name: node for node in self._untouched.graph.nodes}
        now = {node.name: node for node in self._rewritten.graph.nodes}
        for number, pair in enumerate(self._pairs):
            _put_behind(now[pair.now], self._recorder(number), list(now[pair.now].users))
            _put_behind(was[pair.was], self._giver(number), [was[name] for name in pair.readers])
        self._untouched.recompile()
        self._rewritten.recompile()

    def _recorder(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def record(value: torch.Tensor) -> torch.Tensor:
            self._now[number].append(value)
            return value

        return record

    def _giver(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def give(value: torch.Tensor) -> torch.Tensor:
            rank = len(self._was[number])
            self._was[number].append(value)
            return self._now[number][rank] if number in self._chosen else value

        return give


def _pairs(untouched: fx.GraphModule, rewritten: fx.GraphModule) -> Iterator[_Pair]:
    """Yields the values that readers in both graphs read from different nodes."""
    known = {node.name: node for node in untouched.graph.nodes}
    before, after = _inputs_below(untouched.graph), _inputs_below(rewritten.graph)
    found: dict[tuple[fx.Node, fx.Node], list[str]] = {}
    for reader in rewritten.graph.nodes:
        same = known.get(reader.name)
        if same is None or not _is_reader(reader) or same.target != reader.target:
            continue
        for was, now in zip(_arguments(same), _arguments(reader), strict=False):
            if _is_edited(now, known) and _are_alike(was, now) and after[now] <= before[was]:
                found.setdefault((was, now), []).append(reader.name)
    for (was, now), readers in found.items():
        if not {input_kind(known[name]) for name in before[was]} & _OF_OPTIMIZER:
            yield _Pair(was.name, now.name, tuple(dict.fromkeys(readers)))


_OF_OPTIMIZER = {"optimizer_state", "hyperparameter"}


def _is_edited(node: fx.Node, known: Mapping[str, fx.Node]) -> bool:
    """True if a pass has made a node or has changed its call."""
    was = known.get(node.name)
    return was is None or _call(node) != _call(was)


def _call(node: fx.Node) -> tuple[Any, str, str]:
    return node.target, str(node.args), str(node.kwargs)


def _is_reader(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_operator(node.target, "aten::copy_")


def _is_computed(node: fx.Node) -> bool:
    """True if a node returns a value of its own, which is there at once."""
    return _is_reader(node) and not is_collective(node)


def _are_alike(was: fx.Node, now: fx.Node) -> bool:
    """True if both are computed, float tensors of one shape with several elements, and no new
    values of an optimizer."""
    values = [known_value(node) for node in (was, now)]
    if not _is_computed(was) or phase_of(was) == "optimizer":
        return False
    if not all(isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() for v in values):
        return False
    return (values[0].dtype, values[0].shape) == (values[1].dtype, values[1].shape)


def _arguments(node: fx.Node) -> list[fx.Node]:
    leaves: list[Any] = _compat.tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _inputs_below(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """Returns the names of the inputs that each node depends on."""
    found: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        own = frozenset([node.name]) if node.op == "placeholder" else frozenset()
        found[node] = own.union(*(found[each] for each in node.all_input_nodes))
    return found


def _put_behind(node: fx.Node, function: Callable[..., Any], readers: Sequence[fx.Node]) -> None:
    with node.graph.inserting_after(node):
        shown = node.graph.call_function(function, (node,))
    shown.meta = dict(node.meta)
    for reader in readers:
        reader.replace_input_with(node, shown)


def _are_near(was: torch.Tensor, now: torch.Tensor, alone: bool) -> bool:
    """True if rounding explains the distance of all elements.

    Args:
        alone: they are hardly more than rounding errors.
    """
    if alone:
        return largest(now) <= _GREATER * largest(was) and multiplied(wide(was), wide(now)) is None
    allowed = _RELATIVE * wide(was).abs() + _ABSOLUTE * largest(was)
    return bool(((wide(now) - wide(was)).abs() <= allowed).all())


def _is_right_on_average(runs: Runs) -> bool:
    return measured(runs) is not None and problem_of_runs(runs) is None
