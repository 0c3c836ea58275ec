"""What `DataParallel` puts in, against a definition of its own: by terms, for all inputs.

The definition is a step for one device that says in plain PyTorch what is averaged: every gradient,
after the backward, and that buffers are those of the first rank, before the forward. An average is
an operator of this file, which is then written out: each rank's part divided by their number, and
the sum over ranks. Nothing of this shares code with `graphopt.tracing` or `graphopt.parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt.graph_utils import call_function_with_meta
from graphopt.verify import check_equivalence
from zoo import MODELS, OPTIMIZERS, train_step

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@torch.library.custom_op("averages::average", mutates_args=())
def average(gradient: Tensor) -> Tensor:
    """The mean over ranks."""
    return gradient.clone()


@torch.library.custom_op("averages::of_first", mutates_args=())
def of_first(buffer: Tensor) -> Tensor:
    """The value of the first rank."""
    return buffer.clone()


average.register_fake(torch.empty_like)
of_first.register_fake(torch.empty_like)


def averaged(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.copy_(of_first(buffer))
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = average(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def written_out(gm: fx.GraphModule, ranks: int, factor: float | None = None) -> fx.GraphModule:
    """The definition with collectives in place of its operators."""
    group = dist.group.WORLD.group_name
    for node in list(gm.graph.nodes):
        sent: Any = None
        with gm.graph.inserting_before(node):
            if node.target is torch.ops.averages.average.default:
                scale = 1 / ranks if factor is None else factor
                part = _call(gm, aten.mul.Tensor, node.args[0], scale)
                sent = _call(gm, c10d.all_reduce.default, part, "sum", group)
            elif node.target is torch.ops.averages.of_first.default:
                sent = _call(gm, c10d.broadcast.default, node.args[0], 0, group)
            if sent is not None:
                node.replace_all_uses_with(_call(gm, c10d.wait_tensor.default, sent))
                gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _call(gm: fx.GraphModule, target: Any, *args: Any) -> fx.Node:
    return call_function_with_meta(gm.graph, target, args)


@contextmanager
def group_of(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def graph_of(step: Callable[..., Any], model: str, optimizer: str, parallel: Any) -> fx.GraphModule:
    torch.manual_seed(0)
    made = MODELS[model].make()
    args = (made, OPTIMIZERS[optimizer](made.parameters()), *MODELS[model].batch(0))
    step(*args)
    return graphopt.capture(step, *args, parallel=parallel).graph_module


CASES = [
    ("mlp", "adamw-fused", 2),
    ("gpt", "sgd-momentum-foreach", 4),
    ("convnet", "adam-decay-loop", 2),
    ("reused", "rmsprop-foreach", 3),
    ("recurrent", "adagrad-fused", 2),
    ("mlp", "nadam-loop", 4),
    ("checkpointed", "adamw-amsgrad-fused", 2),
    ("running-mean", "sgd-nesterov-foreach", 2),
]


@pytest.mark.parametrize(("model", "optimizer", "ranks"), CASES)
def test_data_parallel_is_the_step_with_averaged_gradients(
    model: str, optimizer: str, ranks: int
) -> None:
    with group_of(ranks):
        defined = graph_of(averaged, model, optimizer, graphopt.Manual())
        made = graph_of(train_step, model, optimizer, graphopt.DataParallel())
        report = check_equivalence(written_out(defined, ranks), made)
    assert report.ok, str(report)


def test_another_average_is_another_graph() -> None:
    with group_of(2):
        made = graph_of(train_step, "mlp", "adamw-fused", graphopt.DataParallel())
        for factor in (1.0, 0.25):
            defined = graph_of(averaged, "mlp", "adamw-fused", graphopt.Manual())
            assert not check_equivalence(written_out(defined, 2, factor), made).ok
