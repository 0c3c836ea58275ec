"""The stages behind the passes that every graph goes through, compiled or not."""

from __future__ import annotations

from torch import fx

from graphopt.executable import finalize
from graphopt.host.votes import with_agreement
from graphopt.manager.stages import DerivedGraph, GraphStage


class Finalize(GraphStage):
    """Updates happen in place, and storage is used again: see `graphopt.executable`."""

    name = "finalize"

    def apply(self, gm: fx.GraphModule, which: DerivedGraph) -> fx.GraphModule:
        return finalize(gm)


class Vote(GraphStage):
    """All ranks agree in each call that no function of the program's has raised: see
    `graphopt.host.votes`. Late work has been agreed on in its own iteration."""

    name, in_place = "vote", True

    def runs_on(self, which: DerivedGraph) -> bool:
        return bool(which.agreement) and which.name != "drain"

    def apply(self, gm: fx.GraphModule, which: DerivedGraph) -> fx.GraphModule:
        assert which.agreement is not None
        return with_agreement(gm, which.agreement)
