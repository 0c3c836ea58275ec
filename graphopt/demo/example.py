"""The demo's example: a training step, a wrong pass, and its correction."""

from __future__ import annotations

from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.graph_utils import get_output, is_view, move_before

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
    """Wait for every bucket just before the first node that computes with it. Returns how many
    waits moved."""
    position = {node: number for number, node in enumerate(gm.graph.nodes)}
    moved = 0
    for bucket in get_all_comm_blocks(gm):
        sunk = list(bucket.wait_nodes)
        for node in sunk:
            sunk += [user for user in node.users if is_view(user)]
        readers = [user for node in sunk for user in node.users if user not in sunk]
        move_before(sunk, min(readers, key=position.__getitem__))
        moved += len(bucket.wait_nodes)
    return moved
