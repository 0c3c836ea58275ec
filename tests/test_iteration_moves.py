"""Updates that wait for the next iteration: which move, where to, and that nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

import graphopt
from graphopt.graph_utils import find_all_descendants, is_collective, is_list_operator, is_wait
from graphopt.iter_graph import IterGraphModule
from graphopt.passes import iter_move_grads_and_optimizers
from graphopt.testing import check_pass
from sketch import Sketch, one_rank, targets
from steps import clip_norm
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten

FUSED = "remove_copy_from_optimizer -> comm_fusion_with_concat(bucket_size_mb=1e-4)"
DEFAULT = f"{FUSED} -> schedule_comm_wait -> iter_move_grads_and_optimizers"


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def drawn(
    *, returned: bool = False, reads_first: int = 0, averaged_input: bool = False
) -> IterGraphModule:
    """Two layers, each ``h = h * w``, updated by ``w += average of h.sum() * ones``."""
    s = Sketch()
    x = s.input("x", 4, kind="user_input")
    if averaged_input:
        x = s.wait(s.average(x))
    weights = [s.input(f"w{i}", 4, kind="parameter") for i in range(2)]
    h = x
    for weight in (weights[reads_first], weights[1 - reads_first]):
        h = s.call(aten.mul.Tensor, h, weight)
    launches = [s.average(s.call(aten.add.Tensor, h, float(i))) for i in (1, 0)]
    updates = []
    for weight, launch in zip((weights[1], weights[0]), launches, strict=True):
        gradient = s.wait(launch)
        new = s.call(aten.add.Tensor, weight, gradient)
        new.meta["phase"] = gradient.meta["phase"] = "optimizer"
        updates.append(s.call(aten.copy_.default, weight, new))
        updates[-1].meta["phase"] = "optimizer"
        launch.meta["phase"] = "communication"
    gm = s.step([h, gradient] if returned else [h], updates)
    return IterGraphModule(gm)


def moved(gm: IterGraphModule) -> dict[str, str]:
    """Late state updates by what they update, with their destinations."""
    late = gm.graph.late
    return {
        str(node.args[0]): late[node].name for node in late if node.target is aten.copy_.default
    }


def applied(gm: IterGraphModule, **options: Any) -> IterGraphModule:
    graphopt.PassManager(
        ["remove_copy_from_optimizer", (iter_move_grads_and_optimizers, options)]
    ).run(gm)
    return gm


def test_each_goes_before_its_first_read() -> None:
    # w1 is read first, and its bucket is launched first; w0's may wait for the second layer.
    gm = applied(drawn(reads_first=1))
    assert moved(gm) == {"w1": "mul_tensor", "w0": "mul_tensor_1"}
    update = ["wait_tensor", "add", "copy_"]
    rest = ["add", "mul", "all_reduce", "add", "mul", "all_reduce"]
    assert targets(gm.setup_gm) == ["mul", "mul", *rest]
    assert targets(gm.main_gm) == [*update, "mul", *update, "mul", *rest]
    assert targets(gm.drain_gm) == [*update, *update]


def test_work_that_is_ready_does_not_wait_behind_a_later_bucket() -> None:
    # w0 is read first, but its bucket is launched last: w1's update, ready before it, goes ahead.
    gm = applied(drawn(reads_first=0))
    assert moved(gm) == {"w1": "mul_tensor", "w0": "mul_tensor"}
    copies = [n for n in gm.main_gm.graph.nodes if n.target is aten.copy_.default]
    assert [str(copy.args[0]) for copy in copies] == ["w1", "w0"]


def test_what_is_returned_stays_with_all_launched_before_it() -> None:
    gm = applied(drawn(returned=True))
    assert not gm.graph.late


def test_a_destination_for_all() -> None:
    gm = drawn(reads_first=1)
    applied(gm, target_dest_node="mul_tensor")
    assert set(moved(gm).values()) == {"mul_tensor"}


def test_one_collective_with_all_that_follows() -> None:
    gm = drawn(reads_first=1)
    name = next(node.name for node in gm.graph.nodes if is_collective(node))
    applied(gm, target_comm_node=name)
    assert moved(gm) == {"w1": "mul_tensor"}
    assert gm.flush_communicates
    assert targets(gm.main_gm)[:4] == ["all_reduce", "wait_tensor", "add", "copy_"]


def test_a_moved_collective_runs_one_step_late() -> None:
    gm = drawn(reads_first=1)
    name = next(node.name for node in gm.graph.nodes if is_collective(node))
    applied(gm, target_comm_node=name)
    counted = [0]

    def count(graph_module: fx.GraphModule) -> fx.GraphModule:
        def one_more(value: Tensor) -> Tensor:
            counted[0] += 1
            return value

        late = [n for n in graph_module.graph.nodes if is_collective(n) and "late_group" in n.meta]
        for node in late:
            with graph_module.graph.inserting_before(node):
                node.update_arg(0, graph_module.graph.call_function(one_more, (node.args[0],)))
        return graph_module

    gm.finalize_setup(count)
    values = [torch.ones(4) for _ in range(3)]
    seen = []
    for _ in range(4):
        gm(*values)
        seen.append(counted[0])
    gm.flush()
    assert [*seen, counted[0]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_comm_node": "all_reduce_7"}, "no node named 'all_reduce_7'"),
        ({"target_dest_node": "nothing"}, "no node named 'nothing'"),
        ({"target_comm_node": "mul_tensor"}, "is not a collective"),
        ({"target_dest_node": "mul_tensor_1"}, "reads %w1 before"),
    ],
)
def test_refused(options: dict[str, str], message: str) -> None:
    gm = drawn(reads_first=1)
    before = str(gm.graph)
    with pytest.raises(graphopt.IterationError, match=message):
        applied(gm, **options)
    assert str(gm.graph) == before and not gm.graph.late


def test_only_graphs_with_iterations() -> None:
    plain = fx.GraphModule(nn.Module(), drawn().graph)
    with pytest.raises(graphopt.IterationError, match="IterGraphModule"):
        graphopt.PassManager(["remove_copy_from_optimizer", iter_move_grads_and_optimizers]).run(
            plain
        )


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "sgd-momentum-loop"])
def test_same_bits(optimizer: str) -> None:
    """Three iterations and a flush, beside three of the untouched graph; a second run is idle."""
    gm, args = _captured(optimizer, train_step)
    graphopt.PassManager(FUSED).run(gm)
    check_pass(gm, args, iter_move_grads_and_optimizers)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "sgd-momentum-loop"])
def test_same_bits_with_gradients_held_back(optimizer: str) -> None:
    gm, args = _captured(optimizer, train_step)
    graphopt.PassManager(FUSED).run(gm)
    check_pass(gm, args, iter_move_grads_and_optimizers, held_back=0.5)


def test_held_back_launches_stand_behind_the_others() -> None:
    """Gradients are made from the last layer to the first; those held back go out the other way."""
    orders = []
    for share in (0.0, 0.5):
        gm = _layers()
        pipeline = f"{FUSED} -> schedule_comm_wait -> iter_move_grads_and_optimizers"
        graphopt.PassManager(f"{pipeline}(held_back={share})").run(gm)
        orders.append(_layers_in_launch_order(gm))
    assert orders == [[5, 4, 3, 2, 1, 0], [4, 2, 0, 1, 3, 5]]
    # What is held back is waited for where it is read; the rest before all that comes after it.
    places = {_layer_of(node): place for node, place in gm.graph.late.items() if _is_update(node)}
    assert len({places[layer] for layer in (4, 2, 0)}) == 1
    assert len(set(places.values())) == 4


@pytest.mark.parametrize("forward_waits", [False, True])
def test_nothing_is_held_back_where_the_forward_waits_for_its_group(forward_waits: bool) -> None:
    """A collective of the forward would stand behind all that is held back."""
    gm = drawn(reads_first=1, averaged_input=forward_waits)
    before = [node.name for node in gm.graph.nodes if is_collective(node)]
    applied(gm, held_back=0.5)
    after = [node.name for node in gm.graph.nodes if is_collective(node)]
    assert gm.graph.late
    assert (after == before) == forward_waits


def _layers() -> IterGraphModule:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    optimizer = OPTIMIZERS["sgd-momentum-loop"](model.parameters())
    args = (model, optimizer, torch.randn(4, 8), torch.tensor([3, 5, 1, 0]))
    train_step(*args)
    found = graphopt.capture(train_step, *args, parallel=graphopt.DataParallel())
    return IterGraphModule(found.graph_module)


def _layers_in_launch_order(gm: IterGraphModule) -> list[int]:
    """Which layer's gradient each launch sends, by the parameter that its update writes."""
    found = []
    for launch in filter(is_collective, gm.graph.nodes):
        reached = find_all_descendants([launch])
        found += [
            _layer_of(node) for node in gm.graph.nodes if node in reached and _is_update(node)
        ]
    return found


