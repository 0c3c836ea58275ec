"""`check_pass`: what the test of a pass should look at, in one call."""

from __future__ import annotations

import copy
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from graphopt import _compat, discovery
from graphopt.graph_utils import (
    eliminate_dead_code,
    follows_output_convention,
    get_output,
    is_operator,
    without_autocast,
)
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import Pass, PassManager, PassRecord, applied_passes, default_registry
from graphopt.parallel import resolve
from graphopt.readable import compact_text, text_diff
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call, communication_for

TOLERANCE = 1e-2
"""Of passes that change numerics: each element may differ by this times the sum of its own size and
the largest in its tensor."""

UPDATE = "GRAPHOPT_UPDATE_GOLDEN"
"""Set to 1, this environment variable lets `check_pass` write golden files."""

_ITERATIONS = 3


def check_pass(
    step: Callable[..., Any] | fx.GraphModule,
    args: Sequence[Any],
    pass_: Pass | str,
    *,
    expect: str | Path | None = None,
    changes: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> PassRecord:
    """Test a pass on one training step. Nothing that is passed in changes.

    The pass runs under a `PassManager`, verification included. If it has prerequisites that the
    graph lacks, they run first, and what they leave is the untouched graph below. Then

    - its number of changes is compared with `changes`, and the graph with `expect`;
    - both graphs, untouched and rewritten, run on copies of the same inputs. What they return and
      what they leave in the inputs must be the same bit for bit (for a pass that is declared to
      change numerics: within `TOLERANCE`). If nodes run one iteration late, three iterations and a
      flush are compared, each with smaller hyperparameters and a batch rolled by one;
    - the function of the pass runs once more, and must find nothing left to do.

    Args:
        step: a training step, which is captured; or a graph module.
        args: positional arguments of the step; or the inputs of the graph.
        pass_: a pass or the name of one.
        expect: the rewritten graph as `graphopt.readable.compact_text`, indented or not; or a file
            that holds it. With the environment variable GRAPHOPT_UPDATE_GOLDEN=1 such files are
            written.
        changes: how many changes the pass reports.
        kwargs: keyword arguments of the step.
        **options: options of the pass.

    Raises:
        AssertionError: something is not as it should be; the message shows what.
        GraphOptError: the step cannot be captured, or the pass raises or is refused.
    """
    untouched, inputs = _graph_and_inputs(step, args, kwargs or {})
    discovery.install()
    found = default_registry().get(pass_) if isinstance(pass_, str) else pass_
    missing = _missing_prerequisites(found, applied_passes(untouched))
    if missing:
        untouched = copy.deepcopy(untouched)
        PassManager(missing).run(untouched)
    rewritten = copy.deepcopy(untouched)
    (record,) = PassManager([(found, options)]).run(rewritten)
    if changes is not None and record.changes != changes:
        raise AssertionError(f"{found.name} reports {record.changes} changes, not {changes}")
    if expect is not None:
        _compare_text(compact_text(rewritten), expect, found.name)
    _compare_runs(untouched, rewritten, inputs, found)
    _run_again(rewritten, found, options)
    return record


def _missing_prerequisites(pass_: Pass, applied: Sequence[str]) -> list[Pass]:
    """Prerequisites of a pass that were not applied yet, with their own, first to last."""
    registry = default_registry()
    missing: dict[str, Pass] = {}
    pending = list(pass_.prerequisites)
    while pending:
        name = pending.pop()
        if name not in missing and name not in applied:
            missing[name] = registry.get(name)
            pending += missing[name].prerequisites
    return [missing[name] for name in registry.order(missing)]


def _graph_and_inputs(
    step: Callable[..., Any] | fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[fx.GraphModule, list[Any]]:
    if isinstance(step, fx.GraphModule):
        if kwargs:
            raise TypeError("a graph module takes its inputs in `args` alone")
        return step, list(args)
    call = Call(step, tuple(args), dict(kwargs))
    captured = capture_call(call, communication_for(resolve(None)))
    return IterGraphModule(captured.graph_module), captured.live.live_values(call)


def _compare_text(actual: str, expect: str | Path, name: str) -> None:
    if isinstance(expect, Path):
        if os.environ.get(UPDATE) == "1":
            expect.parent.mkdir(parents=True, exist_ok=True)
            expect.write_text(actual)
        if not expect.is_file():
            raise AssertionError(f"{expect} does not exist; {UPDATE}=1 writes it")
        where, expected = str(expect), expect.read_text()
    else:
        where, expected = "expected", textwrap.dedent(expect).strip("\n") + "\n"
    difference = text_diff(expected, actual, (where, "actual"))
    if difference:
        hint = f"\n{UPDATE}=1 writes the file anew" if isinstance(expect, Path) else ""
        raise AssertionError(f"the graph after {name} is not as expected\n{difference}{hint}")


def _compare_runs(
    untouched: fx.GraphModule, rewritten: fx.GraphModule, inputs: list[Any], pass_: Pass
) -> None:
    late = isinstance(rewritten, IterGraphModule) and bool(rewritten.graph.late)
    iterations = _ITERATIONS if late else 1
    expected = dict(_run(untouched, inputs, iterations))
    actual = dict(_run(rewritten, inputs, iterations))
    if expected.keys() != actual.keys():
        raise AssertionError(
            f"{pass_.name} changes what the graph returns: {list(actual)} instead of"
            f" {list(expected)}"
        )
    for where, value in expected.items():
        problem = _difference(actual[where], value, pass_.changes_numerics)
        if problem is not None:
            raise AssertionError(f"{pass_.name} changes {where}: {problem}")


def _run(
    graph_module: fx.GraphModule, inputs: list[Any], iterations: int
) -> Iterator[tuple[str, Any]]:
    """Everything that `iterations` calls return and leave behind, each with a description."""
    module = copy.deepcopy(graph_module)
    values = copy.deepcopy([v.detach() if isinstance(v, torch.Tensor) else v for v in inputs])
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    gpus = {v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda}
    with torch.random.fork_rng(list(gpus)), torch.no_grad(), without_autocast():
        for iteration in range(iterations):
            if iteration:
                values = [_next(v, n) for v, n in zip(values, placeholders, strict=True)]
            if isinstance(module, IterGraphModule):
                returned = module(*values, last_iter=iteration == iterations - 1)
            else:
                returned = module(*values)
            for number, value in enumerate(_results(module.graph, returned)):
                # A copy: what is returned may be state, which the next iteration updates.
                kept = value.clone() if isinstance(value, torch.Tensor) else value
                yield f"result {number} of iteration {iteration}", kept
    for node, value in zip(placeholders, values, strict=True):
        yield f"the final value of {node.name}", value


def _results(graph: fx.Graph, returned: Any) -> list[Any]:
    """Returned values other than state updates, which are seen in the inputs."""
    if follows_output_convention(graph):
        results, _, carried = returned
        return [*results, *carried]
    nodes = _compat.tree_leaves(get_output(graph).args[0])
    values = _compat.tree_leaves(returned)
    return [v for node, v in zip(nodes, values, strict=True) if not _is_update(node)]


def _is_update(node: Any) -> bool:
    return isinstance(node, fx.Node) and is_operator(node.target, "aten::copy_")


def _next(value: Any, node: fx.Node) -> Any:
    """An input of the next iteration."""
    kind = node.meta.get("kind")
    if kind == "hyperparameter":
        return value * 0.9
    if kind == "user_input" and isinstance(value, torch.Tensor) and value.dim():
        return value.roll(1, 0)
    return value


def _difference(actual: Any, expected: Any, tolerant: bool) -> str | None:
    if not isinstance(expected, torch.Tensor):
        return None if actual == expected else f"{actual!r} instead of {expected!r}"
    kinds = [(str(t.dtype), str(t.device), tuple(t.shape)) for t in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} instead of {kinds[1]}"
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    if bool(same.all()):
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    gap = (actual.to(wide) - expected.to(wide)).abs()
    size = expected.to(wide).abs()
    allowed = TOLERANCE * (size + size.max())
    if tolerant and bool((same | (gap <= allowed)).all()):
        return None
    largest = float(gap.nan_to_num(torch.inf).max())
    return f"{int((~same).sum())} of {same.numel()} elements, the largest difference is {largest:g}"


def _run_again(rewritten: fx.GraphModule, pass_: Pass, options: Mapping[str, Any]) -> None:
    again = copy.deepcopy(rewritten)
    before = compact_text(again)
    changes = pass_.function(again, **options)
    eliminate_dead_code(again.graph)
    difference = text_diff(before, compact_text(again), ("after one run", "after two runs"))
    if difference:
        raise AssertionError(f"a second run of {pass_.name} changes the graph again\n{difference}")
    if changes:
        raise AssertionError(
            f"a second run of {pass_.name} reports {changes} changes, but the graph is the same"
        )
