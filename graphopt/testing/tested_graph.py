"""The graph that a check of a pass starts from, and the inputs to run it on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from graphopt.iter_graph import IterGraphModule
from graphopt.manager import Pass, PassManager, applied_passes, default_registry
from graphopt.manager.running import PipelineEntry
from graphopt.parallel import resolve
from graphopt.parallel.parallelize import parallelize
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call, communication_for

Passes: TypeAlias = str | Pass | Sequence[PipelineEntry]
"""A pipeline, as `PassManager` takes it."""


def graph_and_inputs(
    step: Callable[..., Any] | fx.GraphModule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    warm: bool,
) -> tuple[fx.GraphModule, list[Any]]:
    """Returns the graph of a step and copies of its inputs; see `StepUnderTest`."""
    if isinstance(step, fx.GraphModule):
        if kwargs:
            raise TypeError("a graph module takes its inputs in `args` alone")
        return step, list(args)
    call = Call(step, tuple(args), dict(kwargs))
    if warm and _works_on_arguments(call):
        call = _after_one_step(call)
    captured = capture_call(call, communication_for(resolve(None)), lasts=warm)
    parallelize(captured.graph_module, captured.parallel)
    call = call.using(captured.besides) or call
    values = [value.detach() for value in captured.values(call)]
    return IterGraphModule(captured.graph_module), copy.deepcopy(values)


def prepared(
    untouched: fx.GraphModule, pass_: Pass, after: Passes
) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """Returns the graph that a pass is given, and a key that distinguishes it from others of the
    same step.

    Args:
        after: a pipeline that runs on a copy of `untouched` first; prerequisites that are still
            missing follow.
    """
    first = PassManager(after)
    names = [step.pass_.name for step in first.pipeline]
    missing = _missing_prerequisites(pass_, [*applied_passes(untouched), *names])
    manager = PassManager([*first.pipeline, *missing])
    if not manager.pipeline:
        return untouched, ()
    graph_module = copy.deepcopy(untouched)
    manager.run(graph_module)
    return graph_module, (str(manager), *(step.pass_ for step in manager.pipeline))


def _works_on_arguments(call: Call) -> bool:
    """True if a step changes only its arguments: it has optimizers whose parameters all belong to
    modules among them."""
    leaves = call.leaves
    own = {id(p) for at in call.modules for p in leaves[at].parameters()}
    own |= {id(leaves[at]) for at in call.tensors}
    groups = [group for at in call.optimizers for group in leaves[at].param_groups]
    return bool(groups) and all(id(p) in own for group in groups for p in group["params"])


def _after_one_step(call: Call) -> Call:
    """Returns the call on copies after one step. Returns the call itself if the step made no
    optimizer state or lasting gradients."""
    args, kwargs = copy.deepcopy(call.given)
    following = Call(call.fn, args, kwargs)
    with torch.random.fork_rng():
        call.fn(*args, **kwargs)
    made = any(following.leaves[at].state for at in following.optimizers)
    left = any(p.grad is not None for at in call.modules for p in following.leaves[at].parameters())
    return following if made or left else call


def _missing_prerequisites(pass_: Pass, applied: Sequence[str]) -> list[Pass]:
    """Returns the prerequisites of a pass, transitively, that were not yet applied, first to
    last."""
    registry = default_registry()
    missing: dict[str, Pass] = {}
    pending = list(pass_.prerequisites)
    while pending:
        name = pending.pop()
        if name not in missing and name not in applied:
            missing[name] = registry.get(name)
            pending += missing[name].prerequisites
    return [missing[name] for name in registry.order(missing)]
