"""A pipe called as the whole model: results and gradients are those of the model."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining as oracle
from torch.nn import functional as F

import zoo
from graphopt.errors import CaptureError, PartitionError
from graphopt.pipelining import (
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    SplitPoint,
    TrivialLossWrapper,
    pipe_split,
    pipeline,
)
from pipeline_cases import CASES, Case

X = torch.randn(3, 8)
LABELS = torch.randint(zoo.CLASSES, (3,))


def leaves(output: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(output)


def check_same(pipe_output: Any, output: Any) -> None:
    assert type(pipe_output) is type(output)
    for one, other in zip(leaves(pipe_output), leaves(output), strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        else:
            assert one == other


def check_gradients(model: nn.Module, reference: nn.Module) -> None:
    for name, expected in reference.named_parameters():
        actual = model.get_parameter(name).grad
        assert (actual is None) == (expected.grad is None), name
        if actual is not None:
            torch.testing.assert_close(actual, expected.grad, rtol=0, atol=0)
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


@pytest.mark.parametrize("sharing", MultiUseParameterConfig)
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("stages", [2, 4])
def test_values_gradients_and_buffers(
    name: str, stages: int, sharing: MultiUseParameterConfig
) -> None:
    case: Case = CASES[name]
    model = case.model(stages)
    reference = copy.deepcopy(model)
    args, kwargs = case.microbatch(0)
    pipe = pipeline(model, args, kwargs, multi_use_param_spec=sharing)
    assert pipe.num_stages == stages
    output, expected = pipe(*args, **kwargs), reference(*args, **kwargs)
    check_same(output, expected)
    if pipe.has_loss_and_backward:
        expected["loss"].backward()
    else:
        case.loss(output, X).backward()
        case.loss(expected, X).backward()
    check_gradients(model, reference)


class ZooLoss(LossWrapper):
    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output = self.module(inputs)
        return output, self.loss_fn(output.flatten(0, -2), targets.flatten())


TOKENS = torch.randint(32, (2, 8))
IMAGES = torch.randn(3, 3, 8, 8)


@pytest.mark.parametrize(
    ("model", "args", "points"),
    [
        (zoo.MLP(layers=3), (X, LABELS), ["layers.1", "layers.2"]),
        (zoo.GPT(), (TOKENS, TOKENS), ["block", "head"]),
        (zoo.ConvNet(), (IMAGES, LABELS), ["features.2", "features.6", "head"]),
        (zoo.Reused(), (X, LABELS), ["mix", "head"]),
        (zoo.Partial(), (X, LABELS), ["frozen", "head"]),
        (zoo.Checkpointed(use_reentrant=False), (X, LABELS), ["head"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_models_with_a_loss_compute_their_gradients(
    model: nn.Module, args: Any, points: list[str]
) -> None:
    wrapped = ZooLoss(model, F.cross_entropy)
    reference = copy.deepcopy(wrapped)
    spec = {f"module.{point}": SplitPoint.BEGINNING for point in points}
    pipe = pipeline(wrapped, args, split_spec=spec, output_loss_value_spec=(False, True))
    assert pipe.num_stages > len(points)
    assert pipe.has_loss_and_backward
    torch.manual_seed(3)
    output = pipe(*args)
    torch.manual_seed(3)
    expected = reference(*args)
    expected[1].backward()
    check_same(output, expected)
    check_gradients(wrapped, reference)


def test_gradients_accumulate_over_calls() -> None:
    model = TrivialLossWrapper(zoo.MLP(), F.cross_entropy)
    pipe = pipeline(model, (X, LABELS), split_spec={"module.head": SplitPoint.BEGINNING})
    pipe(X, LABELS)
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    pipe(X, LABELS)
    for name, gradient in once.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient * 2)


def test_without_gradients_nothing_is_accumulated() -> None:
    model = TrivialLossWrapper(zoo.MLP(), F.cross_entropy)
    pipe = pipeline(model, (X, LABELS), split_spec={"module.head": SplitPoint.BEGINNING})
    with torch.no_grad():
        check_same(pipe(X, LABELS), model(X, LABELS))
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_arguments_reach_the_caller() -> None:
    case = CASES["skips"]
    model, x = case.model(3), X.clone().requires_grad_()
    pipeline(model, (X,))(x).sum().backward()
    reached = x.grad
    x.grad = None
    model(x).sum().backward()
    assert torch.equal(reached, x.grad)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_one_after_the_other_are_the_model(stages: int) -> None:
    model = CASES["mlp"].model(stages)
    pipe = pipeline(model, (X,))
    value = X
    for index in range(stages):
        value = pipe.get_stage_module(index)(value)
    assert torch.equal(value, model(X))


# What the oracle does with pytree specs.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["mlp", "skips", "tied replicated", "buffers"])
def test_stages_are_those_of_torch(name: str) -> None:
    """The same calls in the same stages."""
    case = CASES[name]
    model = case.model(3)
    args, kwargs = case.microbatch(0)
    ours = pipeline(model, args, kwargs)
    spec = {f"blocks.{i}": oracle.SplitPoint.BEGINNING for i in (1, 2)}
    theirs = oracle.pipeline(copy.deepcopy(model), args, kwargs, split_spec=spec)
    assert ours.num_stages == theirs.num_stages
    for index in range(3):
        assert calls(ours.get_stage_module(index)) == calls(theirs.get_stage_module(index))


def calls(stage: Any) -> list[str]:
    """Operators in order, also those that torch leaves in submodules; without marks."""
    found: list[str] = []
    for node in stage.graph.nodes:
        if node.op == "call_module" and node.target != "_guards_fn":
            found += calls(stage.get_submodule(node.target))
        elif node.op == "call_function" and "pipe_split" not in str(node.target):
            found.append(str(node.target))
    return found


# ---------------------------------------------------------------------------- arguments and results


Two = namedtuple("Two", ["sum", "product"])


class Flexible(nn.Module):
    """All kinds of arguments; results nested in a named tuple with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self, x: Tensor, *more: Tensor, scale: float = 2.0, mask: Tensor | None = None, **extra: Any
    ) -> Two:
        x = self.one(x) * scale
        for other in more:
            x = x + other
        pipe_split()
        x = self.two(x)
        if mask is not None:
            x = x * mask
        for name in sorted(extra):
            x = x + extra[name]["value"]
        return Two(x, [x * x, scale, more[-1] if more else None])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((X, X, X), {}),
        ((X,), {"mask": X, "scale": 3.0}),
        ((X, X), {"b": {"value": X}, "mask": X, "a": {"value": X * 2}}),
    ],
)
def test_arguments_of_all_kinds(args: Any, kwargs: Any) -> None:
    model = Flexible()
    pipe = pipeline(model, args, kwargs)
    check_same(pipe(*args, **kwargs), model(*args, **kwargs))
    reordered = dict(reversed(kwargs.items()))
    check_same(pipe(*args, **reordered), model(*args, **kwargs))


