"""Every error graphopt raises on purpose. All derive from `GraphOptError`."""

from __future__ import annotations

from typing import Any


class GraphOptError(Exception):
    """Base of all graphopt errors.

    >>> import graphopt
    >>> issubclass(graphopt.CaptureError, graphopt.GraphOptError)
    True
    """


class CaptureError(GraphOptError, RuntimeError):
    """A training step cannot be captured.

    Attributes:
        reason: what was found, without location or advice.
        location: ``file:line  code`` of the user's line, or None when no line is involved.
        hint: what to write instead, or None.
        final: the step cannot be captured in any other way either.
        heading: the beginning of the message, before the reason.

    >>> import graphopt, torch
    >>> def step(model, x):
    ...     return x * float(model(x).sum())
    >>> graphopt.capture(step, torch.nn.ReLU(), torch.ones(2))
    Traceback (most recent call last):
        ...
    graphopt.errors.CaptureError: the step cannot be captured: ...
    """

    heading = "the step cannot be captured"

    def __init__(self, reason: str, *, location: object = None, hint: str | None = None) -> None:
        self.reason = reason
        self.location = None if location is None else str(location)
        self.hint = hint
        self.final = False
        super().__init__(reason)

    def __str__(self) -> str:
        lines = [f"{self.heading}: {self.reason}"]
        if self.location is not None:
            lines.append(f"  from:  {self.location}")
        if self.hint is not None:
            lines.append(f"  hint:  {self.hint}")
        return "\n".join(lines)


class AssumptionFailedError(GraphOptError, RuntimeError):
    """A graph was run with values that take another branch than the captured one.

    Attributes:
        index: which assumption of the graph, in the order of the program.
        found: what would have been the right answer.
        place: the user's line.
        handed_out: what the graph has computed by then, as far as another branch goes on from it.
        alone: other ranks may go on with this call meanwhile.

    >>> import graphopt, torch
    >>> def step(model, x):
    ...     return x if model(x).sum() > 0 else -x
    >>> captured = graphopt.capture(step, torch.nn.ReLU(), torch.ones(2))
    >>> captured.graph_module(-torch.ones(2))
    Traceback (most recent call last):
        ...
    graphopt.errors.AssumptionFailedError: the graph was captured for another outcome ...
    """

    def __init__(self, index: int, found: Any, place: str) -> None:
        self.index, self.found, self.place = index, found, place
        self.handed_out: tuple[object, ...] = ()
        self.alone = False
        super().__init__(
            f"the graph was captured for another outcome of a decision or a size by value than"
            f" {found!r}: {place}\n"
            "  hint:  call the step by graphopt.compile, which captures the other branch"
        )


class VerificationError(GraphOptError, RuntimeError):
    """A graph breaks the IR contract, or is not the computation it was made from.

    >>> import graphopt, torch
    >>> def graph_of(model):
    ...     return graphopt.capture(lambda m, x: m(x), model, torch.ones(2)).graph_module
    >>> one, two = graph_of(torch.nn.ReLU()), graph_of(torch.nn.Tanh())
    >>> graphopt.verify.check_equivalence(one, two).raise_for_failure()
    Traceback (most recent call last):
        ...
    graphopt.errors.VerificationError: the graphs are not the same computation in 1 place(s):...
    """


