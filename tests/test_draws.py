"""Random numbers of Python and numpy, drawn inside a step, against eager: values and generators."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable
from random import random as imported
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from refusal import marked_lines

COUNT = 8


class Private:
    """Generators of the program's own."""

    def __init__(self) -> None:
        self.python = random.Random(1)
        self.legacy = numpy.random.RandomState(2)
        self.numpy = numpy.random.default_rng(3)

    def states(self) -> list[Any]:
        return [
            self.python.getstate(),
            str(self.legacy.get_state(legacy=False)),
            str(self.numpy.bit_generator.state),
        ]


Use = Callable[[Private, Tensor], Any]

# What a step does with its generators and a tensor of 4 by 3, and how many graphs eight calls need.
USES: dict[str, tuple[Use, int]] = {
    "factor": (lambda p, x: x * random.random(), 1),
    "imported by name": (lambda p, x: x * imported(), 1),
    "expanded arguments": (lambda p, x: x * random.uniform(*(0.5, 2.0)), 1),
    "keywords": (lambda p, x: x * numpy.random.normal(loc=1.0, scale=0.1), 1),
    "mixup": (lambda p, x: _mixed(x, numpy.random.beta(0.4, 0.4)), 1),
    "gauss, of which two are drawn at once": (lambda p, x: x * random.gauss(0, 1), 1),
    "legacy normal, of which two are drawn at once": (lambda p, x: x * numpy.random.randn(), 1),
    "integers": (lambda p, x: x * random.randint(1, 9) + numpy.random.randint(5), 1),
    "arguments that are drawn": (lambda p, x: x * random.uniform(random.random(), 2), 1),
    "decision": (lambda p, x: x * 2 if random.random() < 0.5 else x, 2),
    "draws in one branch": (
        lambda p, x: x * random.uniform(0.5, 2) if random.random() < 0.5 else x + random.random(),
        2,
    ),
    "threshold of numpy": (lambda p, x: x * 2 if numpy.random.rand(1) < 0.5 else x, 2),
    "size": (lambda p, x: x[: random.randint(1, 3)], 2),
    "choice of numbers": (lambda p, x: x * random.choice([0.5, 1.0, 2.0]), 1),
    "choice of functions": (lambda p, x: random.choice([torch.sin, torch.cos])(x), 2),
    "choices": (lambda p, x: x * sum(random.choices([0.5, 1.0, 2.0], weights=[1, 2, 3], k=2)), 1),
    "sample": (lambda p, x: x[:, random.sample(range(2), 1)], 2),
    "shuffled list": (lambda p, x: _shuffled(x), 2),
    "permutation": (lambda p, x: x[numpy.random.permutation(4)], 1),
    "choice by weights": (
        lambda p, x: x[torch.from_numpy(numpy.random.choice(4, size=(3,), p=[0.1, 0.2, 0.3, 0.4]))],
        1,
    ),
    "tensor": (lambda p, x: x + torch.tensor(numpy.random.rand(4, 3)).float(), 1),
    "legacy tensor": (lambda p, x: x + torch.FloatTensor(numpy.random.normal(0, 1, (4, 3))), 1),
    "tensor over an array": (
        lambda p, x: x + torch.from_numpy(numpy.random.randn(4, 3).astype(numpy.float32)).mul_(2),
        1,
    ),
    "tensor of integers": (lambda p, x: x[torch.LongTensor(numpy.random.randint(0, 4, 4))], 1),
    "list of integers": (lambda p, x: x[torch.tensor([random.randrange(4) for _ in range(3)])], 1),
    "tensor with gradient": (lambda p, x: _differentiated(x), 1),
    "computed by numpy": (
        lambda p, x: x * numpy.sqrt(1 - numpy.random.rand() ** 2) + numpy.random.rand(3).mean(),
        1,
    ),
    "clipped": (lambda p, x: x * numpy.clip(numpy.random.beta(0.5, 0.5), 0.3, 0.7), 1),
    "array of draws": (
        lambda p, x: x * torch.from_numpy(numpy.array([random.random() for _ in range(3)])).float(),
        1,
    ),
    "items": (lambda p, x: x * numpy.random.rand(3)[1] + numpy.random.rand(2, 2)[0, 1].item(), 1),
    "rounded": (lambda p, x: x[: round(1 + 2 * random.random())], 2),
    "converted": (
        lambda p, x: x * float(numpy.random.randint(3)) * float(numpy.random.rand(1)[0]),
        1,
    ),
    "private": (
        lambda p, x: x * p.python.random() + p.legacy.rand() * torch.tensor(p.numpy.normal(size=3)),
        1,
    ),
    "seeded": (lambda p, x: _seeded(x), 1),
    "with torch's": (lambda p, x: x * random.random() + torch.rand(3) * numpy.random.rand(), 1),
    "returned": (
        lambda p, x: [x * 1, random.random(), random.randint(0, 9), 1 - random.random()],
        1,
    ),
}