def _is_update(node: fx.Node) -> bool:
    return node.target is aten.copy_.default and node.args[0].meta["kind"] == "parameter"


def _layer_of(node: fx.Node) -> int:
    return int(str(node.args[0].meta["fqn"]).split(".")[0])


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, True, "0.3", None, float("nan")])
def test_bad_share(share: Any) -> None:
    gm = drawn(reads_first=1)
    before = str(gm.graph)
    with pytest.raises(graphopt.GraphOptError, match="held_back"):
        applied(gm, held_back=share)
    assert str(gm.graph) == before and not gm.graph.late


def _captured(optimizer: str, step: Any) -> tuple[IterGraphModule, list[Tensor]]:
    from graphopt.tracing.call import Call

    model = MODELS["mlp"].make()
    trained: Optimizer = OPTIMIZERS[optimizer](model.parameters())
    args = (model, trained, *MODELS["mlp"].batch(0))
    step(*args)
    found = graphopt.capture(step, *args, parallel=graphopt.DataParallel())
    values = found.live.live_values(Call(step, args, {}))
    return IterGraphModule(found.graph_module), [v.detach().clone() for v in values]


def test_buckets_with_one_update_move_together() -> None:
    """Clipping by the norm of all gradients ties them: all waits, then one update."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    gm, _ = _captured("adamw-fused", step)
    graphopt.PassManager(DEFAULT).run(gm)
    waits = [node for node in gm.graph.nodes if is_wait(node)]
    assert len(waits) > 1 and all(map(gm.graph.is_late, waits))
    assert len(set(gm.graph.late.values())) == 1
    held, _ = _captured("adamw-fused", step)
    graphopt.PassManager(f"{DEFAULT}(held_back=0.5)").run(held)
    assert targets(held) == targets(gm)


def test_a_norm_that_is_returned_needs_all_gradients_now() -> None:
    gm, _ = _captured("adamw-fused", clip_norm)
    graphopt.PassManager(DEFAULT).run(gm)
    assert not gm.graph.late


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "sgd-fused"])
def test_a_list_is_divided_between_waits_alone(optimizer: str) -> None:
    """Of each call as many parts as buckets, each behind the wait of its own."""
    gm, _ = _captured(optimizer, train_step)
    whole = [node.target for node in gm.graph.nodes if is_list_operator(node)]
    graphopt.PassManager(DEFAULT).run(gm)
    buckets = len(list(filter(is_collective, gm.graph.nodes)))
    since: list[list[object]] = []
    for node in gm.graph.nodes:
        if is_wait(node):
            since.append([])
        elif is_list_operator(node):
            since[-1].append(node.target)
    assert buckets > 1 and since == [whole] * buckets


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "sgd-fused"])
def test_one_bucket_divides_nothing(optimizer: str) -> None:
    gm, _ = _captured(optimizer, train_step)
    whole = [node for node in gm.graph.nodes if is_list_operator(node)]
    graphopt.PassManager(DEFAULT.replace("1e-4", "25")).run(gm)
    assert [node for node in gm.graph.nodes if is_list_operator(node)] == whole
    assert all(map(gm.graph.is_late, whole))


def test_gradients_that_stay_keep_their_updates() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    gm, _ = _captured("adamw-fused", step)
    graphopt.PassManager(DEFAULT).run(gm)
    assert not gm.graph.late


def test_a_returned_parameter_is_updated_at_once() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        return train_step(model, optimizer, x, y), model.head.weight

    gm, _ = _captured("adamw-fused", step)
    graphopt.PassManager(DEFAULT).run(gm)
    late = {str(node.args[0]) for node in gm.graph.late if node.target is aten.copy_.default}
    assert "head_weight" not in late
