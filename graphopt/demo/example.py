"""The demo's example: a training step, a wrong pass, and its correction."""

from __future__ import annotations

from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.graph_utils import get_output, move_before

registry = graphopt.PassRegistry()  # the demo's own: `graphopt passes` does not list them


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """A training step of a linear regression."""
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@graphopt.graph_optimization_pass(registry=registry)
def wait_at_the_end(gm: fx.GraphModule) -> None:
    """Wait for every bucket when the step ends. Wrong: the optimizer reads the buckets before."""
    for bucket in get_all_comm_blocks(gm):
        move_before(bucket.wait_nodes, get_output(gm.graph))


@graphopt.graph_optimization_pass(registry=registry)
def wait_before_first_reader(gm: fx.GraphModule) -> int:
    """Wait for every bucket just before its first reader. Returns how many waits moved."""
    position = {node: number for number, node in enumerate(gm.graph.nodes)}
    moved = 0
    for bucket in get_all_comm_blocks(gm):
        readers = [user for wait in bucket.wait_nodes for user in wait.users]
        move_before(bucket.wait_nodes, min(readers, key=position.__getitem__))
        moved += len(bucket.wait_nodes)
    return moved
