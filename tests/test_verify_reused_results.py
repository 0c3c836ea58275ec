"""What is known of a graph is used for the next one, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from edit_tools import added, with_arg
from graphopt.graph_utils import find_nodes, get_outputs, is_collective, is_operator, is_wait
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import PassRegistry
from graphopt.verify import check_equivalence
from graphopt.verify.symbolic import evaluation
from sketch import one_rank
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Edit = Callable[[fx.GraphModule], Any]

PIPELINE: list[Any] = [
    ("remove_copy_from_optimizer", {}),
    ("comm_fusion_with_concat", {"bucket_size_mb": 0.002}),
    ("schedule_comm_wait", {}),
    ("iter_move_grads_and_optimizers", {}),
]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def captured(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    def step(model: nn.Module, *given: Tensor) -> Any:
        return function(*given)

    return graphopt.capture(step, nn.Identity(), *tensors).graph_module


def trained() -> IterGraphModule:
    torch.manual_seed(0)
    made = MODELS["mlp"].make()
    args = (made, OPTIMIZERS["adamw-fused"](made.parameters()), *MODELS["mlp"].batch(0))
    train_step(*args)
    found = graphopt.capture(train_step, *args, parallel=graphopt.DataParallel())
    return IterGraphModule(found.graph_module)


def declared(edit: Edit, **options: Any) -> Any:
    def pass_(gm: fx.GraphModule) -> None:
        edit(gm)

    made = graphopt.graph_optimization_pass(registry=PassRegistry(), repeatable=True, **options)
    return made(pass_)


def nodes(gm: fx.GraphModule, *names: str) -> list[fx.Node]:
    return find_nodes(gm.graph, lambda n: is_operator(n.target, *(f"aten::{x}" for x in names)))


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return graphopt.graph_utils.call_function_with_meta(graph, target, args, kwargs)


# ------------------------------------------------------------------------------------ recalling


def numbers() -> fx.GraphModule:
    return captured(lambda x: ((x * 2.0) + 0.0).clamp(min=0.0), torch.randn(4))


NEARLY_THE_SAME: dict[str, tuple[str, int, Any]] = {
    "an integer": ("mul", 1, 2),
    "a sign of zero": ("add", 1, -0.0),
    "a sign of a bound": ("clamp", 1, -0.0),
    "true": ("mul", 1, True),
}


@pytest.mark.parametrize("name", NEARLY_THE_SAME)
def test_a_call_with_nearly_the_same_argument_is_another(name: str) -> None:
    """Whether it was evaluated a moment ago or not."""
    operator, index, value = NEARLY_THE_SAME[name]
    gm = numbers()
    harmless = declared(
        lambda gm: added(nodes(gm, "mul")[0], aten.neg.default, nodes(gm, "mul")[0])
    )
    edit = declared(lambda gm: with_arg(nodes(gm, operator)[0], index, value))
    with pytest.raises(graphopt.VerificationError):
        graphopt.PassManager([harmless, edit]).run(gm)


def test_operands_that_change_places() -> None:
    gm = captured(lambda x, y: torch.cat([x - y, y - x, x - y]), torch.randn(4), torch.randn(4))

    def swap(gm: fx.GraphModule) -> None:
        (cat,) = nodes(gm, "cat")
        first, second, third = cat.args[0]
        cat.args = ([first, third, second],)

    with pytest.raises(graphopt.VerificationError):
        graphopt.PassManager([declared(swap)]).run(gm)


def test_one_argument_twice_is_told_from_two() -> None:
    """Both calls read the same nodes: `x, y, x` and `x, y, y`."""
    gm = captured(lambda x, y: torch.cat([x, y, x]), torch.randn(4), torch.randn(4))

    def edit(gm: fx.GraphModule) -> None:
        (cat,) = nodes(gm, "cat")
        x, y, _ = cat.args[0]
        cat.args = ([x, y, y],)

    with pytest.raises(graphopt.VerificationError):
        graphopt.PassManager([declared(edit)]).run(gm)


def test_a_pass_is_not_evaluated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph of which one call is new, that call and those that follow from it."""
    gm = trained()
    evaluated: list[str] = []
    original = evaluation._Evaluator._call

    def noting(self: Any, node: fx.Node) -> Any:
        evaluated.append(node.name)
        return original(self, node)

    monkeypatch.setattr(evaluation._Evaluator, "_call", noting)

    def cloned(gm: fx.GraphModule) -> None:
        node = nodes(gm, "relu", "mm", "addmm")[0]
        new = added(node, aten.clone.default, node)
        for user in [user for user in node.users if user is not new]:
            user.replace_input_with(node, new)

    graphopt.PassManager([declared(cloned)]).run(gm)
    again = [name for name in set(evaluated) if evaluated.count(name) > 1]
    assert "clone_default" in " ".join(evaluated) and not again