class Defaults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        x = self.one(x) + y
        pipe_split()
        x = self.two(x) * scale
        return x if mask is None else x * mask


def test_arguments_may_be_given_by_name_or_position_and_defaults_are_bound() -> None:
    model = Defaults()
    expected = model(X, X * 2, X * 3)
    pipe = pipeline(model, (X,), {"mask": X * 3, "y": X * 2})
    for output in (
        pipe(X, X * 2, X * 3),
        pipe(X, X * 2, X * 3, 1.0),
        pipe(y=X * 2, x=X, mask=X * 3, scale=1.0),
    ):
        assert torch.equal(output, expected)
    plain = pipeline(model, (X, X * 2))
    assert torch.equal(plain(X, y=X * 2, mask=None), model(X, X * 2))


def test_the_first_stage_takes_the_arguments_of_the_model() -> None:
    pipe = pipeline(Defaults(), (X,), {"mask": X, "y": X})
    names = [node.target for node in pipe.get_stage_module(0).graph.find_nodes(op="placeholder")]
    assert names == ["x", "y", "mask"]
    pipe.get_stage_module(0)(X, mask=X, y=X)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        (
            (X, X),
            {"scale": 2.0},
            ValueError,
            "argument 'scale' of Defaults was left at its default",
        ),
        ((X, X), {"mask": X}, ValueError, "argument 'mask' of Defaults was left at its default"),
        ((X, 3), {}, ValueError, "y is a int; the pipe was made with a tensor"),
        ((X, [X]), {}, ValueError, "nested differently"),
        ((X,), {}, TypeError, "missing a required argument: 'y'"),
        ((X, X), {"z": X}, TypeError, "unexpected keyword argument 'z'"),
    ],
)
def test_calls_that_differ_from_the_example(
    args: Any, kwargs: Any, error: type[Exception], message: str
) -> None:
    pipe = pipeline(Defaults(), (X, X))
    with pytest.raises(error, match=message):
        pipe(*args, **kwargs)


