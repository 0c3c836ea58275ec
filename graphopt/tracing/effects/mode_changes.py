"""Train and eval modes that a step sets, as by `model.train()` at its beginning.

    model.train(); loss.backward(); …    called between two evaluations: model.eval()

The capture traces such a step as it finds the modes, and as it leaves them. Where both traces are
one graph, and the former reads nothing else outside, the graph holds for either, and each call
leaves the modes that the step sets.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from graphopt.guards.modules import ModeChange
from graphopt.tracing.optimizers.steady import Steady
from graphopt.tracing.trace import RawTrace


def mode_changes(
    first: RawTrace, steady: Steady, modules: Iterable[nn.Module]
) -> tuple[ModeChange, ...]:
    """The modes that a step sets, if its first call differs from later ones in nothing else.

    Args:
        first: begins in the former modes.
        steady: begins in those that the step sets.
        modules: the modules of the step.
    """
    state, tables = steady.state, {id(vars(module)) for module in modules}
    alone = not (state.entries or state.gradients)
    modes = (name == "training" and id(of) in tables for of, name, _ in state.constants)
    if not alone or not all(modes):
        return ()
    if not first.outside.reads.keys() <= steady.raw.outside.reads.keys():
        return ()
    return tuple(ModeChange(of, of[name], value) for of, name, value in state.constants)
