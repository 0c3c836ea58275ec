"""Steps whose operators raise for some values, or that catch exceptions: no kernel gets a bad
index, and what the trace itself raises is no exception of the step's."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx import Node

import graphopt
from edit_tools import with_arg
from graphopt.errors import CaptureError, VerificationError
from graphopt.graph_utils import evaluate
from test_verify_edits_outside_terms import applied, captured, first, put_before

aten = torch.ops.aten

TESTS = Path(__file__).parent


def raising(part: int, parts: int, *forgotten: str) -> tuple[int, list[str]]:
    """How many entries of the database were tried in a process of its own, and what raised of which
    the table does not know it, or is to forget it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    command = [sys.executable, TESTS / "raising.py", str(part), str(parts), *forgotten]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1000)
    assert run.returncode == 0, run.stderr[-2000:]
    count, *names = run.stdout.splitlines()[-1].split()
    return int(count), names


def test_operators_that_raise_are_known() -> None:
    """All but one that the table is to forget."""
    count, names = raising(3, 12, "aten::index_select")
    assert count > 40 and names == ["aten::index_select.default"]


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_all_operators_that_raise_are_known(part: int) -> None:
    count, names = raising(part, 4)
    assert count > 100 and not names


def zeros_and_more(_: Any, x: Tensor) -> Any:
    return torch.zeros_like(x) + x, x * 1.5


def probability(x: fx.Node, zeros: fx.Node) -> fx.Node:
    return put_before(zeros, aten.binary_cross_entropy.default, x, x, None, 0)


def remainder(x: fx.Node, zeros: fx.Node) -> fx.Node:
    whole = put_before(zeros, aten._to_copy.default, x, dtype=torch.int64)
    divided = put_before(zeros, aten.div.Tensor_mode, whole, whole, rounding_mode="floor")
    return put_before(zeros, aten._to_copy.default, divided, dtype=torch.float32)


def of_the_program(x: fx.Node, zeros: fx.Node) -> fx.Node:
    return put_before(zeros, torch.ops.raises_for_test.positive.default, x)


@pytest.fixture
def operator_of_the_program() -> Iterator[None]:
    with torch.library._scoped_library("raises_for_test", "DEF") as library:
        library.define("positive(Tensor x) -> Tensor")
        library.impl("positive", torch.clone, "CPU")
        library._register_fake("positive", torch.empty_like)
        yield


@pytest.mark.parametrize("value", [probability, remainder, of_the_program])
@pytest.mark.usefixtures("operator_of_the_program")
def test_no_step_gets_an_operator_that_raises(value: Any) -> None:
    """Also where only the shape of its result is read."""

    def edit(gm: fx.GraphModule) -> None:
        zeros = first(gm, "zeros_like")
        with_arg(zeros, 0, value(zeros.args[0], zeros))

    with pytest.raises(VerificationError, match="raises an error for some values"):
        applied(captured(zeros_and_more, torch.ones(4, 4)), edit)


def halves(_: Any, x: Tensor) -> Tensor:
    return torch.cat([x[:2], x[2:]]) / 3.0


def test_what_cannot_raise_may_be_computed_of_parts() -> None:
    def edit(gm: fx.GraphModule) -> None:
        whole = first(gm, "div")
        parts = [put_before(whole, aten.slice.Tensor, whole.args[0], 0, i, i + 2) for i in (0, 2)]
        divided = [put_before(whole, aten.div.Tensor, part, 3.0) for part in parts]
        whole.replace_all_uses_with(put_before(whole, aten.cat.default, divided))
        gm.graph.erase_node(whole)

    applied(captured(halves, torch.rand(4, 4)), edit)


ALL = [True, True, True]


def batch_norm(x: Tensor, *statistics: Tensor | None, train: bool = True) -> Tensor:
    weight = torch.ones(x.shape[1])
    found = aten.native_batch_norm_backward(x, x, weight, *statistics, train, 1e-5, ALL)
    return found[0]


def batch_norm_of_any_backend(x: Tensor, mean: Tensor | None, variance: Tensor | None) -> Tensor:
    ones, kept = torch.ones(x.shape[1]), torch.empty(0, dtype=torch.uint8)
    return aten.batch_norm_backward(x, x, ones, ones, ones, mean, variance, True, 1e-5, ALL, kept)[
        0
    ]


