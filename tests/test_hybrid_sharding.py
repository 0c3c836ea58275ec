"""Hybrid sharding on four ranks: rows over pairs of ranks, replicas over the others."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, fx
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import graphopt
import zero_edits
from gloo import Pool
from graphopt.ir.placement import Placement, Rows, placement_of
from graphopt.ir.placement import Replicate as Same
from graphopt.ir.rank_groups import rank_mesh
from graphopt.iter_graph import copy_graph
from graphopt.parallel.parallelize import parallelize
from graphopt.testing import fake_ranks
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call, communication_for
from graphopt.verify.sharding.marker_meaning import sharing_problems
from zero_cases import Beside, Language, Uneven, batches, clipped_step, same, train_step, whole
from zero_edits import Edit

RANKS = 4
PAIRS = {"shard": [[0, 1], [2, 3]], "replicate": [[0, 2], [1, 3]]}


class Cut(torch.nn.Module):
    """Attention of which all parameters are cut, at multiples of 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = torch.nn.Embedding(68, 256), torch.nn.Linear(256, 768, bias=False)
        self.head = torch.nn.Linear(256, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        q, k, v = (each.unsqueeze(1) for each in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        found: Tensor = self.head(x.tanh())
        return found


MODELS: dict[str, Any] = {"uneven": Uneven, "cut": Cut, "language": lambda: Language(width=264)}
ROWS = {"uneven": (34, 33), "cut": (64, 64), "language": (34, 33)}
"""Of the head's weight, on each rank of a row."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def groups(rank: int) -> dict[str, Any]:
    """As arguments of `graphopt.ZeRO`; all ranks make all groups."""
    made = {name: [dist.new_group(pair) for pair in pairs] for name, pairs in PAIRS.items()}
    own = {
        name: next(g for g, pair in zip(made[name], pairs, strict=True) if rank in pair)
        for name, pairs in PAIRS.items()
    }
    return {"group": own["shard"], "replicate_over": own["replicate"]}


def hybrid_pair(rank: int, model: str, stage: int, pipeline: str) -> Beside:
    return Beside(MODELS[model], adamw, stage=stage, pipeline=pipeline, **groups(rank))


# ---------------------------------------------------------------------------------------- the bits


def run_training(rank: int, model: str, stage: int, pipeline: str) -> dict[str, Any]:
    """Beside DDP on all ranks, whose ring adds in another order; in double precision. In single,
    AdamW makes an update of full size of what rounding leaves of a gradient that is zero, as that
    of a bias of keys is, and so of the order of sums."""
    build = lambda: MODELS[model]().double()  # noqa: E731
    pair = Beside(build, adamw, stage=stage, pipeline=pipeline, **groups(rank))
    for given in batches(rank):
        ours = pair.step(pair.model, pair.optimizer, *given)
        theirs = pair.eager(pair.ddp, pair.reference_optimizer, *given)
        same(ours, theirs, "loss", 1e-12)
    pair.step.flush()
    pair.compare(1e-9)
    moment = pair.optimizer.state[pair.model.head.weight]["exp_avg"]
    return {
        "mesh": moment.device_mesh.mesh.tolist(),
        "names": moment.device_mesh.mesh_dim_names,
        "placements": moment.placements == (Replicate(), Shard(0)),
        "rows": moment.to_local().shape[0],
        "parameter": type(pair.model.head.weight).__name__,
        "values": [whole(parameter.detach()).clone() for parameter in pair.model.parameters()],
    }


def in_order_of_mesh(model: str, count: int = 3) -> list[Tensor]:
    """The same training in this process: sums over a row of the mesh, then down its columns."""
    torch.manual_seed(3)
    made = MODELS[model]()
    replicas = [made, *(copy.deepcopy(made) for _ in range(1, RANKS))]
    optimizer = adamw(made.parameters())
    given = [list(batches(rank, 3)) for rank in range(RANKS)]
    for number in range(count):
        for replica, own in zip(replicas, given, strict=True):
            replica.load_state_dict(made.state_dict())
            tokens, wanted = own[number]
            F.cross_entropy(replica(tokens).flatten(0, 1), wanted.flatten()).backward()
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            scaled = [p.grad / RANKS for p in parameters]  # type: ignore[operator]
            parameters[0].grad = (scaled[0] + scaled[1]) + (scaled[2] + scaled[3])
        optimizer.step()
        for replica in replicas:
            replica.zero_grad()
    return [parameter.detach() for parameter in made.parameters()]


@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 3])
def test_trains_as_ddp(four_ranks: Pool, stage: int, model: str, pipeline: str) -> None:
    found = four_ranks.run(run_training, model, stage, pipeline)
    for rank, each in enumerate(found):
        assert each["mesh"] == [[0, 1], [2, 3]] and each["names"] == ("replicate", "shard")
        assert each["placements"]
        assert each["rows"] == ROWS[model][rank % 2]
        assert each["parameter"] == ("DTensor" if stage == 3 else "Parameter")
        for ours, first in zip(each["values"], found[0]["values"], strict=True):
            same(ours, first, f"rank {rank}")


def run_values(rank: int, model: str, stage: int, count: int) -> list[Tensor]:
    torch.manual_seed(3)
    made = MODELS[model]()
    optimizer = adamw(made.parameters())
    step = graphopt.compile(train_step, parallel=graphopt.ZeRO(stage=stage, **groups(rank)))
    for given in batches(rank, count):
        step(made, optimizer, *given)
    step.flush()
    return [whole(parameter.detach()).clone() for parameter in made.parameters()]


@pytest.mark.parametrize("stage", [1, 3])
def test_bits_of_sums_over_rows_and_then_columns(four_ranks: Pool, stage: int) -> None:
    """Of one step, since what is not cut is summed by a ring."""
    expected = in_order_of_mesh("uneven", 1)
    for found in four_ranks.run(run_values, "uneven", stage, 1):
        cut = [(a, b) for a, b in zip(found, expected, strict=True) if a.dim() > 1]
        assert len(cut) == 2
        for ours, theirs in cut:
            same(ours, theirs, str(tuple(ours.shape)))


def run_beside_fsdp(rank: int, stage: int) -> None:
    torch.manual_seed(3)
    made = Cut()
    twin = copy.deepcopy(made)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(twin, mesh=mesh)
    kind = graphopt.ZeRO(
        stage=stage, group=mesh.get_group("shard"), replicate_over=mesh.get_group("replicate")
    )
    step = graphopt.compile(train_step, parallel=kind)
    ours, theirs = adamw(made.parameters()), adamw(twin.parameters())
    for given in batches(rank):
        same(step(made, ours, *given), train_step(twin, theirs, *given), "loss")
    step.flush()
    for one, other in zip(made.parameters(), twin.parameters(), strict=True):
        same(whole(one.detach()), whole(other.detach()), str(tuple(one.shape)))


@pytest.mark.parametrize("stage", [1, 3])
def test_bits_of_hybrid_fsdp(four_ranks: Pool, stage: int) -> None:
    four_ranks.run(run_beside_fsdp, stage)


# --------------------------------------------------------------------------------------- the proof


def expanded(stage: int, **options: Any) -> tuple[fx.Graph, fx.GraphModule, list[str]]:
    """A marked graph, what the kind makes of it, and the names of its groups; in `fake_ranks`."""
    model = Uneven()
    made = adamw(model.parameters())
    given = next(batches(0, 1))
    clipped_step(model, made, *given)
    kind = graphopt.ZeRO(stage=stage, keep_mb=0, **options)
    call = Call(clipped_step, (model, made, *given), {})
    captured = capture_call(call, communication_for(kind))
    marked, _ = copy_graph(captured.graph_module.graph)
    parallelize(captured.graph_module, kind)
    return marked, captured.graph_module, [axis.group_name for axis in kind.axes]


def own_columns(graph: fx.Graph) -> Any:
    """Without the sum down a column."""
    for node in zero_edits.called(graph, "_c10d_functional.all_reduce"):
        (wait,) = node.users
        sent: Any = node.args[0]
        if "sum_of_ranks" not in str(sent.target):
            continue
        wait.replace_all_uses_with(sent)
        yield f"{node.name} left out"
        for user in list(sent.users):
            if user is not node:
                user.replace_input_with(sent, wait)


def swapped_groups(graph: fx.Graph) -> Any:
    """Rows over columns, and sums over rows, everywhere."""
    names = {str(n.args[-1]) for n in zero_edits.called(graph, "all_to_all", "all_gather")}
    (shards,) = names
    outer = [
        n
        for n in zero_edits.called(graph, "_c10d_functional.all_reduce")
        if "sum_of_ranks" in str(n.args[0].target)  # type: ignore[union-attr]
    ]
    replicas = str(outer[0].args[-1])
    before = {n: n.args for n in graph.nodes if n.args and n.args[-1] in (shards, replicas)}
    for node, args in before.items():
        node.args = (*args[:-1], replicas if args[-1] == shards else shards)
    yield "all swapped"
    for node, args in before.items():
        node.args = args


ILLEGAL: dict[str, Edit] = {
    **zero_edits.ILLEGAL,
    "no sum down the column": own_columns,
    "groups swapped": swapped_groups,
}


@pytest.mark.parametrize("stage", [1, 3])
def test_is_shown_to_be_the_step(stage: int) -> None:
    with fake_ranks(RANKS):
        marked, gm, axes = expanded(stage, **groups(0))
        assert [str(p) for p in sharing_problems("sharded", marked, gm, axes=axes)] == []
        cut = [p for p in gm.graph.find_nodes(op="placeholder") if placement_of(p).rows == 0]
        assert {placement_of(p) for p in cut} == {Placement((Same(), Rows(0)))}
        assert {str(placement_of(p)) for p in cut} == {"full, rows 0"}
        assert list(sharing_problems("sharded", marked, gm, axes=axes[::-1]))
        assert list(sharing_problems("sharded", marked, gm))


@pytest.mark.covering(1)
@pytest.mark.parametrize("edit", ILLEGAL)
@pytest.mark.parametrize("stage", [1, 3])
def test_wrong_ones_are_refused(stage: int, edit: str) -> None:
    with fake_ranks(RANKS):
        marked, gm, axes = expanded(stage, **groups(0))
        accepted = [
            what
            for what in ILLEGAL[edit](gm.graph)
            if not list(sharing_problems("sharded", marked, gm, axes=axes))
        ]
        assert accepted == []
        assert list(sharing_problems("sharded", marked, gm, axes=axes)) == []


# ------------------------------------------------------------------------------- state and errors


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = get_state_dict(model, optimizer)
    return dict(zip(("model", "optimizer"), found, strict=True))


def run_writing(rank: int, folder: str) -> dict[str, Tensor]:
    pair = hybrid_pair(rank, "uneven", 3, "none")
    for given in batches(rank, 2):
        pair.step(pair.model, pair.optimizer, *given)
    dcp.save(states(pair.model, pair.optimizer), checkpoint_id=folder)
    found = pair.step.full_state_dict()
    with pair.step.full_parameters():
        for name, value in pair.model.state_dict().items():
            same(found[name], value, name)
    pair.model.load_state_dict(found)
    return found


def run_reading(rank: int, folder: str, hybrid: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Uneven()
    optimizer = adamw(model.parameters())
    options = groups(rank) if hybrid else {}
    step = graphopt.compile(train_step, parallel=graphopt.ZeRO(stage=3, **options), pipeline="none")
    given = next(batches(rank, 1))
    step(model, optimizer, *given)
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    found = step.full_state_dict()
    step(model, optimizer, *given)  # goes on
    return found


def test_a_checkpoint_is_read_as_hybrid_and_on_two_ranks(
    four_ranks: Pool, two_ranks: Pool, tmp_path: Path
) -> None:
    wanted = four_ranks.run(run_writing, str(tmp_path))[0]
    for ranks, hybrid in ((four_ranks, True), (two_ranks, False)):
        for found in ranks.run(run_reading, str(tmp_path), hybrid):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                same(found[name], value, name)


def run_wrong_groups(rank: int) -> list[str]:
    own = groups(rank)
    said = []
    for options in (
        {"group": own["group"], "replicate_over": own["group"]},
        {"replicate_over": own["group"]},
    ):
        with pytest.raises(graphopt.ParallelismError) as caught:
            graphopt.compile(train_step, parallel=graphopt.ZeRO(stage=3, **options))
        said.append(str(caught.value))
    return said


def test_groups_that_span_no_mesh(four_ranks: Pool) -> None:
    for said in four_ranks.run(run_wrong_groups):
        assert all("no column and row of one mesh" in each and "hint" in each for each in said)


def run_other_meshes(rank: int) -> tuple[str, float]:
    """One rank has the groups the other way round."""
    own = groups(rank)
    if rank == 1:
        own = {"group": own["replicate_over"], "replicate_over": own["group"]}
    pair = Beside(Uneven, adamw, stage=3, timeout=20.0, **own)
    start = time.monotonic()
    with pytest.raises(graphopt.SpmdMismatchError) as caught:
        pair.step(pair.model, pair.optimizer, *next(batches(rank, 1)))
    return str(caught.value), time.monotonic() - start


def test_ranks_with_other_meshes(four_ranks: Pool) -> None:
    for said, seconds in four_ranks.run(run_other_meshes):
        assert "other groups to shard" in said
        assert seconds < 30


def test_meshes_of_ranks() -> None:
    assert rank_mesh([2, 3], [0, 2, 4]) == ((0, 1), (2, 3), (4, 5))
    for along, across in (([0, 1], [0, 1]), ([0, 1], [2, 3]), ([0, 1], [0]), ([0, 1, 2], [0, 1])):
        assert rank_mesh(along, across) is None
