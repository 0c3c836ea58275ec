"""`fake_ranks`: several simulated ranks in one process, whose collectives exchange values."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.errors import CollectiveError
from graphopt.ir.metadata import input_kind
from graphopt.replicas import Lockstep, ReplicatedStep


@dataclass(frozen=True)
class FakeRanks:
    """The simulated ranks of `fake_ranks`.

    Attributes:
        size: how many there are.

    >>> with graphopt.testing.fake_ranks(2) as ranks:
    ...     type(ranks).__name__
    'FakeRanks'
    """

    size: int

    def run(self, graph_module: fx.GraphModule, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Runs one iteration of a graph on all ranks, late work included.

        Args:
            inputs: for each rank one value per placeholder; ranks share no tensor. Tensors that the
                graph updates are updated.

        Returns:
            What the graph returns, for each rank.

        Raises:
            CollectiveError: a collective cannot be computed: ranks send different shapes, say.
        """
        if len(inputs) != self.size:
            raise ValueError(f"inputs for {len(inputs)} ranks are given, there are {self.size}")
        return ReplicatedStep(graph_module, Lockstep(self.size))(inputs, last_iter=True)


@contextmanager
def fake_ranks(count: int) -> Iterator[FakeRanks]:
    """A context in which this process is rank 0 of `count`, for passes on communication.

    `graphopt.capture` captures what rank 0 of so many ranks runs. `check_pass` runs a graph for all
    of them, node by node: every replica has data and random numbers of its own, and collectives
    really reduce, gather and broadcast the values of all replicas. So an average that is lost or
    done twice shows. There are neither processes nor threads.

    Groups made by `torch.distributed.new_group` work where all ranks divide into shifted copies of
    them: [0, 1] of four ranks stands for [2, 3] as well.

    Args:
        count: of ranks, at least 2.

    Yields:
        The ranks; `FakeRanks.run` runs any graph on them, with inputs of your own.

    Raises:
        ValueError: `count` is not a whole number of at least 2.
        CollectiveError: this process has a process group already.

    >>> from graphopt.testing import check_pass, fake_ranks
    >>> import torch
    >>> def step(model, optimizer, x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with fake_ranks(3):
    ...     args = model, optimizer, torch.ones(2, 4)
    ...     record = check_pass(step, args, "comm_fusion_with_concat")
    >>> record.collectives_before, record.collectives_after
    (2, 1)
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise ValueError(f"fake_ranks({count!r}): give how many ranks there are, at least 2")
    if dist.is_initialized():
        raise CollectiveError(
            "this process has a process group already, of real ranks or of an outer fake_ranks",
            hint="use fake_ranks in a process of its own, without init_process_group()",
        )
    hook = sys.excepthook
    _compat.start_fake_group(count)  # which lets tracebacks name a rank
    try:
        yield FakeRanks(count)
    finally:
        sys.excepthook = hook
        dist.destroy_process_group()


def inputs_of_rank(nodes: Sequence[fx.Node], values: Sequence[Any], rank: int) -> list[Any]:
    """Returns the inputs of rank 0 changed to what `rank` would have.

    Parameters, optimizer state and hyperparameters are the same on all ranks. Batches are others of
    the same range: floats are scaled, and rolled as integers are. Buffers and gradients that live
    across calls are scaled. Booleans stay, since masks have to fit what they mask.
    """
    detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
    own = copy.deepcopy(detached)  # with their strides, and storage shared as it is
    for node, value in zip(nodes, own, strict=True):
        if rank and isinstance(value, torch.Tensor) and _is_writable(value):
            _make_own(value, input_kind(node), rank)
    return own


def _is_writable(tensor: torch.Tensor) -> bool:
    """True if no two elements share memory, as those of an expanded tensor do."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return all(stride or size < 2 for stride, size in pairs)


def _make_own(value: torch.Tensor, kind: str | None, rank: int) -> None:
    """Changes a tensor of rank 0 to what `rank` would have."""
    if kind not in _DIFFER or value.dtype == torch.bool:
        return
    if kind in ("user_input", None):
        value.copy_(value.flatten().roll(rank * (1 + value.numel() // 7)).view(value.shape))
    if value.is_floating_point() or value.is_complex():
        value *= 1 + rank / 8


_DIFFER = ("user_input", "buffer", "gradient", None)
"""Kinds of inputs that differ between ranks; None: inputs of a hand-made graph."""
