"""Sizes that depend on values: kept as symbols, as numbers where they are constants or needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt
from graphopt._compat.cached_tracing import RememberingMode
from graphopt.cost import DEVICES, RooflineCost
from graphopt.errors import AssumptionFailedError, CaptureError
from graphopt.graph_utils import is_operator, same_kind
from graphopt.host.decisions.assumptions import Assumption
from loops import Loop, graphs_of
from test_decisions import assert_alike, finish, left_by

Step = Callable[[nn.Module, Optimizer, Tensor, Tensor], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(F.gelu(self.first(x)), 0.1))


def through_layers(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    chosen = y > 1
    return finish(optimizer, F.cross_entropy(model(x[chosen]), y[chosen] % 4))


def hardest(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    losses = F.cross_entropy(model(x), y % 4, reduction="none")
    hard = losses[losses > losses.mean()]
    return finish(optimizer, hard.sum() / hard.numel())


def experts(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    out = torch.zeros(x.shape[0], 4)
    for number in range(2):
        (rows,) = torch.where(y % 2 == number)
        out.index_add_(0, rows, model(x[rows]) * (number + 1))
    return finish(optimizer, out.square().mean())


def by_class(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    classes, where, counts = torch.unique(y, return_inverse=True, return_counts=True)
    means = torch.zeros(classes.shape[0], 4).index_add(0, where, model(x)) / counts[:, None]
    return finish(optimizer, means.square().sum())


def repeated(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    rows = x.repeat_interleave(y + 1, dim=0)
    return finish(optimizer, model(rows).square().mean()), rows.shape[0]


def split(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    parts = torch.split(model(x), torch.bincount(y % 2, minlength=2).tolist())
    return finish(optimizer, parts[0].square().sum() + parts[1].sum())


def up_to_longest(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    mask = torch.arange(y.max().item() + 1)[None] < y[:, None]
    return finish(optimizer, (model(x) * mask.sum(1, keepdim=True)).square().mean())


def similar(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    rows = model(x[y > 0])
    return finish(optimizer, (rows @ rows.T).square().mean())


def where_there_are_some(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    rows, loss = x[y == 1], model(x).square().mean()
    return finish(optimizer, loss + model(rows).sum() / len(rows) if len(rows) else loss)


STEPS: dict[Step, int] = {
    through_layers: 2, hardest: 2, experts: 3, by_class: 2, repeated: 1, split: 3,
    up_to_longest: 1, similar: 2, where_there_are_some: 4,
}  # fmt: skip
"""Each with how many graphs its calls need at most."""


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
}


def batches(calls: int) -> list[tuple[Tensor, Tensor]]:
    """Some with all labels alike, which leaves masks empty or full."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for call in range(calls):
        x = torch.randn(10, 6, generator=generator)
        y = torch.randint(0, 5, (10,), generator=generator)
        found.append((x, torch.full_like(y, 2) if call % 6 == 3 else y))
    return found


def trained(step: Step, compiled: bool, optimizer: str = "adam", calls: int = 7) -> Any:
    torch.manual_seed(0)
    model = Net()
    updates = OPTIMIZERS[optimizer](model.parameters())
    run = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for x, y in batches(calls):
        result = run(model, updates, x, y)
        if isinstance(run, graphopt.TrainStep):
            run.flush()
        found += [result, *left_by(model, updates)]
    made = len(run.captures) if isinstance(run, graphopt.TrainStep) else 0
    return torch.utils._pytree.tree_leaves(found), made


def check(step: Step, optimizer: str = "adam", calls: int = 7) -> int:
    expected, _ = trained(step, False, optimizer, calls)
    found, made = trained(step, True, optimizer, calls)
    assert_alike(found, expected)
    return int(made)


@pytest.mark.parametrize("step", [through_layers, experts, split, similar])
def test_one_graph_for_many_sizes(step: Step) -> None:
    assert check(step) <= STEPS[step]


@pytest.mark.covering(1)
@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", STEPS)
def test_every_call_is_that_of_eager(step: Step, optimizer: str) -> None:
    assert check(step, optimizer, calls=18) <= STEPS[step] + 2


def test_a_graph_for_other_relations_changes_nothing() -> None:
    captured = graphopt.capture(
        lambda model, x: model(x[x[:, 0] > 0]).reshape(2, -1), nn.Identity(), torch.ones(4, 3)
    )
    graph = captured.graph_module
    assert graph(torch.ones(6, 3))[0][0].shape == (2, 9)
    with pytest.raises(AssumptionFailedError, match=r"\(5,\).*test_sizes_by_value"):
        graph(torch.ones(5, 3))


def test_a_size_that_python_needs_has_a_graph_for_each() -> None:
    @graphopt.compile(max_graphs=3)
    def step(model: nn.Module, x: Tensor) -> Tensor:
        names = {1: "one", 2: "two"}
        rows = model(x[x > 0])  # HERE
        return rows * len(names.get(rows.shape[0], "many"))

    model = nn.Identity()
    for count in (1, 2, 3):
        x = torch.arange(5.0) - 4 + count
        assert step(model, x).shape == (count,)
    with pytest.raises(CaptureError, match=r"each size .*# HERE"):
        step(model, torch.arange(6.0) - 5 + 4)


