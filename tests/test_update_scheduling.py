"""Updates right behind their gradients: which move, where to, and that nothing changes."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from graphopt.executable import finalize
from graphopt.graph_utils import find_all_descendants, is_operator, written
from graphopt.ir.operators import fused_optimizer, is_list_operator
from graphopt.iter_graph import IterGraphModule
from graphopt.passes import schedule_updates
from graphopt.testing import check_pass
from optim_cases import Sheet, assert_same_run, called, duplicate
from sketch import one_rank
from steps import clip_norm, gradients, the_weight, two_microbatches, zero_not_none
from twins import Twins, world
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten

EVERY = "schedule_updates(larger_than_mb=0)"
OTHER_STEPS = [clip_norm, gradients, the_weight, two_microbatches, zero_not_none]
KINDS = ["adamw", "adamw-amsgrad", "adagrad", "sgd-nesterov"]
ONE_CALL = ["sgd-fused", "sgd-foreach", "sgd-momentum-fused"]
SOME = [f"{kind}-{how}" for kind in KINDS for how in ("fused", "foreach")]


class Chain(nn.Module):
    """Four large layers with small biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def captured(optimizer: str = "adamw-fused", steps: int = 1) -> fx.GraphModule:
    """The step of a `Chain` whose optimizer has taken some steps."""
    model = Chain()
    made = OPTIMIZERS[optimizer](model.parameters())
    batch = torch.randn(2, 256), torch.tensor([3, 5])
    for _ in range(steps):
        train_step(model, made, *batch)
    return graphopt.capture(train_step, model, made, *batch).graph_module


def fused_updates(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if fused_optimizer(node.target) is not None]


@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-momentum-foreach", "adamw-foreach"])
@pytest.mark.parametrize("model", ["mlp", "gpt", "shared-storage"])
def test_one_step(model: str, optimizer: str) -> None:
    case = MODELS[model]
    torch.manual_seed(0)
    made = case.make()
    optim = OPTIMIZERS[optimizer](made.parameters())
    train_step(made, optim, *case.batch(0))
    check_pass(train_step, (made, optim, *case.batch(1)), schedule_updates, larger_than_mb=0)


@pytest.mark.parametrize("optimizer", [*SOME, "adadelta-foreach", "nadam-loop"])
def test_training(optimizer: str) -> None:
    twins = Twins(lambda: world(train_step, "mlp", optimizer), pipeline=EVERY)
    for index in range(3):
        twins.step(*MODELS["mlp"].batch(index))
    twins.finish()


@pytest.mark.parametrize("model", ["convnet", "gpt", "recurrent", "reused", "shared-storage"])
def test_models(model: str) -> None:
    twins = Twins(lambda: world(train_step, model, "adamw-fused"), pipeline=EVERY)
    for index in range(3):
        twins.step(*MODELS[model].batch(index))
    twins.finish()


@pytest.mark.parametrize("step", OTHER_STEPS, ids=lambda step: step.__name__)
def test_other_steps(step: graphopt.TrainStep) -> None:
    twins = Twins(lambda: world(step, "mlp", "adamw-fused"), pipeline=EVERY)
    for index in range(3):
        twins.step(*MODELS["mlp"].batch(index))
    twins.finish()


def test_large_parameters_are_updated_behind_their_gradients() -> None:
    gm = captured()
    (whole,) = fused_updates(gm)
    assert len(whole.args[0]) == 8
    assert schedule_updates(gm, larger_than_mb=0.1).changes == 4
    *large, small = fused_updates(gm)
    assert [len(node.args[0]) for node in large] == [1, 1, 1, 1]
    assert [state.meta["val"].dim() for state in small.args[0]] == [1, 1, 1, 1]
    order = list(gm.graph.nodes)
    products = [n for n in order if is_operator(n.target, "aten::mm")]
    for node, following in itertools.pairwise(large):
        (gradient,) = node.args[1]
        assert order.index(gradient) < order.index(node)
        assert any(order.index(node) < order.index(p) < order.index(following) for p in products)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-momentum-fused", "adamw-foreach"])
def test_parameters_are_updated_in_place(optimizer: str) -> None:
    gm = captured(optimizer)
    before = copies(finalize(gm))
    moved = 3 if optimizer in ONE_CALL else 4  # behind the last gradient stands that one call
    assert schedule_updates(gm, larger_than_mb=0.1).changes == moved
    assert copies(finalize(gm)) == before