def test_a_number_is_part_of_the_graph() -> None:
    pipe = pipeline(Defaults(), (X, X), {"scale": 2.0})
    with pytest.raises(
        ValueError, match=r"scale is 3.0; the pipe was made with 2.0, which is part"
    ):
        pipe(X, X, scale=3.0)


# ---------------------------------------------------------------------------- losses


def test_the_entry_loss_of_a_mapping_is_found() -> None:
    assert (
        pipeline(CASES["loss inside"].model(2), *CASES["loss inside"].microbatch(0)).loss_fn(
            {"logits": 1, "loss": 2, "parity": 3}
        )
        == 2
    )


def test_a_pipe_without_loss_has_no_loss_function() -> None:
    pipe = pipeline(Defaults(), (X, X))
    assert not pipe.has_loss_and_backward
    with pytest.raises(ValueError, match="the pipe has no loss"):
        _ = pipe.loss_fn


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((False, False), "0 losses marked True"),
        ((True, True), "2 losses marked True"),
        ((True, False, False), r"nested differently than the output: output\[2\]"),
        (True, "nested differently"),
        ((1, True), r"the loss spec has 1 at output\[0\]"),
        ((True, False), r"the loss must be a tensor with one element; it is of shape \(3, 4\)"),
    ],
)
def test_wrong_loss_specs(spec: Any, message: str) -> None:
    model = ZooLoss(zoo.MLP(), F.cross_entropy)
    with pytest.raises(PartitionError, match=message):
        pipeline(model, (X, LABELS), output_loss_value_spec=spec)


def test_a_loss_wrapper_must_say_how_the_loss_is_computed() -> None:
    with pytest.raises(TypeError):
        LossWrapper(zoo.MLP(), F.cross_entropy)  # type: ignore[abstract]


# ---------------------------------------------------------------------------- the rest


def test_info_and_text() -> None:
    pipe = pipeline(CASES["loss inside"].model(2), *CASES["loss inside"].microbatch(0))
    info = pipe.info()
    assert (info.num_stages, info.has_loss_and_backward) == (2, True)
    assert [n.target for n in info.graph.find_nodes(op="call_module")] == ["submod_0", "submod_1"]
    text = str(pipe)
    assert text.count("def forward") == 3
    assert "stage_backward" in text


def test_print_readable(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = pipeline(Defaults(), (X, X))
    assert pipe.print_readable() == str(pipe)
    assert capsys.readouterr().out.rstrip() == str(pipe)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_stage_that_does_not_exist(index: int) -> None:
    pipe = pipeline(Defaults(), (X, X))
    with pytest.raises(ValueError, match=rf"there is no stage {index}; the pipe has 2"):
        pipe.get_stage_module(index)
    with pytest.raises(ValueError, match="there is no stage"):
        pipe.build_stage(index, "cpu")


def test_a_model_that_is_not_one_graph() -> None:
    class Branching(Defaults):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.one(x) if x.sum() > 0 else self.two(x)

    with pytest.raises(CaptureError, match="Branching cannot be captured whole") as caught:
        pipeline(Branching(), (X,))
    assert "typical reasons are: an `if` or a loop that depends on values" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_policy_gets_the_exported_graph() -> None:
    def before_second_linear(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        linear = torch.ops.aten.linear.default
        second = graph_module.graph.find_nodes(op="call_function", target=linear)[1]
        with graph_module.graph.inserting_before(second):
            graph_module.graph.call_function(torch.ops.graphopt.pipe_split.default, ("policy",))
        return graph_module

    model = zoo.MLP(layers=2)
    pipe = Pipe.from_tracing(model, (X,), split_policy=before_second_linear)
    assert pipe.num_stages == 2
    assert torch.equal(pipe(X), model(X))
