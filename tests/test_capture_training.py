"""What a training loop does between captured steps, bit for bit as in eager."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twins import Twins, World, assert_same, world
from zoo import GPT, MLP, MODELS, OPTIMIZERS, train_step

STEPS = 5
MLP_CASE = MODELS["mlp"]


def test_new_batch_shape() -> None:
    twins = Twins(lambda: world(model="convnet"))
    for i, size in enumerate([4, 4, 6, 4, 6, 3, 4]):
        twins.step(*MODELS["convnet"].batch(i, size))
    twins.finish(captures=3)


def test_sequence_length_changes() -> None:
    twins = Twins(lambda: world(model="gpt"))
    for i, length in enumerate([8, 8, 5, 8, 5]):
        x, y = MODELS["gpt"].batch(i)
        twins.step(x[:, :length], y[:, :length])
    twins.finish(captures=2)


@pytest.mark.parametrize("model", ["convnet", "running-mean"])
def test_eval_in_between(model: str) -> None:
    case = MODELS[model]

    def evaluate(w: World) -> Tensor:
        w.model.eval()
        with torch.no_grad():
            result = w.model(case.batch(50)[0])
        w.model.train()
        return result

    twins = Twins(lambda: world(model=model))
    for i in range(STEPS):
        twins.step(*case.batch(i))
        twins.both(evaluate)
    twins.finish(captures=1)


def test_training_in_eval_mode() -> None:
    """A step on a model in eval mode is another capture, and the first one stays cached."""
    twins = Twins(lambda: world(model="convnet"))
    for i, training in enumerate([True, True, False, True, False]):
        twins.both(lambda w, t=training: w.model.train(t) and None)
        twins.step(*MODELS["convnet"].batch(i))
    twins.finish(captures=2)


def test_one_layer_in_eval_mode() -> None:
    twins = Twins(lambda: world(model="convnet"))
    for i, training in enumerate([True, True, False, False]):
        twins.both(lambda w, t=training: w.model.features[1].train(t) and None)
        twins.step(*MODELS["convnet"].batch(i))
    twins.finish(captures=2)


def test_state_dict_in_between() -> None:
    def states(w: World) -> Any:
        return copy.deepcopy([w.model.state_dict(), w.optimizer.state_dict()])

    twins = Twins(lambda: world(model="convnet"))
    for i in range(STEPS):
        twins.step(*MODELS["convnet"].batch(i))
        twins.both(states)
    twins.finish(captures=1)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-momentum-foreach", "adamw-loop"])
def test_load_state_dict(optimizer: str) -> None:
    """Back to the state after the first step: other numbers in, partly, other tensors."""
    saved: dict[int, Any] = {}

    def save(w: World) -> None:
        saved[id(w)] = copy.deepcopy((w.model.state_dict(), w.optimizer.state_dict()))

    def load(w: World) -> None:
        model, state = saved[id(w)]
        w.model.load_state_dict(model)
        w.optimizer.load_state_dict(copy.deepcopy(state))

    twins = Twins(lambda: world(model="convnet", optimizer=optimizer))
    for i in range(2 * STEPS):
        twins.step(*MODELS["convnet"].batch(i))
        if i == 0:
            twins.both(save)
        if i == STEPS:
            twins.both(load)
    twins.finish(captures=1)


def test_load_state_dict_with_assign() -> None:
    def load(w: World) -> None:
        state = {name: t.detach().clone() * 0.5 for name, t in w.model.state_dict().items()}
        parameters = dict(w.model.named_parameters())
        w.model.load_state_dict(state, assign=True)
        assert all(dict(w.model.named_parameters())[n] is not p for n, p in parameters.items())
        w.optimizers[0] = OPTIMIZERS["adamw-foreach"](w.model.parameters())

    twins = Twins(lambda: world())
    for i in range(STEPS):
        twins.step(*MLP_CASE.batch(i))
        if i == 2:
            twins.both(load)
    twins.finish()


@pytest.mark.parametrize("model", ["convnet", "gpt"])
def test_resume_from_a_checkpoint_in_new_objects(model: str) -> None:
    def save(w: World) -> bytes:
        file = io.BytesIO()
        torch.save([w.model.state_dict(), w.optimizer.state_dict()], file)
        return file.getvalue()

    first = Twins(lambda: world(model=model))
    for i in range(3):
        first.step(*MODELS[model].batch(i))
    checkpoints = [save(first.eager), save(first.captured)]

    second = Twins(lambda: world(model=model), seed=99)
    for w, checkpoint in zip((second.eager, second.captured), checkpoints, strict=True):
        model_state, optimizer_state = torch.load(io.BytesIO(checkpoint))
        w.model.load_state_dict(model_state)
        w.optimizer.load_state_dict(optimizer_state)
    for i in range(3, 3 + STEPS):
        second.step(*MODELS[model].batch(i))
    # The optimizer's state came with the checkpoint, so no step creates it.
    second.finish(captures=1)


def test_add_parameter_group() -> None:
    def build() -> World:
        model = MLP()
        body = OPTIMIZERS["adamw-foreach"](model.layers.parameters())
        return World(train_step, [model], [body])

    twins = Twins(build)
    for i in range(2 * STEPS):
        twins.step(*MLP_CASE.batch(i))
        if i == 3:
            twins.both(add_head)
    # The new group's state is made by its first step.
    twins.finish(captures=3)


def add_head(w: World) -> None:
    w.optimizer.zero_grad()
    w.model.head.zero_grad()
    w.optimizer.add_param_group({"params": list(w.model.head.parameters()), "lr": 1e-3})


def test_unfreezing_and_freezing() -> None:
    twins = Twins(lambda: world(model="partial"))
    for i in range(9):
        twins.step(*MODELS["partial"].batch(i))
        if i == 2:
            twins.both(lambda w: w.model.frozen.requires_grad_(True) and None)
        if i == 5:
            twins.both(lambda w: w.model.body.requires_grad_(False) and None)
    # Frozen; unfrozen, first without and then with state; the body frozen instead.
    twins.finish(captures=3)


def test_dropout_probability_changes() -> None:
    def set_dropout(w: World, p: float) -> None:
        for module in w.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = p

    twins = Twins(lambda: world(model="gpt"))
    for i in range(6):
        twins.step(*MODELS["gpt"].batch(i))
        if i in (1, 3):
            twins.both(lambda w, p=0.5 if i == 1 else 0.1: set_dropout(w, p))
    twins.finish(captures=2)


def test_weight_decay_changes() -> None:
    def set_decay(w: World) -> None:
        w.optimizer.param_groups[0]["weight_decay"] = 0.3

    twins = Twins(lambda: world(optimizer="sgd-momentum-foreach"))
    for i in range(6):
        twins.step(*MLP_CASE.batch(i))
        if i == 2:
            twins.both(set_decay)
    twins.finish()


def test_a_layer_is_replaced() -> None:
    def grow(w: World) -> None:
        torch.manual_seed(1)
        w.model.layers.append(nn.Linear(16, 16))
        w.optimizer.add_param_group({"params": list(w.model.layers[-1].parameters())})

    twins = Twins(lambda: world())
    for i in range(6):
        twins.step(*MLP_CASE.batch(i))
        if i == 2:
            twins.both(grow)
    twins.finish(captures=2)


def test_weights_initialised_anew_between_steps() -> None:
    def reset(w: World) -> None:
        for p in w.model.parameters():
            nn.init.normal_(p, std=0.1)

    twins = Twins(lambda: world(model="gpt"))
    for i in range(STEPS):
        twins.step(*MODELS["gpt"].batch(i))
        twins.both(reset)
    twins.finish(captures=1)


def test_averaged_model_beside_the_training() -> None:
    def build() -> World:
        built = world(model="convnet")
        built.extra["average"] = torch.optim.swa_utils.AveragedModel(built.model)
        return built

    twins = Twins(build)
    for i in range(STEPS):
        twins.step(*MODELS["convnet"].batch(i))
        twins.both(lambda w: w.extra["average"].update_parameters(w.model))
    twins.finish(captures=1)
    averages = [dict(w.extra["average"].named_parameters()) for w in (twins.captured, twins.eager)]
    assert_same(averages[0], averages[1], "average")


def test_reset_forgets_the_captures() -> None:
    twins = Twins(lambda: world(model="gpt"))
    for i in range(4):
        twins.step(*MODELS["gpt"].batch(i))
        if i == 1:
            twins.compiled.reset()
            assert len(twins.compiled.captures) == 0
    twins.finish(captures=1)


def test_deepcopy_of_the_model_trains_on_its_own() -> None:
    torch.manual_seed(0)
    twins = Twins(lambda: world(lambda m, o, x, y: train_step(m, o, x, y), "gpt"))
    for i in range(2):
        twins.step(*MODELS["gpt"].batch(i))
    clone: GPT = copy.deepcopy(twins.captured.model)
    before = copy.deepcopy(clone.state_dict())
    twins.step(*MODELS["gpt"].batch(2))
    assert_same(clone.state_dict(), before, "clone")
