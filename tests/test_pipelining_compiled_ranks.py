"""Compiled stages on real gloo ranks: pipelines, and pipelines with data parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import gloo
from graphopt import DataParallel, SpmdMismatchError
from graphopt.graph_utils import is_collective
from graphopt.pipelining import reduce_replicated_gradients
from pipeline_cases import MICROBATCHES
from stage_cases import ROWS, Launches, Training, problem, train, two_heads
from twins import assert_same
from zoo import MODELS

SMALL_BUCKETS = "comm_fusion_with_concat(bucket_size_mb=0.004) -> schedule_comm_wait"


def stages_of(rank: int, schedule: str) -> list[int]:
    if schedule in ("gpipe", "1f1b"):
        return [rank]
    return [rank, 3 - rank if schedule.endswith("V") else rank + 2]


def compare(rank: int, name: str, schedule: str) -> None:
    stages = stages_of(rank, schedule)
    boundaries = ["block"] if name == "gpt" else None
    states = [
        train(
            Training(
                problem(name, 2 * len(stages), boundaries),
                schedule,
                stages=stages,
                compiled=compiled,
            )
        )
        for compiled in (None, {})
    ]
    assert_same(states[1], states[0], f"{name} under {schedule}")


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpt", "1f1b"),
        ("buffers", "gpipe"),
        ("tied replicated", "interleaved"),
        ("skips", "zero bubble V"),
    ],
)
def test_gradients_are_those_of_eager_stages(
    two_ranks: gloo.Pool, name: str, schedule: str
) -> None:
    two_ranks.run(compare, name, schedule)


# ---------------------------------------------------------------------------- data parallelism

STAGES = {"1f1b": ["block"], "gpipe": ["block"], "zero bubble": ["block", "norm", "head"]}
"""Where GPT is divided, for each schedule."""

STEPS = 3


class Replica:
    """A rank of two pipelines of two ranks each. Without dropout, as one process has to agree."""

    def __init__(
        self, rank: int, name: str, schedule: str, how: dict[str, Any] | None, **options: Any
    ) -> None:
        self.replica, place = divmod(rank, 2)
        pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.across = replicas[place]
        self.name = name
        given = problem(name, boundaries=STAGES[schedule] if name == "gpt" else ["features.3"])
        _without_dropout(given.pipe)
        self.compiled = how is not None
        if how is not None:
            how = {"parallel": DataParallel(self.across), **how}
            if self.replica:  # all replicas start from the values of the first
                with torch.no_grad():
                    torch._foreach_add_(list(given.pipe.parameters()), 1.0)
        self.training = Training(
            given,
            schedule,
            stages=stages_of(place, schedule),
            group=pipelines[self.replica],
            compiled=how,
            scale_grads=False,
            **options,
        )

    def give_batch(self, step: int) -> None:
        inputs, targets = MODELS[self.name].batch(step, 2 * ROWS * MICROBATCHES)
        mine = slice(ROWS * MICROBATCHES * self.replica, ROWS * MICROBATCHES * (self.replica + 1))
        self.training.given.args, self.training.given.target = (inputs[mine],), targets[mine]

    def step(self, step: int) -> dict[str, Tensor | None]:
        """Train; returns the gradients."""
        self.give_batch(step)
        if not self.compiled:
            self._average_buffers_by_hand()
        self.training.run()
        for parameter in self.training.named_parameters().values():
            if parameter.grad is None:
                continue
            if not self.compiled:  # what DistributedDataParallel does in the last backward
                parameter.grad.mul_(0.5)
                dist.all_reduce(parameter.grad, group=self.across)
            parameter.grad.div_(MICROBATCHES)
        reduce_replicated_gradients(*self.training.stages)
        gradients = self.training.gradients()
        self.training.update()
        return gradients

    def _average_buffers_by_hand(self) -> None:
        source = dist.get_global_rank(self.across, 0)
        for stage in self.training.stages:
            for buffer in stage.submod.buffers():
                dist.broadcast(buffer, source, group=self.across)


def _without_dropout(pipe: torch.nn.Module) -> None:
    for graph_module in pipe.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.dropout.default:
                node.replace_all_uses_with(node.args[0])
            elif node.target is torch.ops.aten.scaled_dot_product_attention.default:
                node.args = (*node.args[:4], 0.0, *node.args[5:])
        graph_module.recompile()


def train_replica(
    rank: int, name: str, schedule: str, how: dict[str, Any] | None
) -> tuple[list[Any], Any, Any]:
    """Gradients of each step, what the stages hold in the end, and losses."""
    replica = Replica(rank, name, schedule, how)
    gradients = [replica.step(index) for index in range(STEPS)]
    states = {}
    for stage in replica.training.stages:
        states |= stage.submod.state_dict()
    noted = [found for _, found in replica.training.outputs if found]
    losses = [float(torch.stack(found).detach().mean()) for found in noted]
    return gradients, states, losses


@pytest.mark.parametrize(
    ("name", "schedule"), [("gpt", "1f1b"), ("gpt", "zero bubble"), ("convnet", "gpipe")]
)
def test_replicas_train_as_with_gradients_averaged_by_hand(
    four_ranks: gloo.Pool, name: str, schedule: str
) -> None:
    """Sums of two are the same in any order, so bits are the same."""
    eager = four_ranks.run(train_replica, name, schedule, None)
    compiled = four_ranks.run(train_replica, name, schedule, {"pipeline": SMALL_BUCKETS})
    assert_same(compiled, eager, name)
    for first, second in ((0, 2), (1, 3)):
        assert_same(_parameters(compiled[second][1]), _parameters(compiled[first][1]), "replicas")


def _parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if "running" not in name}


def one_process() -> tuple[list[float], dict[str, Tensor | None], dict[str, Tensor]]:
    """Losses, gradients of the first step, and parameters of the same model on all the data."""
    torch.manual_seed(0)
    model = MODELS["gpt"].make().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for step in range(STEPS):
        inputs, targets = MODELS["gpt"].batch(step, 2 * ROWS * MICROBATCHES)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({n: p.grad for n, p in model.named_parameters(remove_duplicate=False)})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients[0], model.state_dict()


@pytest.mark.parametrize("lower", [None, "inductor"])
def test_replicas_train_as_one_process(four_ranks: gloo.Pool, lower: str | None) -> None:
    """The mean of the means of microbatches is the mean over the batch, up to rounding.

    The gradients of the first step differ by rounding alone. AdamW divides each by its size, so
    that of a gradient near zero the rounding may decide, and compiled code rounds otherwise; later
    steps are compared by the loss.
    """
    tolerance = 1e-2 if lower is None else 3e-2
    how = {"pipeline": SMALL_BUCKETS, "lower": lower}
    ranks = four_ranks.run(train_replica, "gpt", "1f1b", how)
    losses, gradients, state = one_process()
    for first, states, _ in ranks:
        for name, gradient in first[0].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)
        for name, value in states.items():
            assert float((value - state[name]).norm() / state[name].norm()) < tolerance, name
    averaged = [(a + b) / 2 for a, b in zip(ranks[1][2], ranks[3][2], strict=True)]
    torch.testing.assert_close(averaged, losses, rtol=1e-3, atol=1e-4)
    assert averaged[-1] < averaged[0]


def watch_launches(rank: int, pipeline: str) -> dict[str, Any]:
    replica = Replica(rank, "gpt", "1f1b", {"pipeline": pipeline})
    (stage,) = replica.training.stages
    seen: list[tuple[str, list[str]]] = []
    for name in ("backward_one_chunk", "perform_reduce_grad"):
        setattr(stage, name, _watched(name, getattr(stage, name), seen))
    replica.step(0)
    return {
        "backwards": [names for kind, names in seen if kind == "backward_one_chunk"],
        "end": seen[-1],
        "buckets": sum(map(is_collective, stage.graph_module.graph.nodes)),
        "parameters": len(list(stage.submod.parameters())),
    }


def _watched(name: str, call: Any, seen: list[tuple[str, list[str]]]) -> Any:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with Launches() as launches:
            result = call(*args, **kwargs)
        seen.append((name, launches.names))
        return result

    return watched


def test_buckets_are_launched_within_the_last_backward(four_ranks: gloo.Pool) -> None:
    """One all-reduce for each bucket, between computations, and waited for when a neighbour has
    been sent its gradients."""
    for found in four_ranks.run(watch_launches, SMALL_BUCKETS):
        *others, last = found["backwards"]
        assert len(others) == MICROBATCHES - 1
        assert not any("c10d" in name for names in others for name in names)
        launches = [index for index, name in enumerate(last) if "::all_reduce" in name]
        assert len(launches) == found["buckets"] < found["parameters"]
        assert not any("::wait_tensor" in name for name in last)
        if found["buckets"] > 1:
            assert any(name == "aten::mm" for name in last[launches[0] :])
        kind, names = found["end"]
        assert kind == "perform_reduce_grad"
        assert sum("::wait_tensor" in name for name in names) == found["buckets"]
    for found in four_ranks.run(watch_launches, "none"):
        assert found["buckets"] == found["parameters"]


def alone(rank: int) -> dist.ProcessGroup:
    """The group of a pipeline of one rank."""
    return [dist.new_group([other]) for other in range(dist.get_world_size())][rank]


def train_two_heads(rank: int) -> None:
    """The loss leaves out a result, so that its parameters have no gradient on any rank."""
    group = alone(rank)
    found = []
    for how in (None, {"parallel": DataParallel()}):
        given = two_heads("the first")
        given.args = (given.args[0] + rank,)
        training = Training(
            given, "gpipe", stages=[0], group=group, scale_grads=False, compiled=how
        )
        training.run()
        found.append(training.gradients())
    eager, compiled = found
    assert [name for name, gradient in compiled.items() if gradient is None] == [
        "second.weight",
        "second.bias",
    ]
    for gradient in (g for g in eager.values() if g is not None):
        gradient.mul_(0.5)
        dist.all_reduce(gradient)
    assert_same(compiled, eager, "gradients")


def test_replicas_agree_on_what_a_loss_leaves_out(two_ranks: gloo.Pool) -> None:
    two_ranks.run(train_two_heads)


def train_with_unlike_losses(rank: int, layouts: bool) -> None:
    """In the first microbatch the loss of rank 0 leaves out a result, or its gradient is laid out
    otherwise."""
    group = alone(rank)
    found = []
    for how in (None, {"parallel": DataParallel()}):
        given = two_heads("the first")
        given.args = (given.args[0] + rank,)
        calls: list[int] = []

        def loss(output: Any, target: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            first = output[0].square().mean()
            if rank == 0 and len(calls) == 1:
                return first + (output[1].T.contiguous() * target.T).sum() if layouts else first
            return first + output[1].square().mean()

        training = Training(
            given, "gpipe", stages=[0], group=group, scale_grads=False, compiled=how, loss=loss
        )
        training.run()
        found.append(training.gradients())
    eager, compiled = found
    for gradient in eager.values():
        assert gradient is not None
        gradient.mul_(0.5)
        dist.all_reduce(gradient)
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("layouts", [False, True])
def test_replicas_agree_where_their_losses_differ(two_ranks: gloo.Pool, layouts: bool) -> None:
    two_ranks.run(train_with_unlike_losses, layouts)


def compile_unlike(rank: int) -> str:
    how = {"parallel": DataParallel()}
    given = problem("mlp" if rank else "reused")
    try:
        Training(given, "gpipe", stages=[1], group=alone(rank), compiled=how)
    except SpmdMismatchError as error:
        return str(error)
    return ""


def test_replicas_of_different_stages_are_refused(two_ranks: gloo.Pool) -> None:
    for message in two_ranks.run(compile_unlike):
        assert "rank 1 has other parameters or buffers than rank 0" in message
