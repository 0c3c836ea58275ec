"""`graphopt.compile` and `TrainStep`: the top layer, where capture, passes and running meet."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, overload

import torch

from graphopt import _compat
from graphopt.errors import AssumptionFailedError, CaptureError, GraphOptError, SpmdMismatchError
from graphopt.runtime.binding import Binding
from graphopt.runtime.budget import Cause
from graphopt.runtime.captured_graphs import CapturedGraphs
from graphopt.runtime.communication import Communication
from graphopt.runtime.eager import Fallback
from graphopt.runtime.ranges import STEP
from graphopt.runtime.recaptures import Recaptures

if TYPE_CHECKING:
    from graphopt.iter_graph import IterGraphModule
    from graphopt.lowering.compiler import Options
    from graphopt.lowering.subgraph import LoweredSubgraph
    from graphopt.manager import PassManager, Report
    from graphopt.parallel import Parallel
    from graphopt.runtime.agreed import Others
    from graphopt.runtime.bound_step import BoundStep, Tries
    from graphopt.runtime.branch import Begun
    from graphopt.runtime.sent_before import SentBefore
    from graphopt.stages.auto import AutoPipeline
    from graphopt.tracing import CapturedStep
    from graphopt.tracing.call import Call


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
        self._fn, self._name = fn, getattr(fn, "__qualname__", repr(fn))
        # These import all passes and checks, for which `import graphopt` need not wait.
        from graphopt.stages import stages_for
        from graphopt.viewing import graph_html

        self._calls, self._graph_html = 0, graph_html
        self._entries = CapturedGraphs(self._name, max_graphs)
        self._stages = stages_for(pipeline, lower, verify)
        self._stages.manager.check_order()
        self._fallback = Fallback(self._name, fallback)
        self._communication = Communication(fn, parallel)
        self._binding = Binding()
        self.reset()

    def __repr__(self) -> str:
        return f"TrainStep({self._name}, {len(self.captures)} graphs)"

    def reset(self) -> None:
        """Forget every captured graph; the next call captures. On several ranks: on all of them.

        Late work of the last call is finished first; if that call failed in the middle of updating
        parameters, it is dropped: load a checkpoint then.
        """
        self._entries.finish()
        self._entries.forget()
        self._recaptures = Recaptures(self._name)
        self._fallback.forget()
        self._stages = self._stages.anew()
        self._captured = 0
        self._binding.forget()
        self._communication.forget()
        self._retried: Tries | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from graphopt.tracing.call import Call

        if _compat.is_traced():  # by the step that calls it, whose graph has it
            return self._fn(*args, **kwargs)
        self._calls += 1
        call = Call(self._fn, args, kwargs)
        if self._fallback.active:
            return self._run_eagerly(call)
        if self._is_watched():
            with _compat.modes_learned():
                return self._run_eagerly(call)
        try:
            with _compat.named_in_profile(STEP):
                return self._run_or_captured(call)
        except BaseException:
            self._entries.forget_waiting()
            raise

    def _is_watched(self) -> bool:
        """Whether a call runs eagerly, since something around it watches the functions that it
        calls, which a graph does not. A rank of several, which may be watched alone, refuses
        that, but for modes of operators whose classes say that they only look."""
        watching = _compat.watches_functions()
        if watching is None:
            return False
        if _compat.rank_among_several() is not None:
            _compat.trust_modes()
            return False
        self.flush()
        self._fallback.warn_of(watching)
        return True

    def _run_or_captured(self, call: Call) -> Any:
        from graphopt.runtime.agreed import Others

        entry = self._known(call)
        if entry is None and self._communication.sharded_models is not None:
            self._entries.land()
            entry = self._known(call) if self._communication.shard(call) else None
        if entry is None:
            self._entries.land()
            communication = self._communication
            vote = communication.vote(call, communication.mode(), self._calls)
            entry = self._captured_or_refused(call, None, Others(vote=vote))
        elif entry.agreed is not None and not entry.agreed.holds_for_all(self._calls):
            self._entries.land()
            entry = self._captured_or_refused(call, None, Others(anew=True))
        return self._run_eagerly(call) if entry is None else self._run(entry, call)

    def _known(self, call: Call) -> BoundStep | None:
        """The graph that holds for a call. First those are asked whose branch the last call did not
        take for the first time."""
        retried, self._retried = self._retried, None
        return self._entries.known(call, self._communication.mode(), retried)

    def _run(
        self,
        entry: BoundStep,
        call: Call,
        begun: Begun | None = None,
        sent: SentBefore | None = None,
    ) -> Any:
        call = call.using(entry.captured.besides) or call
        try:
            result = entry(call, self._calls, begun, sent)
        except AssumptionFailedError as error:
            failed = error.with_traceback(None)  # whose frames hold all that was computed
        else:
            self._entries.state_made(entry)
            return result
        result = self._run_other_branch(entry, call, failed)
        if not failed.alone:
            self._retried = entry.tries if entry.failures == 1 else None
        return result

    def _run_other_branch(self, entry: BoundStep, call: Call, failed: AssumptionFailedError) -> Any:
        """Run the graph of the branch that the values of a call take, where `entry` took another
        one, and changed nothing."""
        from graphopt.host.used import Used
        from graphopt.runtime.sharing import begun, learn

        left = entry.take_left()
        # What stands behind is found out by all ranks together, who guess as `entry` did.
        behind = entry.answers[failed.index + 1 :] if isinstance(failed.found, Used) else ()
        call = call.deciding((*entry.answers_before(failed.index), failed.found, *behind))
        self._entries.land()
        other = self._known(call)
        apart = failed.alone or bool(entry.apart)
        going_on = None if apart else begun(left, entry, other, call, self._calls)
        if going_on is None:
            try:
                other = self._other_graph(entry, other, call, failed, bool(left.sent))
            except BaseException as error:
                if not failed.alone:
                    raise
                other = self._graph_of_all(entry, call, failed, left.sent, error)
                left.sent = {}
        if other is None:
            return self._run_eagerly(call)
        result = self._run(other, call, going_on, left.sent)
        if going_on is None and not apart and self._stages.hands_out:
            learn(left, entry, other, self._stages.make_ready)
        return result

    def _graph_of_all(
        self,
        entry: BoundStep,
        call: Call,
        failed: AssumptionFailedError,
        sent: SentBefore,
        error: BaseException,
    ) -> BoundStep | None:
        """The graph of a call that this rank has left, where all have: nothing of it has happened.

        Args:
            error: why this rank has left.
        """
        from graphopt.runtime.agreed import NoGraphAloneError, Others

        known, number, lacks = None, None, isinstance(error, NoGraphAloneError)
        if isinstance(error, NoGraphAloneError):
            known = self._known(call.deciding(error.answers) if error.answers else call)
            number = known.agreed.number if known is not None and known.agreed is not None else 0
        number = entry.leave(self._calls, sent, number)
        if number is None:
            raise SpmdMismatchError(str(error)) if lacks else error
        if number:
            return known
        cause = Cause.of_branch(failed.place, failed.found)
        return self._captured_or_refused(call, cause, Others(anew=True))

    def _other_graph(
        self,
        entry: BoundStep,
        known: BoundStep | None,
        call: Call,
        failed: AssumptionFailedError,
        launched: bool,
    ) -> BoundStep | None:
        """The graph of another branch, captured where it is not known or where other ranks have
        none that goes with it.

        Args:
            launched: see `Others`.
        """
        from graphopt.runtime.agreed import NoGraphAloneError, Others
        from graphopt.runtime.other_launches import warn_of_other_launches

        vote = None
        if entry.agreed is not None and not failed.alone:
            vote = functools.partial(entry.agreed.votes.alike, step=self._calls)
        if known is not None and failed.alone and not _stand_on_same(known, entry):
            if known.decides_no_more(failed.index):
                with self._communication.failures_told(self._calls):
                    raise NoGraphAloneError(f": {failed.place}")
            known = None
        if known is not None:
            number = known.agreed.number if known.agreed else 0
            if vote is None or vote(number):
                return known
        vote = vote if known is None else None
        alone = (failed.alone, entry.agreed, f": {failed.place}")
        others = Others(*alone, vote=vote, anew=known is not None, launched=launched)
        cause = Cause.of_branch(failed.place, failed.found)
        other = self._captured_or_refused(call, cause, others)
        if other is not None:
            warn_of_other_launches(entry, other, failed)
        return other

    def _captured_or_refused(
        self, call: Call, branch: Cause | None, others: Others
    ) -> BoundStep | None:
        """Capture a call; None where it cannot be captured, and the step runs eagerly then.

        Args:
            branch: the decision that goes another way than before, where that is why.
            others: what they do meanwhile.
        """
        communication = self._communication
        with communication.failures_told(self._calls) as parallel:
            try:
                return self._capture(call, branch, others)
            except BaseException as error:
                alone = communication.alone or others.launched
                if not self._fallback.take(error, call, parallel, alone):
                    raise
            self._entries.forget()
            return None

    def _run_eagerly(self, call: Call) -> Any:
        communication, step = self._communication, self._calls
        with communication.failures_told(step) as parallel:
            averaging, join = communication.averaging, communication.join
            return self._fallback.run(call, parallel, averaging, step, join)

    def __del__(self) -> None:
        entries = vars(self).get("_entries")  # not there where __init__ raised
        if entries is not None:
            entries.close()

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
        self._entries.flush()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """While active, gradients stay local to the rank and accumulate, as DDP's `no_sync`."""
        with self._communication.no_sync():
            yield

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """While active, the models of the step have whole parameters, as `ZeRO(stage=3)` has them
        in rows otherwise; what is written to them is kept. All ranks have to enter it.

        Raises:
            SpmdMismatchError: not all ranks have come, within seconds.
        """
        self.flush()
        sharded = self._communication.sharded_models
        with sharded.full_parameters() if sharded is not None else nullcontext():
            yield

    def full_state_dict(self) -> dict[str, Any]:
        """The state of the models of the step, whole, on the CPU; all ranks have to call it.

        Raises:
            GraphOptError: the step is not sharded.
            SpmdMismatchError: not all ranks have come, within seconds.
        """
        self.flush()
        sharded = self._communication.sharded_models
        if sharded is None:
            raise GraphOptError("the step is not sharded: model.state_dict() is whole")
        return sharded.full_state_dict()

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
        """Records of the stages that the graph of the latest call went through: capture, passes,
        lowering.

        Raises:
            GraphOptError: the step has not been called.
        """
        from graphopt.manager import records_of

        return records_of(self.graph_module)

    def _repr_html_(self) -> str:
        if not self._entries:
            return "<p>a training step that has not been called yet</p>"
        return self.report._repr_html_() + self._graph_html(self.graph_module)

    def print_readable(self) -> None:
        """Print the graph of the latest call, by phase, with shapes, bytes and source lines."""
        from graphopt.readable import graph_text

        print(graph_text(self.graph_module))

    def _capture(self, call: Call, branch: Cause | None, others: Others) -> BoundStep:
        from graphopt.runtime.agreed import NotAsAgreedError
        from graphopt.runtime.host_memory import keep_memory_of
        from graphopt.tracing.generators import undisturbed

        mode = self._communication.mode()
        guards = [entry.guards for entry in self._entries]
        cause = self._recaptures.cause(call, mode, branch, guards)
        call = self._entries.with_counted(call, cause)
        ways = self._communication.ways(call, mode, others)
        try:
            self._entries.make_room(cause)
        except CaptureError:
            for ranks in ways:  # which tell ranks that have come to agree
                with suppress(NotAsAgreedError), ranks:
                    raise
        with undisturbed(), _compat.unwatched(), self._communication.shards_admitted():
            captured, agreed = self._stages.compile(call, ways)
        call = call.using(captured.besides) or call
        keep_memory_of(captured.graph_module.graph)
        self._captured += 1
        entry = self._binding.bound(call, mode, captured, agreed, self._captured)
        entry.cause = cause
        self._entries.add(entry)
        for position in call.modules:
            end = weakref.finalize(call.leaves[position], _forget_dead, weakref.ref(self))
            end.atexit = False
        return entry


def _stand_on_same(one: BoundStep, other: BoundStep) -> bool:
    """Whether two graphs launch what the ranks have agreed on for both."""
    plans = [each.agreed and each.agreed.plans for each in (one, other)]
    return plans[0] == plans[1]


def _forget_dead(reference: weakref.ref[TrainStep]) -> None:
    """Drop the graphs of a model that has just been freed, and with them its parameters."""
    step = reference()
    if step is not None:
        step._entries.drop_unusable()
        step._communication.forget_dead()


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
    _check_options(options)
    if fn is None:
        return lambda function: TrainStep(function, **options)
    return TrainStep(fn, **options)


def _check_options(options: Mapping[str, Any]) -> None:
    from graphopt.manager.names import suggestion

    known = list(inspect.signature(TrainStep).parameters)[1:]
    for name in options:
        if name not in known:
            raise TypeError(
                f"graphopt.compile has no option {name!r}{suggestion(name, known)}: its options are"
                f" {', '.join(known)}"
            )
