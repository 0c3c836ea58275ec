"""Checks of what is made of a graph after all passes.

Each stage is shown to compute what the graph that it was given computes. Where storages are reused,
what is in them is followed: a value that was overwritten while somebody could still read it would
be read as what it is then.
"""

from __future__ import annotations

from torch import fx

from graphopt.verify.equivalence import EquivalenceReport, check_equivalence


def check_finalized(before: fx.GraphModule, after: fx.GraphModule) -> EquivalenceReport:
    """Whether a graph in the executable dialect does what its functional form does.

    Shown is, besides equivalence, that results and carried values lie in storage of their own as
    they did, not in that of state, which the next iteration overwrites; and that a value which was
    carried from the last iteration is overwritten only where the functional form updates it.

    Args:
        before: a derived graph (setup, main, drain) in the captured dialect.
        after: what `graphopt.executable.finalize` made of it.
    """
    return check_equivalence(before, after)


def check_divided(before: fx.GraphModule, after: fx.GraphModule) -> EquivalenceReport:
    """Whether a graph parts of which stand in submodules does what it did as one.

    Parts are read through their graphs: those of `graphopt.partition.split_module`, and those from
    which regions are compiled. What Inductor makes of a region is not looked at, but trusted.

    Args:
        before: the graph as one.
        after: the graph that calls the submodules.
    """
    return check_equivalence(before, after)
