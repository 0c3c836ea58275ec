"""The stages behind the passes that every graph goes through."""

from __future__ import annotations

from torch import fx

from graphopt.executable import finalize
from graphopt.host.votes import with_agreement
from graphopt.manager.stages import DerivedGraph, GraphStage


class Finalize(GraphStage):
    """Makes updates in place and reuses storage; see `graphopt.executable`."""

    name = "finalize"

    def apply(self, gm: fx.GraphModule, which: DerivedGraph) -> fx.GraphModule:
        return finalize(gm)


class Vote(GraphStage):
    """Adds the vote of all ranks, in each call, that no callback raised (see
    `graphopt.host.votes`); late work voted in its own iteration."""

    name, in_place = "vote", True

    def runs_on(self, which: DerivedGraph) -> bool:
        return bool(which.agreement) and which.name != "drain"

    def apply(self, gm: fx.GraphModule, which: DerivedGraph) -> fx.GraphModule:
        assert which.agreement is not None
        return with_agreement(gm, which.agreement)