def test_a_read_that_moves_behind_an_update() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        before = model.mean * x
        model.mean.add_(1)
        return before

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(3))

    gm = graphopt.capture(step, Mean(), torch.randn(3)).graph_module

    def late(gm: fx.GraphModule) -> None:
        (product,), (update,) = nodes(gm, "mul"), get_outputs(gm.graph).updates
        update.append(product)

    with pytest.raises(graphopt.VerificationError):
        graphopt.PassManager([declared(late)]).run(gm)


def test_random_numbers_that_nobody_reads() -> None:
    """Others that are drawn after them are others."""
    gm = captured(lambda x: (torch.bernoulli(x), torch.bernoulli(x[:2])), torch.rand(4))
    keep = nodes(gm, "bernoulli")

    def edit(gm: fx.GraphModule) -> None:
        first, second = nodes(gm, "bernoulli")
        second.append(first)

    assert len(keep) == 2
    with pytest.raises(graphopt.VerificationError):
        graphopt.PassManager([declared(edit)]).run(gm)


# ------------------------------------------------------------------------------------ late work


def test_a_late_update_that_goes_somewhere_else() -> None:
    """Setup is right, and a flush; main brings another state to what drain makes of this one."""
    gm = trained()
    graphopt.PassManager(PIPELINE, verify="off").run(gm)
    before = IterGraphModule(gm)
    assert check_equivalence(before, gm).ok
    graphs = gm.derive()
    main = graphs["main"].graph
    update = next(n for n in main.nodes if is_operator(n.target, "aten::copy_"))
    with main.inserting_before(update):
        doubled = call(main, aten.add.Tensor, update.args[1], update.args[1])
    with_arg(update, 1, doubled)
    gm.derive = lambda: graphs  # type: ignore[method-assign]
    report = check_equivalence(before, gm)
    assert "any other iteration and a flush" in str(report)


def test_a_read_before_a_late_update() -> None:
    """Main reads what the state was before the update of the last iteration."""
    gm = trained()
    graphopt.PassManager(PIPELINE, verify="off").run(gm)
    before = IterGraphModule(gm)
    graphs = gm.derive()
    main = graphs["main"].graph
    updates = (n for n in main.nodes if is_operator(n.target, "aten::copy_"))
    update = next(n for n in updates if len(n.users) > 1)
    readers = [user for user in update.users if user.op != "output"]
    with main.inserting_before(update):
        stale = call(main, aten.clone.default, update.args[0])
    for reader in readers:
        reader.replace_input_with(update, stale)
    gm.derive = lambda: graphs  # type: ignore[method-assign]
    assert readers and not check_equivalence(before, gm).ok


# ------------------------------------------------------------------------------ what it is called


def test_the_same_rows_are_summed() -> None:
    gm = trained()
    same = check_equivalence(gm, IterGraphModule(gm))
    assert same.ok and not same.reorders_sums and str(same).endswith("bit for bit")
    fused = IterGraphModule(gm)
    graphopt.PassManager(PIPELINE[:2], verify="off").run(fused)
    report = check_equivalence(gm, fused)
    assert report.ok and report.reorders_sums and "order of sums" in str(report)


# ------------------------------------------------------------------------------- computed anew


def computed_twice(gm: fx.GraphModule) -> None:
    """Every second reader of every call gets a value of its own."""
    for node in list(gm.graph.nodes):
        if not _may_be_computed_anew(node) or len(node.users) < 2:
            continue
        users = list(node.users)
        again = added(node, node.target, *node.args, **node.kwargs)
        again.meta["val"] = node.meta["val"]
        for user in users[::2]:
            user.replace_input_with(node, again)


def _may_be_computed_anew(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    if is_collective(node) or is_wait(node) or is_operator(node.target, "aten::copy_"):
        return False
    return isinstance(node.target, torch._ops.OpOverload) and not graphopt.graph_utils.is_random(
        node
    )


@pytest.mark.parametrize("before", range(4))
def test_a_value_that_is_computed_twice(before: int) -> None:
    """Of the captured step, and of what passes make of it."""
    gm = trained()
    graphopt.PassManager(PIPELINE[:before], verify="off").run(gm)
    count = len(gm.graph.nodes)
    graphopt.PassManager([declared(computed_twice)]).run(gm)
    assert len(gm.graph.nodes) > count
