"""Binding of a captured step to the state that makes it callable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphopt.host.counts import TimesReached
    from graphopt.runtime.agreement.agreed import RankAgreement
    from graphopt.runtime.bound_step import BoundStep
    from graphopt.tracing import CapturedStep
    from graphopt.tracing.call import Call


class Binding:
    """Binds the captured graphs of one training step; they share one count of callbacks."""

    def __init__(self) -> None:
        self._counts: TimesReached | None = None
        self.forget()

    def forget(self) -> None:
        """Allows warnings about held tensors to be given again."""
        self._held: frozenset[str] = frozenset()

    def bound(
        self,
        call: Call,
        mode: tuple[Any, ...],
        captured: CapturedStep,
        agreed: RankAgreement | None,
        number: int,
    ) -> BoundStep:
        """Makes a callable `BoundStep` from a captured call.

        Args:
            mode: the call's mode of communication.
            agreed: the ranks' agreement on the graph; None without communication.
            number: counts the captures of the step.
        """
        from graphopt.guards.guards import Guards
        from graphopt.host import share_counts
        from graphopt.host.counts import TimesReached
        from graphopt.iter_graph import IterGraphModule
        from graphopt.runtime.bound_step import BoundStep

        module = captured.graph_module
        assert isinstance(module, IterGraphModule)
        self._counts = self._counts or TimesReached()
        share_counts(module.graph, self._counts)
        with captured.state_present():
            guards = Guards(call, captured.live, mode, captured.signature, captured.outside)
        if agreed is not None:
            agreed.guards = guards
            self._warn_of_held(captured)
        return BoundStep(captured, module, guards, agreed, number)

    def _warn_of_held(self, captured: CapturedStep) -> None:
        from graphopt.runtime.late.tensors import warn_of_held

        new = captured.live.held - self._held
        if new:
            self._held |= new
            names = ", ".join(sorted(new))
            warn_of_held(names, "its update stays in its own step until reset() of this step")