def copies(gm: fx.GraphModule) -> int:
    return sum(is_operator(n.target, "aten::clone", "aten::copy_") for n in gm.graph.nodes)


def test_no_update_before_the_last_read_of_its_parameter() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = sum(parameter.detach().norm() for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return norm

    model = Chain()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    batch = torch.randn(2, 256), torch.tensor([3, 5])
    check_pass(step, (model, optimizer, *batch), schedule_updates, larger_than_mb=0.1)
    gm = graphopt.capture(step, model, optimizer, *batch).graph_module
    schedule_updates(gm, larger_than_mb=0.1)
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    norms = [n for n in order if is_operator(n.target, "aten::linalg_vector_norm")]
    assert len(norms) == 8
    for update in fused_updates(gm):
        for norm in norms:
            if norm.args[0] in update.args[0]:
                assert order[norm] < order[update]


def test_clipping_by_the_norm_of_all_comes_first() -> None:
    model = Chain()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    batch = torch.randn(2, 256), torch.tensor([3, 5])
    gm = graphopt.capture(clip_norm, model, optimizer, *batch).graph_module
    schedule_updates(gm, larger_than_mb=0.1)
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    norms = [order[n] for n in order if is_operator(n.target, "aten::linalg_vector_norm")]
    assert min(order[update] for update in fused_updates(gm)) > max(norms)


def test_a_step_that_communicates_stays() -> None:
    with one_rank():
        model = Chain()
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        batch = torch.randn(2, 256), torch.tensor([3, 5])
        parallel = graphopt.DataParallel()
        step = graphopt.capture(train_step, model, optimizer, *batch, parallel=parallel)
        before = [node.name for node in step.graph_module.graph.nodes]
        assert schedule_updates(step.graph_module, larger_than_mb=0).changes == 0
        assert [node.name for node in step.graph_module.graph.nodes] == before


def test_peak_memory_falls_by_the_gradients() -> None:
    """A gradient lives until its update, and no longer."""

    def alive(gm: fx.GraphModule) -> int:
        graph = finalize(gm).graph
        wanted = {g for node in fused_in_place(graph) for g in node.args[1]}
        living: set[fx.Node] = set()
        most = 0
        for node in graph.nodes:
            living |= wanted & {node}
            most = max(most, sum(n.meta["val"].nbytes for n in living))
            living -= {g for g in living if max(g.users) <= node}
        return most

    gm = captured()
    late = alive(gm)
    schedule_updates(gm, larger_than_mb=0.1)
    assert alive(gm) < late / 2


def fused_in_place(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if fused_optimizer(n.target) is not None and written(n)]


def test_in_the_default_pipeline() -> None:
    model = nn.Sequential(nn.Linear(256, 2304), nn.Linear(2304, 256), nn.Linear(256, 256))
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    step = graphopt.compile(train_step)
    step(model, optimizer, torch.randn(2, 256), torch.tensor([3, 5]))
    assert isinstance(step.graph_module, IterGraphModule)
    assert [r.name for r in step.report if not r.stage][-1] == "schedule_updates"
    updates = fused_updates(step.graph_module.main_gm)
    assert [len(update.args[0]) for update in updates] == [1, 1, 4]


def test_reads_through_views_that_no_schema_declares() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        halves = torch.unsafe_chunk(model.layers[0].weight, 2)
        F.cross_entropy(model(x), y).backward()
        read = halves[0].detach().sum()
        optimizer.step()
        optimizer.zero_grad()
        return read

    model = Chain()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    batch = torch.randn(2, 256), torch.tensor([3, 5])
    check_pass(step, (model, optimizer, *batch), schedule_updates, larger_than_mb=0.1)


# ---------------------------------------------------------------- divided only where it separates


class Small(nn.Module):
    """Large layers, of which the first one's gradient is made last, and a small one."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(large)))
        self.small = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.large(x))


def small(large: int, optimizer: str) -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    model = Small(large)
    batch = torch.randn(2, 256), torch.tensor([3, 5])
    made = OPTIMIZERS[optimizer](model.parameters())
    train_step(model, made, *batch)
    return model, made, *batch


def text(gm: fx.GraphModule) -> list[str]:
    return [node.format_node() for node in gm.graph.nodes]


@pytest.mark.parametrize("optimizer", ONE_CALL)
def test_what_separates_nothing_divides_nothing(optimizer: str) -> None:
    """The only large gradient is made right before the one call that updates all parameters."""
    gm = graphopt.capture(train_step, *small(1, optimizer)).graph_module
    before = text(gm)
    assert schedule_updates(gm, larger_than_mb=0.1).changes == 0
    assert text(gm) == before


@pytest.mark.parametrize("optimizer", ONE_CALL)
def test_what_stays_is_not_divided(optimizer: str) -> None:
    args = small(3, optimizer)
    gm = graphopt.capture(train_step, *args).graph_module
    assert schedule_updates(gm, larger_than_mb=0.1).changes == 2
    updates = [node for node in gm.graph.nodes if is_list_operator(node)]
    assert [len(node.args[0]) for node in updates] == [1, 1, 3]
    check_pass(train_step, args, schedule_updates, larger_than_mb=0.1)


@pytest.mark.parametrize("optimizer", SOME)
def test_parts_are_apart(optimizer: str) -> None:
    """Between two parts of a call something else computes."""
    gm = graphopt.capture(train_step, *small(3, optimizer)).graph_module
    schedule_updates(gm, larger_than_mb=0.1)
    computing = [n for n in gm.graph.nodes if n.op == "call_function" and not is_free(n)]
    pairs = itertools.pairwise(computing)
    same = [(a, b) for a, b in pairs if a.target == b.target and is_list_operator(a)]
    assert all(b in find_all_descendants([a]) for a, b in same)


def is_free(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_operator(node.target, "aten::copy_")


def test_a_second_run_divides_nothing() -> None:
    gm = captured("adamw-foreach")
    assert schedule_updates(gm, larger_than_mb=0.1).changes == 4
    before = text(gm)
    assert schedule_updates.function(gm, larger_than_mb=0.1) == 0
    assert text(gm) == before


# ------------------------------------------------------------------------------ drawn by hand


def scheduled(s: Sheet) -> fx.GraphModule:
    """The graph of a sheet with each update behind its gradient, which computes the same."""
    whole = s.finish()
    gm = duplicate(whole[0])
    schedule_updates(gm, larger_than_mb=0)
    assert_same_run(gm, whole[0], whole)
    return gm


def foreach_sgd(s: Sheet, gradients: list[fx.Node]) -> None:
    s.store(s.weights, s.items(aten._foreach_add.List, s.weights, gradients, alpha=-0.1))


def late_gradients(s: Sheet) -> list[fx.Node]:
    """The last weight's gradient long before those of the others."""
    return [s.call(aten.mul.Tensor, weight, s.x) for weight in reversed(s.weights)][::-1]


def test_entries_that_stay_are_waited_for() -> None:
    """Counts are made early by one call, and picked only behind the gradients."""
    s = Sheet(3)
    call = s.call(aten._foreach_add.Scalar, s.squares, 1.0)
    gradients = late_gradients(s)
    counts = [s.call(operator.getitem, call, i) for i in range(3)]
    s.store(s.squares, counts)
    foreach_sgd(s, s.items(aten._foreach_mul.List, gradients, counts))
    gm = scheduled(s)
    assert len(called(gm, aten._foreach_add.Scalar)) == 1


def test_entries_of_other_parameters_that_read_one_come_first() -> None:
    """An average of the weights, by one call that reads each of them in an entry of its own."""
    s = Sheet(3)
    gradients = late_gradients(s)
    kept = s.items(aten._foreach_lerp.Scalar, s.moments, s.weights, 0.5)
    foreach_sgd(s, gradients)
    s.store(s.moments, kept)
    gm = scheduled(s)
    (average,) = called(gm, aten._foreach_lerp.Scalar)
    updates = [node for node in called(gm, aten.copy_.default) if node.args[0].name in "w0w1w2"]
    assert all(average < update for update in updates)


def test_reads_through_views_by_entry() -> None:
    """The old weights are read by entries of calls, through views of them."""
    s = Sheet(3)
    gradients = late_gradients(s)
    views = [s.call(aten.view.default, weight, [-1]) for weight in s.weights]
    sums = s.items(aten._foreach_mul.Scalar, views, 2.0)
    foreach_sgd(s, gradients)
    s.store(s.squares, s.items(aten._foreach_add.List, s.squares, sums))
    gm = scheduled(s)
    (read,) = called(gm, aten._foreach_mul.Scalar)
    updates = [node for node in called(gm, aten.copy_.default) if node.args[0].name in "w0w1w2"]
    assert all(read < update for update in updates)
