"""Boundaries between stages: in code, by annotation, by weight, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed import pipelining as torch_pipelining

from graphopt.errors import PartitionError
from graphopt.pipelining import (
    Pipe,
    PipeSequential,
    SplitPoint,
    annotate_split_points,
    balanced,
    pipe_split,
    pipeline,
)
from graphopt.pipelining.pipe.balance import cheapest_cuts, lightest_maximum
from pipeline_cases import CASES

X = torch.randn(2, 4)


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.body(x)


def stage_names(pipe: Pipe) -> list[list[str]]:
    """Names of the parameters of each stage, without `.weight` and `.bias`."""
    return [
        list(
            dict.fromkeys(name.rpartition(".")[0] for name in pipe.get_stage_module(i).state_dict())
        )
        for i in range(pipe.num_stages)
    ]


def test_a_mark_does_nothing_when_the_model_runs() -> None:
    assert pipe_split() is None
    with torch.no_grad():
        pipe_split()


def test_split_points_divide_before_and_after_submodules() -> None:
    model = Stack()
    spec = {"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.END}
    pipe = pipeline(model, (X,), split_spec=spec)
    assert stage_names(pipe) == [["layers.0"], ["layers.1", "layers.2"], ["body.0"]]
    assert torch.equal(pipe(X), model(X))


def test_without_marks_there_is_one_stage() -> None:
    model = Stack()
    pipe = pipeline(model, (X,))
    assert pipe.num_stages == 1
    assert torch.equal(pipe(X), model(X))


def test_the_model_is_as_before() -> None:
    model = Stack()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    pipeline(model, (X,), split_spec={"body": SplitPoint.BEGINNING})
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_a_forward_set_on_the_instance_is_given_back() -> None:
    model = Stack()
    own = lambda x: x * 2  # noqa: E731
    model.body.forward = own
    pipe = pipeline(model, (X,), split_spec={"body": SplitPoint.BEGINNING})
    assert model.body.forward is own
    assert torch.equal(pipe(X), model(X))


@pytest.mark.parametrize(
    ("args", "error"), [((X, X), TypeError), ((torch.randn(2, 5),), RuntimeError)]
)
def test_marks_go_away_when_tracing_fails(args: Any, error: type[Exception]) -> None:
    model = Stack()
    with pytest.raises(error):
        pipeline(model, args, split_spec={"body": SplitPoint.BEGINNING})
    assert all("forward" not in vars(module) for module in model.modules())


def test_annotating_twice_marks_once() -> None:
    model = Stack()
    for _ in range(3):
        annotate_split_points(model, {"layers.1": SplitPoint.BEGINNING})
    annotate_split_points(model, {"layers.1": SplitPoint.END})
    assert torch.equal(model(X), Stack.forward(model, X))
    pipe = Pipe.from_tracing(model, (X,))
    assert stage_names(pipe) == [["layers.0"], ["layers.1"], ["layers.2", "body.0"]]
    assert Pipe.from_tracing(model, (X,)).num_stages == 1


def test_annotations_can_be_undone_without_tracing() -> None:
    model = Stack()
    with annotate_split_points(model, {"body": SplitPoint.END}):
        assert "forward" in vars(model.body)
    assert "forward" not in vars(model.body)


def test_a_sequential_becomes_a_stage_for_each_child() -> None:
    plain = nn.Sequential()
    plain.add_module("first", nn.Linear(4, 4))
    plain.add_module("second", nn.Linear(4, 4))
    plain.append(nn.ReLU())
    staged = PipeSequential.from_sequential(plain)
    assert torch.equal(staged(X), plain(X))
    pipe = pipeline(staged, (X,))
    assert pipe.num_stages == 3
    assert stage_names(pipe) == [["first"], ["second"], []]
    assert torch.equal(pipe(X), plain(X))


def test_a_module_called_twice_is_marked_twice() -> None:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.body(x))

    assert pipeline(Twice(), (X,), split_spec={"body.0": SplitPoint.END}).num_stages == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"body.7": SplitPoint.END}, "split point 'body.7': 'body' has no submodule '7'"),
        ({"trunk.0": SplitPoint.END}, "split point 'trunk.0': the Stack has no submodule 'trunk'"),
        ({"body": "end"}, "the split point of 'body' is 'end', not a SplitPoint"),
    ],
)
def test_wrong_split_points(spec: Any, message: str) -> None:
    model = Stack()
    with pytest.raises(PartitionError, match=message):
        annotate_split_points(model, {"layers.0": SplitPoint.END, **spec})
    assert "forward" not in vars(model.layers[0])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"layers.0": SplitPoint.END, "layers.1": SplitPoint.BEGINNING},
            "stage 1 is empty: nothing is computed between END of 'layers.0' and BEGINNING of"
            " 'layers.1'",
        ),
        ({"body": SplitPoint.END}, "stage 1 is empty: nothing is computed after END of 'body'"),
        (
            {"layers.0": SplitPoint.BEGINNING},
            "stage 0 is empty: nothing is computed before BEGINNING of 'layers.0'",
        ),
        ({"layers": SplitPoint.END}, "split point END of 'layers' was never reached"),
    ],
)
def test_boundaries_that_divide_nothing(spec: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        pipeline(Stack(), (X,), split_spec=spec)


def test_marks_in_code_are_named_by_their_line() -> None:
    class Empty(Stack):
        def forward(self, x: Tensor) -> Tensor:
            pipe_split()
            return super().forward(x)

    line = Empty.forward.__code__.co_firstlineno + 1
    message = rf"before pipe_split\(\) at test_pipelining_marks.py:{line}"
    with pytest.raises(PartitionError, match=message):
        pipeline(Empty(), (X,))


def test_a_mark_inside_a_region_is_refused() -> None:
    class Inside(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.layers[0](x)
                pipe_split()
                return self.body(x)

    with pytest.raises(PartitionError, match="stands inside an autocast, no_grad or other region"):
        pipeline(Inside(), (X,))


def test_a_spec_and_a_policy_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="not both"):
        pipeline(Stack(), (X,), split_spec={}, split_policy=lambda graph_module: graph_module)


def test_a_child_that_occurs_twice_is_two_stages() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    plain = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), first, second)
    staged = PipeSequential.from_sequential(plain)
    assert list(staged.state_dict()) == list(plain.state_dict())
    expected = plain(X)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad()
    pipe = pipeline(staged, (X,))
    assert pipe.num_stages == 6
    result = pipe(X)
    result.sum().backward()
    assert torch.equal(result, expected)
    assert all(map(torch.equal, gradients, (p.grad for p in plain.parameters())))


class TorchMarked(nn.Module):
    def __init__(self, marks: int = 1, region: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.marks, self.region = marks, region

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.set_grad_enabled(not self.region):
            x = x * 2
            for _ in range(self.marks):
                torch_pipelining.pipe_split()
            x = x * 3
        return self.second(x)


def test_marks_of_torch_count() -> None:
    model = TorchMarked()
    pipe = pipeline(model, (X,))
    assert stage_names(pipe) == [["first"], ["second"]]
    assert torch.equal(pipe(X), model(X))
    for split_spec in (torch_pipelining.SplitPoint.BEGINNING, torch_pipelining.SplitPoint.END):
        assert pipeline(Stack(), (X,), split_spec={"layers.1": split_spec}).num_stages == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (TorchMarked(marks=2), "between pipe_split\\(\\) of torch.distributed.pipelining"),
        (
            TorchMarked(region=True),
            "pipe_split\\(\\) of torch.* stands inside an autocast, no_grad",
        ),
    ],
)
def test_marks_of_torch_that_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        pipeline(model, (X,))


class Nothing(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Stack(), X), "the example arguments are a Tensor"),
        ((Stack(), (X,), 3), "the example keyword arguments are a int"),
        ((lambda x: x, (X,)), "made of an nn.Module, not of <function"),
        ((Stack(), (X,), None, ["body"]), "split points are a mapping"),
        ((Stack(), (X,), None, {2: SplitPoint.END}), "the name of a submodule, not for 2"),
        ((Stack(), (X,), None, None, 3), "split_policy is a function"),
        ((Stack(), (X,), None, None, lambda graph: None), "split_policy returned None"),
        ((Stack(), (X,), None, None, None, None, 3), "multi_use_param_spec is a Multi"),
        ((Nothing(), (3,)), "the model computes nothing with tensors"),
        ((Nothing(), (X,)), "the model computes nothing with tensors"),
        ((nn.Sequential(), (X,)), "the model computes nothing with tensors"),
    ],
)
def test_arguments_of_other_kinds_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        pipeline(*arguments)


WIDE_BATCH = torch.randn(3, 8)


def stage_sizes(model: nn.Module, num_stages: int) -> list[int]:
    pipe = pipeline(model, (WIDE_BATCH,), split_policy=balanced(num_stages))
    assert torch.equal(pipe(WIDE_BATCH), model(WIDE_BATCH))
    stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    return [sum(p.numel() for p in stage.parameters()) for stage in stages]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_equal_blocks_are_divided_equally(num_stages: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))
    assert stage_sizes(model, num_stages) == [6 // num_stages * 72] * num_stages


def test_a_heavy_layer_gets_a_stage_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 200), nn.Linear(200, 8), nn.Linear(8, 8))
    assert stage_sizes(model, 2) == [72 + 1800, 1608 + 72]


def test_of_equal_divisions_the_one_that_sends_least_is_taken() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            wide = torch.cat([x, x, x], 1).exp()
            return self.two(wide.sum(1, keepdim=True).expand(-1, 8))

    model = Wide()
    pipe = pipeline(model, (WIDE_BATCH,), split_policy=balanced(2))
    received = pipe.get_stage_module(1).graph.find_nodes(op="placeholder")
    assert [tuple(node.meta["val"].shape) for node in received] == [(3, 1)]


def test_no_boundary_divides_a_list_of_tensors() -> None:
    class Chunks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            a, b = torch.chunk(self.one(x), 2, 1)
            return a * b

    pipe = pipeline(
        Chunks(), (WIDE_BATCH,), split_policy=balanced(2, weight=lambda node: 1.0, slack=9.0)
    )
    received = pipe.get_stage_module(1).graph.find_nodes(op="placeholder")
    assert received
    assert all(isinstance(node.meta["val"], Tensor) for node in received)


def test_weights_can_be_given() -> None:
    def seconds(node: fx.Node) -> float:
        return 5.0 if node.target is torch.ops.aten.relu.default else 0.0

    model = CASES["mlp"].model(4)
    for block in model.blocks[:2]:
        block[1] = nn.Tanh()
    marked = nn.Sequential(*model.blocks)
    pipe = pipeline(marked, (WIDE_BATCH,), split_policy=balanced(2, weight=seconds, slack=0.0))
    relus = [str(pipe.get_stage_module(index).graph).count("aten.relu") for index in range(2)]
    assert relus == [1, 1]


@pytest.mark.parametrize(
    ("stages", "error", "message"),
    [
        (0, ValueError, "at least 1 stage, not 0"),
        (9, PartitionError, "2 calls cannot be divided into 9 stages"),
    ],
)
def test_impossible_numbers(stages: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipeline(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (WIDE_BATCH,), split_policy=balanced(stages)
        )


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_divisions_are_the_best_of_all(weights: list[int], data: st.DataObject) -> None:
    """Against trying every division."""
    count = len(weights)
    num_stages = data.draw(st.integers(1, count))
    across = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    slack = data.draw(st.sampled_from([0.0, 0.5]))

    def heaviest(ends: tuple[int, ...]) -> int:
        starts = [0, *(end + 1 for end in ends)]
        stops = [*starts[1:], count]
        return max(sum(weights[a:b]) for a, b in zip(starts, stops, strict=True))

    divisions = list(itertools.combinations(range(count - 1), num_stages - 1))
    best = min(map(heaviest, divisions))
    assert lightest_maximum(weights, num_stages) == pytest.approx(best)
    limit = best * (1 + slack)
    fewest = min(sum(across[e] for e in ends) for ends in divisions if heaviest(ends) <= limit)
    found = tuple(cheapest_cuts(weights, across, num_stages, limit))
    assert found in divisions
    assert heaviest(found) <= limit
    assert sum(across[end] for end in found) == fewest