def layer_norm(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    ones = torch.ones(x.shape[-1])
    return aten.native_layer_norm_backward(x, x, [x.shape[-1]], mean, deviation, ones, ones, ALL)[0]


def log_softmax(x: Tensor, output: Tensor) -> Tensor:
    return aten._log_softmax_backward_data(x, output, 1, torch.float32)


X = torch.rand(6, 4, 5)
CHANNELS, FEW, NONE = torch.ones(4), torch.ones(1), torch.empty(0)
PLACES = torch.ones(6, 4, 1)
WRONG = {
    "no mean of the batch": (batch_norm, (CHANNELS, CHANNELS, None, CHANNELS)),
    "no deviation of the batch": (batch_norm, (CHANNELS, CHANNELS, CHANNELS, None)),
    "an empty mean": (batch_norm, (None, None, NONE, CHANNELS)),
    "too few deviations": (batch_norm, (None, None, CHANNELS, FEW)),
    "no mean, any backend": (batch_norm_of_any_backend, (None, CHANNELS)),
    "few variances, any backend": (batch_norm_of_any_backend, (CHANNELS, FEW)),
    "empty mean of a layer": (layer_norm, (NONE, PLACES)),
    "few deviations of a layer": (layer_norm, (PLACES, CHANNELS)),
    "another output": (log_softmax, (torch.rand(6, 4),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_step_with_such_a_call_is_refused(name: str) -> None:
    call, given = WRONG[name]
    with pytest.raises(CaptureError, match=r"of the \d+ numbers that are read"):
        graphopt.capture(lambda x: call(x, *given), X)


def test_running_statistics_are_read_in_evaluation_alone() -> None:
    def step(model: nn.Module, mean: Tensor | None) -> Tensor:
        return batch_norm(model.weight[None, :, :], mean, mean, None, None, train=False)

    model = nn.Linear(5, 4)
    assert torch.equal(graphopt.compile(step)(model, CHANNELS), step(model, CHANNELS))
    with pytest.raises(CaptureError, match="running_mean has none of the 4 numbers"):
        graphopt.capture(step, model, None)


def test_an_edited_graph_is_evaluated_without_the_kernel() -> None:
    model = nn.Sequential(nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3))

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    graph = graphopt.capture(step, X).graph_module.graph
    [node] = graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default)
    for index, given in enumerate(node.args):
        if index > 4 and isinstance(given, Node):
            args = [None if at == index else arg for at, arg in enumerate(node.args)]
            with pytest.raises(RuntimeError, match="has none of the 3 numbers"):
                evaluate(node.target, args, node.kwargs)


Loop = Callable[[Any, Tensor, Tensor], None]


def loss_of(kept: Any, x: Tensor, boxes: Tensor) -> Tensor:
    found = boxes[boxes[:, 0] != -1]
    if found.shape[0] == 0:
        return kept.model(x).mean()
    return (kept.model(x).mean(0) - found).abs().sum() / found.shape[0]


def update(kept: Any, loss: Tensor) -> None:
    kept.optimizer.zero_grad()
    loss.backward()
    kept.optimizer.step()
    graphopt.callback(kept.losses.append, loss.item())


def any_error(kept: Any, x: Tensor, boxes: Tensor) -> None:
    try:
        update(kept, loss_of(kept, x, boxes))
    except:  # noqa: E722
        kept.failed += 1


def prints_it(kept: Any, x: Tensor, boxes: Tensor) -> None:
    try:
        loss = loss_of(kept, x, boxes)
        update(kept, loss)
    except Exception as error:
        graphopt.callback(print, str(error))
        return


def out_of_memory(kept: Any, x: Tensor, boxes: Tensor) -> None:
    try:
        loss = loss_of(kept, x, boxes)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise ValueError("no memory") from error
        return
    update(kept, loss)


def its_own(kept: Any, x: Tensor, boxes: Tensor) -> None:
    try:
        loss = kept.model(x).pow(2).mean()
        if not torch.isfinite(loss):
            raise FloatingPointError("not finite")
        update(kept, loss)
    except FloatingPointError:
        kept.failed += 1


def says_its_own(kept: Any, x: Tensor, boxes: Tensor) -> None:
    loss = kept.model(x).pow(2).mean()
    try:
        if (boxes == -1).sum() > 2:
            raise RuntimeError("too many", 3)
        if loss < 0.5:
            raise ValueError("low")
    except (RuntimeError, ValueError) as error:
        graphopt.callback(print, [str(error)], type(error).__name__)
        graphopt.callback(logging.getLogger("caught").warning, "%s", str(error))
    update(kept, loss)


def in_a_function(kept: Any, x: Tensor, boxes: Tensor) -> None:
    def tried() -> Tensor | None:
        try:
            return loss_of(kept, x, boxes)
        except Exception:
            return None

    loss = tried()
    update(kept, kept.model(x).sum() if loss is None else loss)


def trained(loop: Loop, captured: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = SimpleNamespace(model=model, optimizer=optimizer, losses=[], failed=0)

    def step(x: Tensor, boxes: Tensor) -> None:
        loop(kept, x, boxes)

    taken = graphopt.compile(step) if captured else step
    for index in range(5):
        boxes = torch.rand(3, 2)
        boxes[index % 3 :] = -1
        x = torch.randn(4, 3)
        taken(x / 0 if loop is its_own and index == 3 else x, boxes)
    return [kept.losses, kept.failed, *(each.tolist() for each in model.parameters())]


@pytest.mark.parametrize(
    "loop", [any_error, prints_it, out_of_memory, its_own, says_its_own, in_a_function]
)
def test_the_same_as_eager(
    loop: Loop, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for is_captured in (False, True):
        caplog.clear()
        left = trained(loop, is_captured)
        logged = [each.getMessage() for each in caplog.records if each.name == "caught"]
        found.append((left, capsys.readouterr().out, logged))
    assert found[0] == found[1]


def test_a_refusal_is_not_caught() -> None:
    model = nn.Linear(2, 2)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        try:
            values = sorted([loss], key=float)
        except Exception:
            values = [loss]
        values[0].backward()
        return loss

    with pytest.raises(CaptureError):
        step(torch.ones(2, 2))
