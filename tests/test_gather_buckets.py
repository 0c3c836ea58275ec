"""Buckets of all-gathers and reduce-scatters: which may be, what they give, which are chosen."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import graphopt
from graphopt.cost import NETWORKS, Collective, CollectiveTable, CostModel, Transfer, collective_of
from graphopt.cost.collectives import in_one_call
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_collective, tensors_in
from graphopt.replicas.lockstep import Lockstep
from graphopt.schedule import Schedule, ScheduleError, apply_schedule, overlap_schedule, simulate
from graphopt.schedule.bucketing import bucket_kind
from graphopt.schedule.constraints import predecessors
from sketch import Sketch, c10d
from slices import examples

aten = torch.ops.aten

SIZE = 2
GROUPS = {"0": [0, 1], "other": [0, 1]}


def seconds_of(latency: float) -> CostModel:
    """Each collective takes so long to start, and small tensors next to nothing."""

    def asked(collective: Collective) -> Transfer:
        return NETWORKS["infiniband"](collective)._replace(latency=latency, overhead=0.0)

    return CostModel(lambda node: 1e-6, asked)


SLOW_START, AT_ONCE = seconds_of(1e-3), seconds_of(0.0)


def gather(s: Sketch, x: fx.Node, group: str = "0") -> fx.Node:
    return s.wait(s.call(c10d.all_gather_into_tensor.default, x, SIZE, group))


def scatter(s: Sketch, x: fx.Node, how: str = "sum", group: str = "0") -> fx.Node:
    return s.wait(s.call(c10d.reduce_scatter_tensor.default, x, how, SIZE, group))


def sharded(shapes: Sequence[tuple[int, int]], group: Callable[[int], str]) -> fx.GraphModule:
    """A chain of products with gathered matrices, whose gradients are scattered and subtracted from
    the shards in place, each right where it is made; matrices are gathered again for that."""
    s = Sketch()
    shards = [s.input(f"w{i}", rows, columns) for i, (rows, columns) in enumerate(shapes)]
    x = s.input("x", 4)
    saved = []
    for i, shard in enumerate(shards):
        rows, columns = shard.meta["val"].shape
        wide = s.call(aten.expand.default, s.call(aten.sum.default, x), [columns])
        saved.append(wide)
        x = s.call(aten.tanh.default, s.call(aten.mv.default, gather(s, shard, group(i)), wide))
    gradient = s.call(aten.sum.default, x)
    updates = []
    for i, shard in reversed(list(enumerate(shards))):
        rows = SIZE * shard.meta["val"].shape[0]
        out = s.call(aten.expand.default, gradient, [rows])
        matrix = s.call(
            aten.mul.Tensor,
            s.call(aten.unsqueeze.default, out, 1),
            s.call(aten.unsqueeze.default, saved[i], 0),
        )
        back = s.call(aten.mv.default, s.call(aten.t.default, gather(s, shard, group(i))), out)
        gradient = s.call(aten.sum.default, back)
        step = s.call(aten.mul.Tensor, scatter(s, matrix, group=group(i)), 0.1)
        new = s.call(aten.sub.Tensor, shard, step)
        updates.append(s.call(aten.copy_.default, shard, new))
    return s.step([x], updates)


def same_group(index: int) -> str:
    return "0"


def two_groups(index: int) -> str:
    return ("0", "other")[index % 2]


def values(gm: fx.GraphModule, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return [torch.randn(value.shape, generator=generator) for value in inputs]


def ran(gm: fx.GraphModule) -> list[list[Tensor]]:
    """What is returned and what is left in the inputs, on each rank."""
    inputs = [values(gm, rank) for rank in range(SIZE)]
    returned = Lockstep(SIZE, GROUPS).run(gm, [list(given) for given in inputs])
    return [[*results, *given] for (results, _, _), given in zip(returned, inputs, strict=True)]


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(x, y)
        for xs, ys in zip(one, other, strict=True)
        for x, y in zip(xs, ys, strict=True)
    )


def rewritten(gm: fx.GraphModule, schedule: Schedule | None) -> fx.GraphModule:
    """A copy that is applied to; the schedule is of `gm`."""
    made = copy.deepcopy(gm)
    if schedule is not None:
        twin = dict(zip(gm.graph.nodes, list(made.graph.nodes), strict=True))
        buckets = tuple(tuple(twin[node] for node in bucket) for bucket in schedule.buckets)
        apply_schedule(made.graph, Schedule(tuple(twin[n] for n in schedule.order), buckets))
    made.graph.lint()
    made.recompile()
    return made


def members(gm: fx.GraphModule, name: str) -> list[int]:
    """How many tensors each bucket of a kind sends."""
    launches = find_nodes(gm.graph, is_collective)
    return [len(n.args[0]) for n in launches if f"{name}_coalesced" in str(n.target)]


def check_the_same(before: fx.GraphModule, after: fx.GraphModule) -> None:
    graphopt.verify.check_dependencies(before, after).raise_for_failure()
    report = graphopt.verify.check_equivalence(before, after)
    assert report.ok, str(report)
    assert not report.reorders_sums or members(after, "reduce_scatter_tensor")
    assert same(ran(before), ran(after))


@settings(max_examples=examples(12), deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=2, max_size=5),
    group=st.sampled_from([same_group, two_groups]),
    roomy=st.booleans(),
)
def test_any_step_that_is_sharded(
    shapes: list[tuple[int, int]], group: Callable[[int], str], roomy: bool
) -> None:
    """Of uneven shards; every schedule is legal, bitwise, faster, and within its memory."""
    gm = sharded(shapes, group)
    given_step = simulate(gm, SLOW_START, SIZE)
    room = 2**20 if roomy else given_step.peak_bytes
    schedule = overlap_schedule(gm.graph, SLOW_START, SIZE, max_bytes=room)
    if schedule is None:
        assert not roomy
        return
    after = rewritten(gm, schedule)
    found = simulate(after, SLOW_START, SIZE)
    assert found.step_seconds < given_step.step_seconds
    assert found.peak_bytes <= room
    if roomy and group is same_group:
        assert members(after, "all_gather_into_tensor")
    check_the_same(gm, after)


def test_buckets_are_chosen_where_they_gain() -> None:
    """What starts slowly is put together; what starts at once is not."""
    gm = sharded([(2, 3), (1, 4), (3, 3), (2, 2)], same_group)
    slow = overlap_schedule(gm.graph, SLOW_START, SIZE, max_bytes=2**20)
    assert slow is not None and slow.buckets
    assert slow == overlap_schedule(gm.graph, SLOW_START, SIZE, max_bytes=2**20)
    alone = overlap_schedule(gm.graph, SLOW_START, SIZE, max_bytes=2**20, buckets=False)
    assert alone is None or not alone.buckets
    ordered, joined = (simulate(rewritten(gm, s), SLOW_START, SIZE) for s in (alone, slow))
    assert joined.step_seconds < ordered.step_seconds
    quick = overlap_schedule(gm.graph, AT_ONCE, SIZE, max_bytes=2**20)
    assert quick is None or not quick.buckets


def test_gloo_scatters_one_tensor_after_another() -> None:
    """Joined or not, that starts as often: it gains nothing, and is not done."""
    gm = sharded([(2, 3), (1, 4), (3, 3)], same_group)
    gloo = CostModel(lambda node: 1e-6, NETWORKS["ethernet"])
    schedule = overlap_schedule(gm.graph, gloo, SIZE, max_bytes=2**20)
    after = rewritten(gm, schedule)
    assert members(after, "all_gather_into_tensor")
    assert not members(after, "reduce_scatter_tensor")


def buckets_of_all(graph: fx.Graph, kind: str) -> Schedule:
    """All launches of a kind, which need only inputs, at the begin: in buckets of what is alike."""
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    by_kind: dict[object, list[fx.Node]] = {}
    for node in find_nodes(graph, is_collective):
        if kind in str(node.target):
            by_kind.setdefault(bucket_kind(node), []).append(node)
    buckets = tuple(tuple(bucket) for bucket in by_kind.values() if len(bucket) > 1)
    launches = [node for bucket in by_kind.values() for node in bucket]
    rest = [node for node in nodes if node not in {*inputs, *launches}]
    return Schedule((*inputs, *launches, *rest), buckets)


def several(collective: Callable[..., fx.Node], *options: dict[str, object]) -> fx.GraphModule:
    """One collective of an input each, read twice."""
    s = Sketch()
    inputs = [
        s.input(f"x{i}", 2 * (i + 1), 3, dtype=option.pop("dtype", torch.float32))
        for i, option in enumerate(map(dict, options))
    ]
    options = tuple({k: v for k, v in option.items() if k != "dtype"} for option in options)
    arrived = [collective(s, x, **option) for x, option in zip(inputs, options, strict=True)]
    return s.step([s.call(aten.neg.default, y) for y in arrived])


DOUBLE = {"dtype": torch.float64}
OTHER = {"group": "other"}


@pytest.mark.parametrize(
    ("collective", "options", "expected"),
    [
        (gather, [{}, {}, {}], [3]),
        (gather, [{}, OTHER, {}, OTHER], [2, 2]),
        (gather, [{}, DOUBLE, {}, DOUBLE], [2, 2]),
        (gather, [{}, OTHER], []),
        (scatter, [{}, {}], [2]),
        (scatter, [{}, {"how": "max"}, {}, {"how": "max"}], [2, 2]),
        (scatter, [{}, {"how": "max"}, DOUBLE, OTHER], []),
    ],
)
def test_what_differs_does_not_mix(
    collective: Callable[..., fx.Node], options: list[dict[str, object]], expected: list[int]
) -> None:
    before = several(collective, *options)
    kind = "all_gather_into_tensor" if collective is gather else "reduce_scatter_tensor"
    schedule = buckets_of_all(before.graph, kind)
    schedule.check(predecessors(before.graph))
    after = rewritten(before, schedule)
    assert members(after, kind) == expected
    check_the_same(before, after)


def test_what_is_no_bucket() -> None:
    """Dynamic sizes, results without a wait of their own, other collectives."""
    s = Sketch()
    x, empty = s.input("x", 2, 3), s.input("empty", 0, 3)
    launch = s.call(c10d.all_gather_into_tensor.default, x, SIZE, "0")
    waits = [s.wait(launch), s.wait(launch)]
    none = s.call(c10d.all_gather_into_tensor.default, empty, SIZE, "0")
    reduced = s.all_reduce(x)
    turned = s.call(c10d.all_gather_into_tensor.default, s.call(aten.t.default, x), SIZE, "0")
    ends = [s.wait(node) for node in (none, reduced, turned)]
    s.step([*waits, *ends])
    for node in (launch, none, reduced, turned, x):
        assert bucket_kind(node) is None


def test_wrong_buckets_are_refused_before_anything_changes() -> None:
    gm = several(gather, {}, {}, OTHER)
    first, second, other = find_nodes(gm.graph, is_collective)
    nodes = tuple(gm.graph.nodes)
    text = str(gm.graph)
    together = buckets_of_all(gm.graph, "all_gather").order
    wrong = [
        (together, ((first,),), "at least two"),
        (together, ((first, second, other),), "cannot go into one"),
        (together, ((second, first),), "right behind"),
        (together, ((first, second), (first, second)), "in two buckets"),
        (nodes, ((first, second),), "right behind"),
    ]
    for order, buckets, match in wrong:
        with pytest.raises(ScheduleError, match=match):
            apply_schedule(gm.graph, Schedule(order, buckets))
    assert str(gm.graph) == text


def test_one_launch_of_a_bucket_may_not_need_another() -> None:
    s = Sketch()
    x = s.input("x", 2, 3)
    gm = s.step([gather(s, gather(s, x))])
    first, second = find_nodes(gm.graph, is_collective)
    nodes = [node for node in gm.graph.nodes if node is not second]
    nodes.insert(nodes.index(first) + 1, second)
    with pytest.raises(ScheduleError, match="needs"):
        Schedule(tuple(nodes), ((first, second),)).check(predecessors(gm.graph))
    chosen = overlap_schedule(gm.graph, SLOW_START, SIZE, max_bytes=2**20)
    assert chosen is None or not chosen.buckets


# Buckets that are made wrongly


def items_exchanged(launch: fx.Node, items: list[fx.Node]) -> None:
    for item, index in zip(items, (1, 0), strict=True):
        item.args = (launch, index)


def one_sent_twice(launch: fx.Node, items: list[fx.Node]) -> None:
    first = launch.args[0][0]
    launch.args = ([first, first], *launch.args[1:])


def another_group(launch: fx.Node, items: list[fx.Node]) -> None:
    launch.args = (*launch.args[:-1], "other")


def another_reduction(launch: fx.Node, items: list[fx.Node]) -> None:
    launch.args = (launch.args[0], "max", *launch.args[2:])


def one_read_of_both(launch: fx.Node, items: list[fx.Node]) -> None:
    items[1].args = (launch, 0)


def read_before_it_has_arrived(launch: fx.Node, items: list[fx.Node]) -> None:
    (wait,) = items[0].users
    wait.replace_all_uses_with(items[0])


EITHER = [
    items_exchanged,
    one_sent_twice,
    another_group,
    one_read_of_both,
    read_before_it_has_arrived,
]


@pytest.mark.parametrize(
    ("collective", "spoil"),
    [*itertools.product([gather, scatter], EITHER), (scatter, another_reduction)],
)
def test_wrong_rewrites_are_refused(
    collective: Callable[..., fx.Node], spoil: Callable[[fx.Node, list[fx.Node]], None]
) -> None:
    s = Sketch()
    given_inputs = [s.input(f"x{i}", 2, 3) for i in range(2)]
    before = s.step([s.call(aten.neg.default, collective(s, x)) for x in given_inputs])
    kind = "all_gather_into_tensor" if collective is gather else "reduce_scatter_tensor"
    after = rewritten(before, buckets_of_all(before.graph, kind))
    check_the_same(before, after)
    (launch,) = find_nodes(after.graph, is_collective)
    spoil(launch, [node for node in after.graph.nodes if node.target is operator.getitem])
    after.recompile()
    checks = (graphopt.verify.check_dependencies, graphopt.verify.check_equivalence)
    assert not all(check(before, after).ok for check in checks)


def test_what_is_sent_may_not_be_overwritten_before_the_bucket_has_arrived() -> None:
    """Also where only another member has been waited for; orders of the new graph know it, too."""
    gm = sharded([(2, 3), (1, 4), (3, 3)], same_group)
    after = rewritten(gm, overlap_schedule(gm.graph, SLOW_START, SIZE, max_bytes=2**20))
    (first, *_) = [n for n in find_nodes(after.graph, is_collective) if len(n.all_input_nodes) > 1]
    before = predecessors(after.graph)
    for shard in first.all_input_nodes:
        writes = [user for user in shard.users if user.target is aten.copy_.default]
        waits = [wait for item in first.users for wait in item.users]
        assert all(set(waits) <= set(before[write]) for write in writes)


def test_metadata_is_fresh_and_parameters_are_named() -> None:
    gm = several(gather, {}, {})
    for index, launch in enumerate(find_nodes(gm.graph, is_collective)):
        launch.meta["sends"] = (f"p{index}",)
    after = rewritten(gm, buckets_of_all(gm.graph, "all_gather"))
    (launch,) = find_nodes(after.graph, is_collective)
    assert launch.meta["sends"] == ("p0", "p1")
    assert [tuple(value.shape) for value in launch.meta["val"]] == [(4, 3), (8, 3)]
    for node in after.graph.nodes:
        if node.op == "call_function":
            with after.graph.inserting_before(after.graph.output_node()):
                anew = call_function_with_meta(after.graph, node.target, node.args, node.kwargs)
            assert layouts(anew) == layouts(node)
            after.graph.erase_node(anew)


def layouts(node: fx.Node) -> list[tuple[object, ...]]:
    return [(t.shape, t.stride(), t.dtype) for t in tensors_in(node.meta["val"])]


def test_costs_of_a_bucket() -> None:
    """Known by the points of single collectives, on a device where one call starts once."""
    gm = several(gather, {}, {})
    after = rewritten(gm, buckets_of_all(gm.graph, "all_gather"))
    points = {("all_gather_into_tensor", 2): ((100, 1.0), (200, 2.0))}
    model = CostModel(lambda node: 0.0, CollectiveTable(points))
    (joined,) = find_nodes(after.graph, is_collective)
    assert model.transfer(joined).seconds == pytest.approx(1.44)  # 48 + 96 bytes
    assert collective_of(joined, SIZE) == in_one_call(collectives(gm))
    gloo = CostModel(lambda node: 0.0, NETWORKS["ethernet"])
    sent = collectives(several(scatter, {}, {}))
    for costs, starts in ((gloo, 2), (SLOW_START, 1)):
        (each,) = {costs.transfer_of(collective).latency for collective in sent}
        together = costs.transfer_of(in_one_call(sent))
        assert together.latency == pytest.approx(starts * each)
        transfers = [costs.transfer_of(collective).transfer for collective in sent]
        assert together.transfer == pytest.approx(sum(transfers))


def collectives(gm: fx.GraphModule) -> list[Collective]:
    return [collective_of(launch, SIZE) for launch in find_nodes(gm.graph, is_collective)]


def test_what_a_network_does_with_several_tensors_is_saved(tmp_path: Path) -> None:
    for name, singly in (("ethernet", True), ("infiniband", False)):
        CostModel.preset("cpu", name).save(tmp_path / name)
        assert CostModel.load(tmp_path / name).communication == NETWORKS[name]
        assert NETWORKS[name].scatters_singly == singly