def test_nobody_asks_about_sizes_behind_the_capture() -> None:
    """The graph would hold for the sizes of the first call alone."""

    def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x[x[:, 0] > 0]) @ x[:3], x[x[:, 1] > 0].relu()

    captured = graphopt.capture(step, nn.Identity(), torch.ones(4, 3))
    graph = captured.graph_module
    cost = RooflineCost(DEVICES["cpu"])
    assert all(cost(node) >= 0 for node in graph.graph.nodes)
    rows, other = (node for node in graph.graph.nodes if is_operator(node.target, "aten::index"))
    assert same_kind(rows, rows) and not same_kind(rows, other)
    x = torch.tensor([[1.0, 1.0, 1.0]] * 5 + [[1.0, 0.0, 1.0]])
    assert [len(result) for result in graph(x)[0]] == [6, 5]


def test_sizes_of_tensors_are_returned_and_left_as_such() -> None:
    """And not as tuples, which have no `numel`; also those that depend on values."""

    def make() -> Loop:
        model, kept = nn.Linear(4, 2), dict[str, Any]()

        def step(number: int, x: Tensor) -> Any:
            chosen = x[torch.arange(3) <= number % 3]
            kept["shape"], kept["all"] = chosen.shape, {"x": x.shape}
            return x.shape, [model(x).size()], {"chosen": chosen.shape}, torch.Size()

        return Loop(step, lambda: kept)

    assert graphs_of(make, 4) <= 4


def counted(x: Tensor) -> Tensor:
    sizes = torch.tensor([2, 2, 3])
    ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
    start, out = 0, x.new_zeros(())
    for end in ends:
        out = out + x[start:end].sum() * (end - start)
        start = end
    return out


def chosen(x: Tensor) -> Tensor:
    return x[torch.tensor([1, 0, 1, 1, 0, 0, 0, 1]).nonzero().squeeze(1)]


def masked(x: Tensor) -> Tensor:
    return x[torch.arange(8) % 3 == 0] * x.masked_select(torch.arange(8) % 3 == 1).sum()


def distinct(x: Tensor) -> Tensor:
    found = torch.unique(torch.tensor([3, 1, 3, 2]))
    return x[found] * len(found)


def in_place(x: Tensor) -> Tensor:
    mask = torch.zeros(8, dtype=torch.bool)
    mask[2:5] = True
    mask[3] = False
    return x[mask]


def repeated_as_often_as_a_constant_says(x: Tensor) -> Tensor:
    return x[:2].repeat_interleave(torch.tensor([2, 3]), dim=0)


def counted_bins(x: Tensor) -> Tensor:
    return x.sum() * torch.bincount(torch.tensor([0, 2, 2]))


@pytest.mark.parametrize(
    "step",
    [
        counted,
        chosen,
        masked,
        distinct,
        in_place,
        repeated_as_often_as_a_constant_says,
        counted_bins,
    ],
)
def test_they_are_known(step: Callable[[Tensor], Tensor]) -> None:
    captured = graphopt.capture(step, torch.ones(8))
    nodes = captured.graph_module.graph.nodes
    assert not any(isinstance(node.target, Assumption) for node in nodes)
    run = graphopt.compile(step)
    for _ in range(2):
        x = torch.rand(8)
        assert torch.equal(run(x), step(x))
    assert len(run.captures) == 1


def test_what_an_input_is_written_into_is_no_constant() -> None:
    def step(x: Tensor) -> Tensor:
        mask = torch.zeros(8, dtype=torch.bool)
        mask[:] = x > 0.5
        return x[mask].sum()

    run = graphopt.compile(step)
    for _ in range(4):
        x = torch.rand(8)
        assert torch.equal(run(x), step(x))


def test_what_is_drawn_is_no_constant() -> None:
    def step(x: Tensor) -> Tensor:
        return x[torch.rand(8) > 0.5].sum()

    run = graphopt.compile(step)
    for seed in range(4):
        torch.manual_seed(seed)
        found = run(torch.ones(8))
        torch.manual_seed(seed)
        assert torch.equal(found, step(torch.ones(8)))


def test_a_slice_takes_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace went through all rows of what a step takes a slice of."""
    times = [0]
    dispatch = RememberingMode.__torch_dispatch__

    def count(self: Any, *args: Any) -> Any:
        times[0] += 1
        return dispatch(self, *args)

    monkeypatch.setattr(RememberingMode, "__torch_dispatch__", count)
    asked = []
    for rows in (3, 300):
        times[0] = 0
        graphopt.capture(lambda x: x[1:3] + x[:-1].sum(), torch.ones(rows, 2))
        asked.append(times[0])
    assert asked[0] == asked[1]
