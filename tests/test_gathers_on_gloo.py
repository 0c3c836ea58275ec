"""All-gathers on gloo, many in flight: values, lists as one message, a peer that leaves."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._C._distributed_c10d import _get_work_registry_size

from gloo import Pool, pool
from graphopt import _compat
from graphopt._compat.gloo_gathers import gather, gather_list

c10d: Any = torch.ops._c10d_functional
one_gather, gathers = c10d.all_gather_into_tensor, c10d.all_gather_into_tensor_coalesced
SHAPES = ((3, 2), (5,), (1, 4, 2), (0, 3))
IN_FLIGHT = 40


def lists(rank: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(IN_FLIGHT)]


def graph_of_gathers(count: int, ranks: int) -> fx.GraphModule:
    """Launches `count` times a gather of a list and one of its first tensor, and waits for them in
    the opposite order."""
    graph = fx.Graph()
    given = [[graph.placeholder(f"x{i}_{j}") for j in range(len(SHAPES))] for i in range(count)]
    launched = []
    for each in given:
        both = graph.call_function(gathers.default, (each, ranks, "0"))
        items = [graph.call_function(operator.getitem, (both, j)) for j in range(len(SHAPES))]
        launched += [*items, graph.call_function(one_gather.default, (each[0], ranks, "0"))]
    waits = [graph.call_function(c10d.wait_tensor.default, (e,)) for e in reversed(launched)]
    graph.output(waits)
    return fx.GraphModule(torch.nn.Module(), graph)


def run_many(rank: int, ranks: int) -> None:
    given = lists(rank)
    forward = _compat.forward_of(graph_of_gathers(IN_FLIGHT, ranks))
    assert {gather, gather_list} <= {f for f in forward.__globals__.values() if callable(f)}
    before = _get_work_registry_size()
    found = forward(*(each.clone() for tensors in given for each in tensors))
    everything = [each for tensors in given for each in (*tensors, tensors[0])]
    expected = []
    for each in reversed(everything):
        parts = [torch.empty_like(each) for _ in range(ranks)]
        dist.all_gather(parts, each)
        expected.append(torch.cat(parts))
    assert all(map(torch.equal, found, expected))
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert _get_work_registry_size() == before


def test_many_at_once(two_ranks: Pool) -> None:
    two_ranks.run(run_many, 2)


def test_many_at_once_on_three_ranks(three_ranks: Pool) -> None:
    three_ranks.run(run_many, 3)


def run_fakes(rank: int) -> None:
    sent = [torch.full((2,), rank + 1.0), torch.full((3,), 5.0)]
    fake_mode = _compat.new_fake_mode()
    with fake_mode:
        fakes = gather_list([fake_mode.from_tensor(each) for each in sent], 2, "0")
    assert [tuple(each.shape) for each in fakes] == [(4,), (6,)]


def test_fake_tensors_send_nothing(two_ranks: Pool) -> None:
    two_ranks.run(run_fakes)


def run_without_peer(rank: int) -> None:
    """Rank 1 leaves; each wait of rank 0 fails, also the second for the same message."""
    if rank:
        dist.destroy_process_group()
        return
    gathered = gather_list([torch.ones(2), torch.ones(3)], 2, "0")
    for each in gathered:
        with pytest.raises(RuntimeError, match=r"peer|closed"):
            c10d.wait_tensor(each)


def test_no_item_is_read_of_a_gather_that_failed() -> None:
    with pool(2) as ranks:
        ranks.run(run_without_peer)
