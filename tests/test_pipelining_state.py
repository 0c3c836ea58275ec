"""Parameters and buffers in stages: names, ties, updates in place, copies for other processes."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphopt.errors import PartitionError
from graphopt.pipelining import MultiUseParameterConfig, Pipe, SplitPoint, pipe_split, pipeline
from graphopt.pipelining.stage.devices import move_to_device
from pipeline_cases import CASES

X = torch.randn(3, 8)
TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE


class Model(nn.Module):
    """Tied, unused and frozen parameters, a constant, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.Linear(2, 2)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("offset", torch.arange(8.0), persistent=False)
        self.constant = torch.full((8,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.offset
        self.seen.add_(1)
        pipe_split()
        x = self.second(x) * self.constant + torch.arange(8, device=x.device)
        with torch.no_grad():
            bound = x.abs().max()
        return self.tied(x) / bound


def states(pipe: Pipe) -> list[dict[str, Tensor]]:
    return [pipe.get_stage_module(i).state_dict() for i in range(pipe.num_stages)]


def joined(pipe: Pipe) -> dict[str, Tensor]:
    return {name: value for state in states(pipe) for name, value in state.items()}


@pytest.mark.parametrize("sharing", MultiUseParameterConfig)
@pytest.mark.parametrize("make", [Model, *(case.model for case in CASES.values())])
def test_all_stages_together_have_the_state_of_the_model(
    make: Callable[..., nn.Module], sharing: MultiUseParameterConfig
) -> None:
    case = next((case for case in CASES.values() if case.model is make), None)
    model, (args, kwargs) = (make(3), case.microbatch(0)) if case else (make(), ((X,), {}))
    state = joined(pipeline(model, args, kwargs, multi_use_param_spec=sharing))
    assert set(state) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert value.data_ptr() == state[name].data_ptr(), name


def test_parameters_are_where_they_are_used_under_their_names() -> None:
    pipe = pipeline(Model(), (X,))
    assert [sorted(state) for state in states(pipe)] == [
        ["first.bias", "first.weight", "seen"],
        ["second.bias", "second.weight", "tied.weight", "unused.bias", "unused.weight"],
    ]
    buffers = [name for name, _ in pipe.get_stage_module(0).named_buffers()]
    assert sorted(buffers) == ["offset", "seen"]


def test_the_graph_of_stages_holds_nothing_else() -> None:
    class Rooted(Model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    pipe = pipeline(Rooted(), (X,))
    assert {name.split(".")[0] for name in pipe.split_gm.state_dict()} == {"submod_0", "submod_1"}
    assert "scale" in states(pipe)[0]


def test_a_replicated_parameter_is_in_each_stage_that_uses_it() -> None:
    pipe = pipeline(Model(), (X,))
    (replica,) = pipe.replicated_params
    assert replica.holders == ((0, "first.weight"), (1, "tied.weight"))


def test_a_transmitted_parameter_is_in_the_first_stage() -> None:
    pipe = pipeline(Model(), (X,), multi_use_param_spec=TRANSMIT)
    assert pipe.replicated_params == []
    assert {"first.weight", "tied.weight"} <= set(states(pipe)[0])
    assert "tied.weight" not in states(pipe)[1]


@pytest.mark.parametrize("name", ["first.weight", "tied.weight"])
def test_sharing_can_be_said_for_one_parameter(name: str) -> None:
    class TwoShared(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.second(x))

    pipe = pipeline(TwoShared(), (X,), multi_use_param_spec={name: TRANSMIT})
    shared = {name for replica in pipe.replicated_params for _, name in replica.holders}
    assert shared == {"second.weight", "second.bias"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"third.weight": TRANSMIT}, "the model has no parameter 'third.weight'"),
        ({"first.weight": "transmit"}, "'first.weight' has 'transmit', not a MultiUseParameter"),
    ],
)
def test_wrong_sharing(spec: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        pipeline(Model(), (X,), multi_use_param_spec=spec)


def test_a_returned_parameter_is_an_output() -> None:
    class Returning(Model):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.first.bias, self.offset, x

    model = Returning()
    for one, other in zip(pipeline(model, (X,))(X), copy.deepcopy(model)(X), strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------------------- updates in place


class Updates(nn.Module):
    """A buffer that one stage updates and others read."""

    def __init__(self, updating: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("count", torch.zeros(()))
        self.updating = updating

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index:
                pipe_split()
            x = layer(x) + self.count
            if index == self.updating:
                with torch.no_grad():
                    self.count.add_(x.mean())
        return x


def test_a_buffer_updated_by_its_first_user_is_passed_on() -> None:
    model = Updates(0)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (X,))
    for _ in range(3):
        assert torch.equal(pipe(X), reference(X))
    assert torch.equal(model.count, reference.count)
    assert [sorted(n for n in state if n == "count") for state in states(pipe)] == [
        ["count"],
        [],
        [],
    ]


@pytest.mark.parametrize("updating", [1, 2])
def test_a_buffer_updated_by_a_later_user_is_refused(updating: int) -> None:
    message = f"buffer 'count' is updated by stage {updating} and used by stage 0 before it"
    with pytest.raises(PartitionError, match=message):
        pipeline(Updates(updating), (X,))


class InPlace(nn.Module):
    """What the first stage returns is updated by the second and read by the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        pipe_split()
        y = self.layers[1](x * 2)
        x.relu_()
        pipe_split()
        return self.layers[2](x + y)


class InPlaceThroughView(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        pipe_split()
        x[:, :4].mul_(2)
        return self.layers[1](x)


class InPlaceOfViews(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        half = x[:, :4]
        pipe_split()
        half.mul_(2)
        return self.layers[1](x)


@pytest.mark.parametrize("make", [InPlace, InPlaceThroughView])
def test_received_values_can_be_updated_in_place(make: type[InPlace]) -> None:
    model = make()
    reference = copy.deepcopy(model)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.model(x).square().mean()}

    loss, expected = pipeline(WithLoss(), (X,))(X)["loss"], reference(X).square().mean()
    expected.backward()
    assert torch.equal(loss, expected)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def test_an_update_of_several_views_at_once_is_refused() -> None:
    with pytest.raises(PartitionError, match="a value that it receives as several views"):
        pipeline(InPlaceOfViews(), (X,))


# ---------------------------------------------------------------------------- copies


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_stages_are_the_stages(duplicate: Callable[[Any], Any]) -> None:
    model = Model()
    pipe = pipeline(model, (X,))
    before = copy.deepcopy(model.state_dict())
    stages = [duplicate(pipe.get_stage_module(i)) for i in range(2)]
    for stage, state in zip(stages, states(pipe), strict=True):
        assert list(stage.state_dict()) == list(state)
        assert all(torch.equal(stage.state_dict()[name], state[name]) for name in state)
    assert torch.equal(stages[1](stages[0](X)), copy.deepcopy(model)(X))
    assert stages[0].seen == 1
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_pickled_stage_has_source_lines_and_an_equal_graph() -> None:
    stage = pipeline(Model(), (X,)).get_stage_module(1)
    loaded = pickle.loads(pickle.dumps(stage))
    assert loaded.code == stage.code
    assert str(loaded.graph) == str(stage.graph)
    linear = loaded.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0]
    assert "test_pipelining_state.py" in linear.meta["stack_trace"]


def test_a_copied_pipe_trains_its_own_parameters() -> None:
    case = CASES["loss inside"]
    model = case.model(2)
    args, kwargs = case.microbatch(0)
    pipe = copy.deepcopy(pipeline(model, args, kwargs))
    pipe(*args, **kwargs)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in pipe.parameters())


# ---------------------------------------------------------------------------- devices


def test_operators_that_name_a_device_name_the_new_one() -> None:
    stage = pipeline(Model(), (X,)).get_stage_module(1)
    move_to_device(stage, torch.device("meta"))
    assert not re.search("device.{0,12}cpu", stage.code)
    assert all(tensor.is_meta for tensor in [*stage.parameters(), *stage.buffers()])
    assert stage(X.to("meta")).device.type == "meta"


def test_a_model_without_memory_can_be_divided() -> None:
    with torch.device("meta"):
        model = CASES["mlp"].model(2)
    pipe = pipeline(model, (X.to("meta"),))
    stage = pipe.get_stage_module(1)
    move_to_device(stage, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in stage.parameters())
    stage.to_empty(device="cpu")
    assert stage(X).shape == X.shape


def test_split_points_work_with_names_of_tied_modules() -> None:
    pipe = pipeline(
        CASES["tied replicated"].model(2),
        (torch.arange(3),),
        split_spec={"head": SplitPoint.BEGINNING},
    )
    assert [sorted(n for n in s if "blocks" not in n) for s in states(pipe)] == [
        ["embedding.weight"],
        [],
        ["head.weight"],
    ]