def _mixed(x: Tensor, lam: float) -> Tensor:
    order = torch.randperm(4)
    return lam * x + (1 - lam) * x[order]


def _shuffled(x: Tensor) -> Tensor:
    factors = [x * 2, x.sin()]
    random.shuffle(factors)
    return factors[0] - factors[1]


def _differentiated(x: Tensor) -> Tensor:
    noise = torch.tensor(numpy.random.rand(4, 3), requires_grad=True)
    (gradient,) = torch.autograd.grad((x.detach() * noise.sin()).sum(), [noise])
    return x + gradient.float()


def _seeded(x: Tensor) -> Tensor:
    random.seed(5)
    numpy.random.seed(6)
    return x * random.random() + numpy.random.rand()


def states() -> list[Any]:
    """The states of all generators."""
    numpys = str(numpy.random.get_state(legacy=False)), numpy.random.get_state()[1].tolist()
    return [random.getstate(), *numpys, torch.get_rng_state().tolist()]


def seeded() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    random.seed(1)
    numpy.random.seed(2)
    model = nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trained(use: Use, compiled: bool) -> tuple[list[Any], list[Any], int]:
    """What all calls give, all that there is afterwards, and how many graphs there are."""
    model, optimizer = seeded()
    private = Private()

    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        used = use(private, model(x))
        value = used[0] if isinstance(used, list) else used
        loss = value.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, used

    run: Any = graphopt.compile(step, pipeline="none", verify="off") if compiled else step
    found = []
    for _ in range(COUNT):
        found.append((run(model, optimizer, torch.randn(4, 3)), *states(), *private.states()))
    left = [p.detach() for p in model.parameters()]
    return found, left, len(run.captures) if compiled else 0