class SpmdMismatchError(GraphOptError, RuntimeError):
    """Ranks are about to run different communication; raised in place of a hang.

    Attributes:
        refused: whether another rank cannot capture the step, so that this one does not run it.

    >>> import graphopt
    >>> graphopt.SpmdMismatchError("rank 1 plans another all-reduce").refused
    False
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(reason)


class CollectiveError(GraphOptError, RuntimeError):
    """Communication with other ranks failed while a step ran. `__cause__` is what torch raised.

    Attributes:
        step: which call of the step, counted from 1; None outside of a step.
        collective: such as ``"all_reduce"``; None where it is not known.
        group: name of the process group.
        parameters: whose gradients or values were under way.
        ranks: those in the group that are known to have failed.
        hint: what to do, or None.

    >>> import graphopt
    >>> graphopt.CollectiveError("rank 1 is gone", ranks=(1,)).ranks
    (1,)
    """

    def __init__(
        self,
        reason: str,
        *,
        step: int | None = None,
        collective: str | None = None,
        group: str | None = None,
        parameters: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        hint: str | None = None,
    ) -> None:
        self.step, self.collective, self.group = step, collective, group
        self.parameters, self.ranks, self.hint = parameters, ranks, hint
        super().__init__(reason if hint is None else f"{reason}\n  hint:  {hint}")


class ParallelismError(GraphOptError, ValueError):
    """A kind of parallelism that cannot be: its options say so, or its groups do.

    >>> import graphopt
    >>> graphopt.ZeRO(stage=4)
    Traceback (most recent call last):
        ...
    graphopt.errors.ParallelismError: stage=4: ZeRO has the stages 1, 2 and 3
    """


class PassDefinitionError(GraphOptError, TypeError):
    """A pass is declared wrongly.

    >>> import graphopt
    >>> @graphopt.graph_optimization_pass()
    ... def takes_nothing(): ...
    Traceback (most recent call last):
        ...
    graphopt.errors.PassDefinitionError: pass 'takes_nothing' takes no graph: ...
    """


class PassOrderError(GraphOptError, RuntimeError):
    """Passes are applied in an order their constraints forbid.

    >>> import graphopt, torch
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = graphopt.IterGraphModule(captured.graph_module)
    >>> graphopt.PassManager("iter_move_grads_and_optimizers").run(gm)
    Traceback (most recent call last):
        ...
    graphopt.errors.PassOrderError: ...needs 'remove_copy_from_optimizer' ...
    """


class PipelineSyntaxError(GraphOptError, ValueError):
    """A pipeline text or name cannot be understood.

    >>> import graphopt
    >>> graphopt.parse_pipeline("schedule_com_wait")
    Traceback (most recent call last):
        ...
    graphopt.errors.PipelineSyntaxError: there is no pass 'schedule_com_wait'...
    """


class LoweringError(GraphOptError, RuntimeError):
    """Part of a graph cannot be lowered.

    >>> import graphopt
    >>> issubclass(graphopt.LoweringError, RuntimeError)
    True
    """


class PartitionError(GraphOptError, ValueError):
    """A graph cannot be split as asked.

    >>> import graphopt
    >>> issubclass(graphopt.PartitionError, ValueError)
    True
    """


class PassError(GraphOptError, RuntimeError):
    """A pass raised; the graph is as it was before. `__cause__` is what it raised.

    >>> import graphopt, torch
    >>> @graphopt.graph_optimization_pass(registry=graphopt.PassRegistry())
    ... def divide(gm):
    ...     return 1 // 0
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> divide(captured.graph_module)
    Traceback (most recent call last):
        ...
    graphopt.errors.PassError: pass 'divide' raised ZeroDivisionError: ...
    """


class FileError(GraphOptError, OSError):
    """A file or folder cannot be read or written; the message names it.

    >>> from graphopt.saved import load_graph
    >>> load_graph("nothing.pt")
    Traceback (most recent call last):
        ...
    graphopt.errors.MissingFileError: nothing.pt cannot be read: No such file or directory
    """


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file."""


class PretendError(GraphOptError, RuntimeError):
    """A device that is not there cannot be pretended, or what ran with it has not come back.

    >>> from graphopt.testing import pretended
    >>> pretended("tpu:3")
    Traceback (most recent call last):
        ...
    graphopt.errors.PretendError: 'tpu:3' is no device that can be pretended...
    """

    def __init__(self, reason: str, *, hint: str | None = None) -> None:
        self.reason, self.hint = reason, hint
        super().__init__(reason if hint is None else f"{reason}\n  hint:  {hint}")

    def __reduce__(self) -> tuple[object, ...]:
        return _pretend_error, (self.reason, self.hint)


def _pretend_error(reason: str, hint: str | None) -> PretendError:
    return PretendError(reason, hint=hint)


class ScheduleError(GraphOptError, ValueError):
    """An order that a graph or the stages of a pipeline cannot have, or one that does not exist.

    >>> from graphopt.schedule import ScheduleError
    >>> issubclass(ScheduleError, graphopt.GraphOptError)
    True
    """


class IterationError(GraphOptError, ValueError):
    """Nodes cannot run one iteration late.

    >>> import graphopt, torch
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = graphopt.IterGraphModule(captured.graph_module)
    >>> x, relu, output = gm.graph.nodes
    >>> gm.graph.move_to_next_iter_before([relu])
    Traceback (most recent call last):
        ...
    graphopt.errors.IterationError: ...
    """
