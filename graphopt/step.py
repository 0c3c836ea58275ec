"""`graphopt.compile` and `TrainStep`: the top layer, where capture, passes and running meet."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist

from graphopt.budget import MODE, Cause, dropped
from graphopt.errors import AssumptionFailedError, CaptureError, GraphOptError
from graphopt.parallel import OverRanks, Parallel, resolve
from graphopt.ranks.processes import announce
from graphopt.runtime.eager import Fallback
from graphopt.stages import stages_for

if TYPE_CHECKING:
    from graphopt.host.counts import TimesReached
    from graphopt.iter_graph import IterGraphModule
    from graphopt.lowering.compiler import Options
    from graphopt.lowering.subgraph import LoweredSubgraph
    from graphopt.manager import PassManager, Report
    from graphopt.runtime.bound_step import BoundStep, Tries
    from graphopt.runtime.branch import Begun
    from graphopt.runtime.joint_capture import JointCapture
    from graphopt.stages.auto import AutoPipeline
    from graphopt.tracing import CapturedStep
    from graphopt.tracing.call import Call

logger = logging.getLogger("graphopt")

_SHAPES_BEFORE_ADVICE = 8


class TrainStep:
    """A training step that is captured on its first call and run as a graph from then on.

    Made by `graphopt.compile`. A call with other shapes, dtypes, modes or settings than any
    before is captured anew, logged with the reason (logger ``graphopt``, level INFO), and kept.

    What a call returns are tensors without autograd history: the backward has run inside.

    >>> import graphopt, torch
    >>> step, model = graphopt.compile(lambda m, x: m(x)), torch.nn.ReLU()
    >>> type(step).__name__, step(model, torch.ones(2))
    ('TrainStep', tensor([1., 1.]))
    >>> [node.name for node in step.graph_module.graph.nodes]
    ['x', 'relu', 'output']
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        pipeline: str | Sequence[Any] | PassManager | AutoPipeline = "default",
        parallel: Parallel | None = None,
        lower: str | Options | None = None,
        verify: str | None = None,
        fallback: str | None = None,
        max_graphs: int = 16,
    ) -> None:
        if not callable(fn) or isinstance(fn, (torch.nn.Module, torch.optim.Optimizer)):
            raise TypeError(
                f"graphopt.compile takes the step function, not {type(fn).__name__}: write"
                " graphopt.compile(train_step), where train_step(model, optimizer, batch) runs"
                " forward, backward and optimizer.step()"
            )
        if type(max_graphs) is not int or max_graphs < 1:
            raise TypeError(f"max_graphs is a positive number of graphs, not {max_graphs!r}")
        functools.update_wrapper(self, fn)
        self._max_graphs = max_graphs
        self._fn = fn
        self._parallel = parallel
        self._sync = True
        self._calls = 0
        self._entries: list[BoundStep] = []
        self._stages = stages_for(pipeline, lower, verify)
        self._fallback = Fallback(getattr(fn, "__qualname__", repr(fn)), fallback)
        if parallel is None or isinstance(parallel, OverRanks):
            announce(None if parallel is None else parallel.group)
        self._counts: TimesReached | None = None
        self.reset()

    def reset(self) -> None:
        """Forget every captured graph; the next call captures. On several ranks: on all of them.

        Late work of the last call is finished first; if that call failed in the middle of updating
        parameters, it is dropped: load a checkpoint then.
        """
        for entry in self._entries:
            if entry.module.resumable:
                entry.flush()
            else:
                entry.drop()
        self._entries = []
        self._fallback.forget()
        self._stages = self._stages.anew()
        self._captured = 0
        self._held: frozenset[str] = frozenset()
        self._joint_capture: JointCapture | None = None
        self._shape_captures = 0
        self._retried: Tries | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from graphopt.tracing.call import Call
        from graphopt.tracing.casts import check_casts

        self._calls += 1
        call = Call(self._fn, args, kwargs)
        if self._fallback.active:
            return self._run_eagerly(call)
        check_casts(call)
        try:
            return self._called(call)
        except BaseException:
            call.drawn.undo()
            raise

    def _called(self, call: Call) -> Any:
        mode = self._mode()
        entry = self._known(call, mode)
        if entry is None:
            self._land()
            entry = self._captured_or_refused(call, mode)
        return self._run_eagerly(call) if entry is None else self._run(entry, call)

    def _known(self, call: Call, mode: tuple[Any, ...]) -> BoundStep | None:
        """The graph that holds for a call, which is the one used last from now on. First those are
        asked whose branch the last call did not take for the first time."""
        from graphopt.runtime.sharing import in_order

        retried, self._retried = self._retried, None
        for entry in in_order(self._entries, retried):
            bound = call.using(entry.captured.besides)
            if bound is None or not (entry.goes_on(call.decided) and _fits(entry, bound, mode)):
                continue
            if entry is not self._entries[0]:
                self._land()
                self._entries.remove(entry)
                self._entries.insert(0, entry)
            return entry
        return None

    def _run(self, entry: BoundStep, call: Call, begun: Begun | None = None) -> Any:
        from graphopt.tracing.casts import note_casts

        call = call.using(entry.captured.besides) or call
        try:
            result = entry(call, self._calls, begun)
        except AssumptionFailedError as error:
            failed = error.with_traceback(None)  # whose frames hold all that was computed
        else:
            note_casts(call, entry.captured.casts, bool(entry.captured.signature.stepped))
            return result
        result = self._run_other_branch(entry, call, failed)
        self._retried = entry.tries if entry.failures == 1 else None
        return result

    def _run_other_branch(self, entry: BoundStep, call: Call, failed: AssumptionFailedError) -> Any:
        """Run the graph of the branch that the values of a call take, where `entry` took another
        one, and changed nothing."""
        from graphopt.runtime.sharing import begun, learn

        mode, left = self._mode(), entry.take_left()
        call = call.deciding((*entry.answers_before(failed.index), failed.found))
        self._land()
        other = self._known(call, mode)
        going_on = begun(left, entry, other, call, self._calls)
        cause = Cause.of_branch(failed.place, failed.found)
        other = other or self._captured_or_refused(call, mode, cause)
        if other is None:
            return self._run_eagerly(call)
        result = self._run(other, call, going_on)
        if going_on is None and self._stages.hands_out:
            learn(left, entry, other, self._stages.finish)
        return result

    def _captured_or_refused(
        self, call: Call, mode: tuple[Any, ...], branch: Cause | None = None
    ) -> BoundStep | None:
        """Capture a call; None where it cannot be captured, and the step runs eagerly then.

        Args:
            branch: the decision that goes another way than before, where that is why.
        """
        with self._failures_told() as parallel:
            try:
                return self._capture(call, mode, branch)
            except BaseException as error:
                alone = self._joint_capture is not None and self._joint_capture.alone
                if not self._fallback.take(error, call, parallel, alone):
                    raise
            self._entries = []
            return None

    def _run_eagerly(self, call: Call) -> Any:
        call.drawn.undo()
        with self._failures_told() as parallel:
            return self._fallback.run(call, parallel, self._sync, self._calls, self._join)

    @contextmanager
    def _failures_told(self) -> Iterator[Parallel]:
        """While active, a failure is told to ranks that run their step meanwhile. Gives how this
        rank communicates."""
        from graphopt import _compat
        from graphopt.ranks.failures import tell

        parallel = resolve(self._parallel)
        try:
            yield parallel
        except BaseException as error:
            if isinstance(parallel, OverRanks):
                tell(_compat.group_or_default(parallel.group), self._calls, error)
            raise

    def _join(self, call: Call, parallel: OverRanks) -> None:
        self._joint().join(call, parallel)

    def _land(self) -> None:
        """Flush before another graph runs, which other ranks may not do now."""
        if any(entry.needs_all_ranks for entry in self._entries):
            raise GraphOptError(
                "another graph is needed for this call while a collective of the last step is still"
                " to be launched, which needs all ranks\n"
                "  hint:  call flush() of the training step on every rank first"
            )
        self.flush()

    def __del__(self) -> None:
        for entry in vars(self).get("_entries", ()):  # not there where __init__ raised
            if entry.module.in_flight:
                entry.close()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __enter__(self) -> TrainStep:
        return self

    def __exit__(self, *exc: object) -> None:
        self.flush()

    def flush(self) -> None:
        """Finish work that is still in flight: afterwards parameters are exactly eager's.

        Whoever uses a parameter or a tensor of the optimizer's state does this by doing so, however
        it is held.

        Raises:
            GraphOptError: a call failed in the middle of updating parameters.
        """
        for entry in self._entries:
            entry.flush()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """While active, gradients stay local to the rank and accumulate, as DDP's `no_sync`."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @property
    def captures(self) -> tuple[CapturedStep, ...]:
        """Every captured graph in use, in order of capture."""
        in_order = sorted(self._entries, key=lambda entry: entry.number)
        return tuple(entry.captured for entry in in_order)

    @property
    def graph_module(self) -> IterGraphModule:
        """The graph of the latest call after all passes, in the captured dialect.

        Raises:
            GraphOptError: the step has not been called, or runs eagerly.
        """
        if self._fallback.active:
            raise GraphOptError(
                f"there is no graph: the step runs eagerly\n{self._fallback.reason}"
            )
        if not self._entries:
            raise GraphOptError("the step has not been called yet, so there is no graph")
        return self._entries[0].module

    @property
    def lowered(self) -> list[LoweredSubgraph]:
        """The compiled regions of all graphs in use; a region that several have is listed once."""
        return self._stages.regions

    @property
    def report(self) -> Report:
        """What each stage did to the graph of the latest call: capture, passes, and all behind.

        Raises:
            GraphOptError: the step has not been called.
        """
        from graphopt.manager import records_of

        return records_of(self.graph_module)

    def _repr_html_(self) -> str:
        from graphopt.viewing.notebook import graph_html

        if not self._entries:
            return "<p>a training step that has not been called yet</p>"
        return self.report._repr_html_() + graph_html(self.graph_module)

    def print_readable(self) -> None:
        """Print the graph of the latest call, by phase, with shapes, bytes and source lines."""
        from graphopt.readable import graph_text

        print(graph_text(self.graph_module))

    def _mode(self) -> tuple[Any, ...]:
        """How this call communicates: part of what a graph is specialized on."""
        parallel = resolve(self._parallel)
        if not isinstance(parallel, OverRanks):
            ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
            return ("own communication", ranks)
        from graphopt import _compat

        group = _compat.group_or_default(parallel.group)
        return ("averaged" if self._sync else "no_sync", group.group_name, group.size())

    def _capture(self, call: Call, mode: tuple[Any, ...], branch: Cause | None) -> BoundStep:
        from graphopt.host import share_counts
        from graphopt.host.counts import TimesReached
        from graphopt.iter_graph import IterGraphModule
        from graphopt.runtime.agreed import Ranks
        from graphopt.runtime.bound_step import BoundStep
        from graphopt.runtime.sharing import join_branch
        from graphopt.tracing.besides import Besides
        from graphopt.tracing.draws.generators import undisturbed
        from graphopt.tracing.guards import Guards
        from graphopt.tracing.placed import changing

        cause = self._log_branch(branch) if branch else self._log_capture(call, mode)
        parallel = resolve(self._parallel)
        self._entries = [entry for entry in self._entries if entry.captured.lasting]
        settled = {entry.captured.fingerprint for entry in self._entries}
        ways: Iterable[Ranks] = [Ranks(settled)]
        if isinstance(parallel, OverRanks):
            ways = self._joint().ways(call, parallel, self._sync, mode, settled)
        try:
            self._make_room(cause)
        except CaptureError:
            with next(iter(ways)):  # which tells ranks that have come to agree
                raise
        places = changing(entry.captured.found for entry in self._entries)
        if cause is not None and cause.kind != MODE and self._entries:
            places += self._entries[0].guards.counted_for(call)
        call = call.using(call.besides.joined(Besides(carried=places))) or call
        call.drawn.undo()
        with undisturbed():
            captured, agreed = self._stages.compile(call, ways)
        module = captured.graph_module
        assert isinstance(module, IterGraphModule)
        call = call.using(captured.besides) or call
        self._counts = self._counts or TimesReached()
        share_counts(module.graph, self._counts)
        captured.effects.apply()
        with captured.state_present():
            guards = Guards(call, captured.live, mode, captured.signature, captured.outside)
        if agreed is not None:
            agreed.guards = guards
        self._captured += 1
        self._warn_of_held(captured, agreed is not None)
        entry = BoundStep(captured, module, guards, agreed, self._captured)
        entry.cause = cause
        join_branch(entry, self._entries)
        self._entries.insert(0, entry)
        self._drop_unusable()
        for position in call.modules:
            end = weakref.finalize(call.leaves[position], _forget_dead, weakref.ref(self))
            end.atexit = False
        return entry

    def _make_room(self, cause: Cause | None) -> None:
        """Drop a graph where there are as many as may be kept."""
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        causes = [entry.cause for entry in self._entries]
        position = dropped(causes, cause, self._max_graphs, name)
        if position is not None:
            self._entries.pop(position).close()

    def _warn_of_held(self, captured: CapturedStep, communicates: bool) -> None:
        from graphopt.runtime.late import warn_of_held

        new = captured.live.held - self._held
        if new and communicates:
            self._held |= new
            names = ", ".join(sorted(new))
            warn_of_held(names, "its update stays in its own step until reset() of this step")

    def _drop_unusable(self) -> None:
        """Drop the graphs whose models are gone or whose collectives the ranks have changed."""
        for entry in self._entries:
            if not _is_usable(entry) and entry.module.in_flight:
                entry.close()  # a layer or another model may live on
        self._entries = list(filter(_is_usable, self._entries))

    def _joint(self) -> JointCapture:
        if self._joint_capture is None:
            from graphopt.runtime.joint_capture import JointCapture

            topic = f"{self._fn.__module__}.{self._fn.__qualname__}"
            self._joint_capture = JointCapture(topic)
        return self._joint_capture

    def _log_branch(self, branch: Cause) -> Cause:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        logger.info("capturing %s again: %s: %s", name, branch.name, branch.said)
        return branch

    def _log_capture(self, call: Call, mode: tuple[Any, ...]) -> Cause | None:
        """Say why a step is captured. Returns that, where it has been captured before."""
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        if not self._entries:
            logger.info("capturing %s", name)
            return None
        guards = self._entries[0].guards
        call = call.using(guards.besides) or call
        reasons = list(guards.structure_mismatches(call, mode))
        shape = None if reasons else guards.shape_mismatch(call)
        local = None if reasons else guards.local_mismatch(call)
        structure = "; ".join(reasons)
        reasons += filter(None, [shape, local])
        logger.info("capturing %s again: %s", name, "; ".join(reasons))
        if shape is not None:
            self._shape_captures += 1
            if self._shape_captures == _SHAPES_BEFORE_ADVICE:
                logger.warning(
                    "%s was captured again for new shapes %d times, each for itself: pad the"
                    " batch, or sort it into buckets of a few lengths (the last change: %s)",
                    name,
                    _SHAPES_BEFORE_ADVICE,
                    shape,
                )
            return Cause.of_shape(shape)
        return Cause(MODE, "", structure) if local is None else Cause.of_value(local)


def _forget_dead(reference: weakref.ref[TrainStep]) -> None:
    """Drop the graphs of a model that has just been freed, and with them its parameters."""
    step = reference()
    if step is not None:
        step._drop_unusable()
        if step._joint_capture is not None:
            step._joint_capture.forget_dead()


def _is_usable(entry: BoundStep) -> bool:
    """Whether the models of a cached graph exist and the ranks still agree on its collectives."""
    return entry.guards.may_fit() and (entry.agreed is None or entry.agreed.current)


def _fits(entry: BoundStep, call: Call, mode: tuple[Any, ...]) -> bool:
    from graphopt._compat.late import without_torch_function

    guards = entry.guards
    with without_torch_function():  # to look at a tensor's kind is no use of it
        return (
            entry.captured.lasting
            and guards.structure_mismatch(call, mode) is None
            and guards.shape_mismatch(call) is None
            and guards.local_mismatch(call) is None
        )


@overload
def compile(fn: Callable[..., Any], **options: Any) -> TrainStep: ...


@overload
def compile(fn: None = None, **options: Any) -> Callable[[Callable[..., Any]], TrainStep]: ...


def compile(
    fn: Callable[..., Any] | None = None, **options: Any
) -> TrainStep | Callable[[Callable[..., Any]], TrainStep]:
    """Make a training step that runs as one captured graph; a decorator with or without options.

    Args:
        fn: the step, unchanged PyTorch: modules and optimizers among its arguments; forward,
            backward and optimizer step inside; returns a pytree of tensors and constants or None.
        **options: ``pipeline`` ("default", "auto" or an `AutoPipeline`: the default passes with
            options as measured at the first call, "none", a textual pipeline, a list of passes or
            of `(pass, options)`, a `PassManager`), ``parallel`` (None, `DataParallel` or `Manual`),
            ``lower`` (None, "inductor", "inductor+cudagraphs" or `graphopt.lowering.Options`),
            ``verify`` ("equivalence", which None means: each pass is shown to compute the same;
            "dependencies"; "off"; a `PassManager` brings its own; docs/verification.md),
            ``fallback`` (None: a step that cannot be captured raises; "eager": after one warning
            it runs as it is, with DDP's averages on several ranks, until `TrainStep.reset`),
            ``max_graphs`` (how many graphs are kept: where shapes or values of one argument would
            need more, that is a `CaptureError`; graphs of other modes are dropped, those used
            longest ago first).

    Raises:
        TypeError: `fn` is not a function, or an option is unknown.
        PipelineSyntaxError, PassOrderError: the pipeline cannot be understood or applied.
        CaptureError: on calling the step, when it cannot be captured.

    >>> import graphopt, torch
    >>> @graphopt.compile
    ... def train_step(model, optimizer, x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> losses = [train_step(model, optimizer, torch.ones(4, 2)) for _ in range(3)]
    >>> bool(losses[-1] < losses[0])
    True
    """
    if fn is None:
        return lambda function: TrainStep(function, **options)
    return TrainStep(fn, **options)
