"""`graphopt.compile` and `TrainStep`: the top layer, where capture, passes and running meet."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, overload

import torch

from graphopt import _compat
from graphopt.errors import GraphOptError

if TYPE_CHECKING:
    from graphopt.cost import CostModel
    from graphopt.iter_graph import IterGraphModule
    from graphopt.lowering.compiler import Options
    from graphopt.lowering.subgraph import LoweredSubgraph
    from graphopt.manager import PassManager, Report
    from graphopt.parallel import Parallel
    from graphopt.schedule import Timeline
    from graphopt.stages.auto import AutoPipeline
    from graphopt.tracing import CapturedStep


class TrainStep:
    """A training step that is captured on its first call and run as a graph from then on.

    Made by `graphopt.compile`. A call with other shapes, dtypes, modes or settings than any
    before is captured anew, logged with the reason (logger ``graphopt``, level INFO), and kept.

    What a call returns are tensors without autograd history: the backward has run inside.

    Attributes:
        parallel: the option of that name.

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
        self.parallel = parallel
        # These import all passes and checks, for which `import graphopt` need not wait.
        from graphopt.stages import stages_for
        from graphopt.stages.calls import Calls
        from graphopt.viewing import graph_html

        self._graph_html = graph_html
        stages = stages_for(pipeline, lower, verify)
        stages.manager.check_order()
        self._calls = Calls(fn, self._name, stages, parallel, fallback, max_graphs)
        self._entries, self._communication = self._calls.entries, self._calls.communication

    def __repr__(self) -> str:
        return f"TrainStep({self._name}, {len(self.captures)} graphs)"

    def reset(self) -> None:
        """Forget every captured graph; the next call captures. On several ranks: on all of them.

        Late work of the last call is finished first; if that call failed in the middle of updating
        parameters, it is dropped: load a checkpoint then.
        """
        self._calls.reset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compat.is_traced():  # by the step that calls it, whose graph has it
            return self._fn(*args, **kwargs)
        return self._calls.run(args, kwargs)

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

    def no_sync(self) -> AbstractContextManager[None]:
        """While active, gradients stay local to the rank and accumulate, as DDP's `no_sync`."""
        return self._communication.no_sync()

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
        fallback = self._calls.fallback
        if fallback.active:
            raise GraphOptError(f"there is no graph: the step runs eagerly\n{fallback.reason}")
        if not self._entries:
            raise GraphOptError("the step has not been called yet, so there is no graph")
        return self._entries[0].module

    @property
    def lowered(self) -> list[LoweredSubgraph]:
        """The compiled regions of all graphs in use; a region that several have is listed once."""
        return self._calls.stages.regions

    @property
    def report(self) -> Report:
        """Records of the stages that the graph of the latest call went through: capture, passes,
        lowering.

        Raises:
            GraphOptError: the step has not been called.
        """
        from graphopt.manager import records_of

        return records_of(self.graph_module)

    def timeline(self, cost_model: CostModel | None = None) -> Timeline:
        """Predict the timeline of the latest call's graph, as `graphopt.simulate` does.

        Args:
            cost_model: None: presets by the devices in the graph.

        Raises:
            GraphOptError: the step has not been called, or runs eagerly.
        """
        from graphopt.schedule import simulate

        return simulate(self.graph_module, cost_model)

    def _repr_html_(self) -> str:
        if not self._entries:
            return "<p>a training step that has not been called yet</p>"
        return self.report._repr_html_() + self._graph_html(self.graph_module)

    def print_readable(self) -> None:
        """Print the graph of the latest call, by phase, with shapes, bytes and source lines."""
        from graphopt.readable import graph_text

        print(graph_text(self.graph_module))


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
            of `(pass, options)`, a `PassManager`), ``parallel`` (None, `DataParallel`, `ZeRO` or
            `Manual`),
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