def assert_alike(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(actual, Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_alike(one, other)
    else:
        assert actual == expected


@pytest.mark.parametrize("name", USES)
def test_draws_are_those_of_eager(name: str) -> None:
    use, graphs = USES[name]
    expected, left, _ = trained(use, compiled=False)
    actual, left_here, count = trained(use, compiled=True)
    assert_alike(actual, expected)
    assert_alike(left_here, left)
    assert count == graphs


def test_the_whole_pipeline_proves_and_saves_a_step_that_draws(tmp_path: Any) -> None:
    """With the default passes, and the graph in a file."""

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        noise = torch.FloatTensor(numpy.random.normal(0, 1, (4, 3)))
        loss = (model(x * random.random()) - noise).square().mean() * random.randint(1, 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    found = []
    for make in (lambda f: f, graphopt.compile):
        model, optimizer = seeded()
        run = make(step)
        losses = [run(model, optimizer, torch.randn(4, 3)) for _ in range(4)]
        found.append(
            (torch.stack(losses).detach(), states(), [*map(torch.clone, model.parameters())])
        )
    assert_alike(*found)
    kinds = [spec.kind for spec in run.captures[0].inputs]
    assert kinds[-3:] == ["draw"] * 3
    assert "draw" in graphopt.readable.graph_text(run.graph_module)
    path = tmp_path / "step.pt"
    graphopt.saved.save_graph(run.graph_module, path)
    loaded = graphopt.saved.load_graph(path)
    kinds = [node.meta["kind"] for node in loaded.graph.find_nodes(op="placeholder")]
    assert kinds[-3:] == ["draw"] * 3


def decides_and_draws(model: Any, optimizer: Any, x: Tensor) -> Any:
    """Decisions by values of tensors among draws, of which each branch has others."""
    scale = random.random()
    noise = torch.from_numpy(numpy.random.rand(4, 3)).float()
    out = model(x * scale + noise)
    loss = out.square().mean()
    if out.sum() > 0:
        loss = loss * random.uniform(0.5, 2) + torch.rand(())
    else:
        loss = loss + numpy.random.rand() * torch.rand(()) + random.random()
    if random.random() < 0.3:
        loss = loss * 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss, scale


def test_a_failed_assumption_draws_nothing_twice(caplog: pytest.LogCaptureFixture) -> None:
    """The other branch's graph begins anew, and later goes on from what is there."""
    caplog.set_level(logging.INFO, logger="graphopt")
    found = []
    for make in (lambda f: f, graphopt.compile):
        model, optimizer = seeded()
        run = make(decides_and_draws)
        calls = [(run(model, optimizer, torch.randn(4, 3)), states()) for _ in range(30)]
        found.append((calls, [*map(torch.clone, model.parameters())]))
    assert_alike(*found)
    assert len(run.captures) == 4
    assert "another branch goes on from" in caplog.text


class WentWrongError(Exception):
    pass


def test_an_error_leaves_the_generators() -> None:
    """In the function that a call runs, in the step itself, and in a capture."""
    model, optimizer = seeded()
    raises = [False]

    def look(loss: Tensor) -> None:
        if raises[0]:
            raise WentWrongError

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = (model(x) * random.random() + numpy.random.rand()).square().mean()
        graphopt.callback(look, loss)
        if loss > 1e6:
            raise WentWrongError
        loss.backward()
        optimizer.step()
        return loss

    run = graphopt.compile(step)
    run(model, optimizer, torch.ones(4, 3))
    before = states()
    raises[0] = True
    with pytest.raises(WentWrongError):
        run(model, optimizer, torch.ones(4, 3))
    assert states() == before
    raises[0] = False
    with pytest.raises(WentWrongError):
        run(model, optimizer, torch.full((4, 3), 1e6))
    assert states() == before


def test_a_refused_capture_leaves_the_generators_and_the_step_can_run_eagerly() -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss = (model(x) * random.random() + numpy.random.rand()).square().mean()
        loss.backward()
        optimizer.step()
        return {repr(loss.item()): 1}

    model, optimizer = seeded()
    before = states()
    with pytest.raises(graphopt.CaptureError):
        graphopt.compile(step)(model, optimizer, torch.ones(4, 3))
    assert states() == before
    found = []
    for run in (step, graphopt.compile(step, fallback="eager")):
        model, optimizer = seeded()
        found.append(([run(model, optimizer, torch.ones(4, 3)) for _ in range(3)], states()))
    assert_alike(*found)


def test_what_is_drawn_between_calls_is_seen() -> None:
    """A call draws from where the generators are then, also where it is captured anew."""

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) * random.random()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = []
    for make in (lambda f: f, graphopt.compile):
        model, optimizer = seeded()
        run, losses = make(step), []
        for length in (4, 4, 5, 4, 5):
            random.random()
            losses.append(run(model, optimizer, torch.ones(length, 3)))
        found.append(([loss.detach() for loss in losses], states()))
    assert_alike(*found)


def test_another_generator_in_the_same_place_is_followed() -> None:
    found = []
    for make in (lambda f: f, graphopt.compile):
        model, _ = seeded()
        private = Private()

        def step(model: Any, x: Tensor) -> Tensor:
            drawn = private.numpy.random() + private.python.random() + private.legacy.rand()  # noqa: B023
            return model(x) * drawn

        run, results = make(step), []
        for index in range(6):
            if index % 2:
                private.numpy = numpy.random.default_rng(index)
                private.legacy = numpy.random.RandomState(index)
                private.python = random.Random(index)
            results.append(run(model, torch.ones(4, 3)).detach())
        found.append((results, private.states()))
    assert_alike(*found)


def test_capture_leaves_the_generators() -> None:
    model, optimizer = seeded()
    before = states()
    captured = graphopt.capture(decides_and_draws, model, optimizer, torch.ones(4, 3))
    assert states() == before
    assert [spec.kind for spec in captured.inputs].count("draw") == 5


def goes_on_with_memory_that_was_changed(x: Tensor) -> Any:
    array = numpy.random.rand(4, 3)
    torch.from_numpy(array).mul_(2)
    return x + torch.tensor(array).float()  # HERE


def shuffles_an_array(x: Tensor) -> Any:
    order = numpy.arange(4)
    tensor = torch.from_numpy(order)
    numpy.random.shuffle(order)  # HERE
    x = x[tensor]
    return x[order]


def takes_the_state(x: Tensor) -> Any:
    state = random.getstate()  # HERE
    value = random.random()
    random.setstate(state)
    return x * value


def draws_by_a_tensor(x: Tensor) -> Any:
    return x * numpy.random.normal(0, x.std().item())  # HERE


def hands_it_to_other_code(x: Tensor) -> Any:
    return x * math.fsum(numpy.random.rand(3))  # HERE


def makes_a_generator(x: Tensor) -> Any:
    rng = numpy.random.default_rng(3)
    return x * rng.random()  # HERE


def draws_unseen(x: Tensor) -> Any:
    return x * next(iter(random.random, 2))  # HERE


def draws_unseen_besides(x: Tensor) -> Any:
    return x * random.random() * next(iter(random.random, 2))


KEPT: list[Any] = []

REFUSED: list[tuple[Callable[[Tensor], Any], str]] = [
    (goes_on_with_memory_that_was_changed, "in place"),
    (shuffles_an_array, "in whose memory a tensor"),
    (takes_the_state, "random.getstate()"),
    (draws_by_a_tensor, "the value of a tensor"),
    (hands_it_to_other_code, "plain number"),
    (makes_a_generator, "that it makes itself"),
    (draws_unseen, "in a way that is not seen"),
    (draws_unseen_besides, "in a way that is not seen"),
]


KEEPS: dict[str, Callable[[list[Any], Any], None]] = {
    "a number": lambda kept, generators: kept.append(random.random()),
    "an integer": lambda kept, generators: kept.append(random.randint(1, 5)),
    "a number of numpy": lambda kept, generators: kept.append(numpy.random.rand()),
    "one of a private generator": lambda kept, generators: kept.append(generators.python.random()),
    "what is computed from it": lambda kept, generators: kept.append(2 * random.random() + 1),
    "several": lambda kept, generators: kept.extend([random.random(), random.random()]),
}


def keeping(keep: Callable[[list[Any], Private], None], compiled: bool) -> tuple[Any, ...]:
    """Losses, what the list has, and where the generators are after all calls."""
    model, optimizer = seeded()
    kept: list[Any] = []
    private = Private()

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        keep(kept, private)
        return loss.detach()

    run = graphopt.compile(step) if compiled else step
    losses = [run(torch.ones(4, 3)).item() for _ in range(COUNT)]
    return losses, kept, list(map(type, kept)), states(), private.states()


@pytest.mark.parametrize("name", KEEPS)
def test_numbers_are_kept_in_a_list(name: str) -> None:
    found = [keeping(KEEPS[name], compiled) for compiled in (True, False)]
    assert found[0] == found[1]


@pytest.mark.parametrize(("use", "word"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_refused(use: Callable[[Tensor], Any], word: str) -> None:
    model, _ = seeded()
    before = copy.deepcopy(states())

    def step(model: Any, x: Tensor) -> Any:
        return use(model(x))

    with pytest.raises(graphopt.CaptureError) as caught:
        graphopt.compile(step)(model, torch.ones(4, 3))
    assert word in str(caught.value)
    assert states() == before
    kept, KEPT[:] = list(KEPT), []
    assert not kept
    marked = marked_lines(use)
    if len(marked) == 1:
        assert f"test_draws.py:{marked[0]} " in str(caught.value)


def test_too_many_outcomes_name_the_draw() -> None:
    model, _ = seeded()

    def step(model: Any, x: Tensor) -> Any:
        return model(x).repeat(random.randint(1, 100), 1).sum()

    run = graphopt.compile(step, max_graphs=4, pipeline="none", verify="off")

    def calls() -> None:
        for _ in range(20):
            run(model, torch.ones(4, 3))

    with pytest.raises(
        graphopt.CaptureError, match=r"each value of random\.randint\(\) at .*test_"
    ):
        calls()


def test_a_callback_that_draws_before_the_step_does_is_refused() -> None:
    """The step's draws are made before the graph runs: the order would be another one."""
    model, _ = seeded()

    def step(model: Any, x: Tensor, late: bool) -> Any:
        first = random.random()
        graphopt.callback(lambda value: random.random(), x)
        return model(x) * first * (random.random() if late else 1.0)

    run = graphopt.compile(step)
    expected = seeded() and [step(model, torch.ones(4, 3), False) for _ in range(3)], states()
    actual = seeded() and [run(model, torch.ones(4, 3), False) for _ in range(3)], states()
    assert_alike([v.detach() for v in actual[0]], [v.detach() for v in expected[0]])
    assert actual[1] == expected[1]
    before = states()
    with pytest.raises(graphopt.GraphOptError, match="a generator of its own"):
        run(model, torch.ones(4, 3), True)
    assert states() == before


def test_names_that_no_draw_has_are_left_alone() -> None:
    """A class of the program's own that looks like a generator."""

    class Loaded(random.Random):
        def random(self) -> float:
            return 0.5

    loaded = Loaded()
    model, _ = seeded()
    run = graphopt.compile(lambda model, x: F.relu(model(x)) * loaded.random())
    assert torch.equal(run(model, torch.ones(4, 3)), F.relu(model(torch.ones(4, 3))) * 0.5)
