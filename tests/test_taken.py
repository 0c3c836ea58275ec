"""Steps that take their batches themselves, `next(loader)`: everything compared with eager calls,
the random number generators and what is left in the iterators as well."""

from __future__ import annotations

import copy
import itertools
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import graphopt
from gloo import Pool
from graphopt.errors import CaptureError

Pair = namedtuple("Pair", "x y")


class Noisy(Dataset[Any]):
    """Draws from all generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3) * random.random() + numpy.random.rand(), torch.ones(1) * index


class Loop:
    """A training that holds what it takes batches from.

    Args:
        make: the iterator.
    """

    def __init__(self, make: Callable[[], Any] = lambda: None) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.loader: Any = loader()
        self.batches = make()
        self.other = cycled(loader())
        self.epoch = self.calls = 0
        self.kept: Any = None

    def update(self, x: Tensor, y: Tensor) -> float:
        loss = (self.model(x) - y).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def once(self) -> Any:
        x, y = next(self.batches)
        return self.update(x, y)


def loader(count: int = 10, size: int = 4, workers: int = 0) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(count, 3), torch.randn(count, 1))
    return DataLoader(data, size, shuffle=True, num_workers=workers)


def cycled(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def pairs(count: int = 12) -> list[Any]:
    return [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(count)]


def xs_and_ys() -> Iterator[Any]:
    return zip(*pairs(3), strict=True)


def of_all_kinds() -> Iterator[Any]:
    for index in itertools.count():
        array = numpy.random.rand(4, 1).astype("float32")
        yield {"x": torch.randn(4, 3), "y": [array, (index, random.random(), None, True)]}


def windows() -> Iterator[Any]:
    """Two views of one tensor, as of a text and the text that follows; and one tensor twice."""
    for index in itertools.count():
        rows = torch.randn(5, 3)
        yield (rows[:-1], rows[1:, :1]) if index % 2 else (rows, rows[:, :1])


class OfKinds(Loop):
    def once(self) -> Any:
        batch = next(self.batches)
        array, (index, factor, nothing, flag) = batch["y"]
        assert nothing is None and flag
        given = {key: value for key, value in batch.items() if key == "x"}
        return self.update(given["x"] * factor + index, torch.from_numpy(array))


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    factor: float

    def to(self, device: str) -> Batch:
        return Batch(self.x.to(device), self.y.to(device), self.factor)


class OfObjects(Loop):
    def once(self) -> Any:
        batch = next(self.batches)[0].to("cpu")
        return self.update(batch.x * batch.factor, batch.y)


class Named(Loop):
    def once(self) -> Any:
        batch = next(self.batches)
        return self.update(batch.x, batch.y)


class Anew(Loop):
    """Begins anew where the loader is at its end."""

    def once(self) -> Any:
        try:
            x, y = next(self.batches)
        except StopIteration:
            self.epoch += 1
            self.batches = iter(self.loader)
            x, y = next(self.batches)
        return self.update(x, y), self.epoch


class First(Loop):
    def once(self) -> Any:
        x, y = next(iter(self.loader))
        return self.update(x, y)


class Epoch(Loop):
    def once(self) -> Any:
        losses = [self.update(x, y) for x, y in self.loader]
        for index, (x, y) in enumerate(self.loader):
            losses.append(self.update(nn.functional.dropout(x), y))
            print("loss", losses[-1])
            if index == 1:
                break
        return sum(losses) / len(losses)


class Scheduled(Loop):
    """An epoch whose scheduler steps with each batch, and which keeps what the rates are then."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.kept = []

    def once(self) -> Any:
        for x, y in self.loader:
            self.update(x, y)
            self.scheduler.step()
            self.kept.append(self.scheduler.get_last_lr()[0])
        return self.kept[-1]


class OfRate(Scheduled):
    """Whose batches depend on the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = self.scaled()

    def scaled(self) -> Iterator[Any]:
        while True:
            yield torch.ones(4, 3) * self.scheduler.last_epoch, torch.ones(4, 1)

    def once(self) -> Any:
        for _ in range(2):
            x, y = next(self.batches)
            self.update(x, y)
            self.scheduler.step()


class CallsBack(Loop):
    def once(self) -> Any:
        graphopt.callback(self.note)
        x, y = next(self.batches)
        return self.update(x, y)

    def note(self) -> None:
        self.epoch += 1


class LoopOver(Loop):
    def once(self) -> Any:
        for index, (x, y) in enumerate(self.batches):
            loss = self.update(x, y)
            if index == 2:
                return loss
        return None


class Several(Loop):
    def once(self) -> Any:
        for _ in range(3):
            x, y = next(self.batches)
            loss = self.update(x, y)
        return loss


class EveryThird(Loop):
    def once(self) -> Any:
        self.calls += 1
        x, y = next(self.batches)
        loss = self.update(x, y)
        if self.calls % 3 == 0:
            x, y = next(self.other)
            loss += self.update(x, y)
        return loss


class AnyOf(Loop):
    def once(self) -> Any:
        x, y = next(self.batches) if random.random() < 0.5 else next(self.other)
        return self.update(x * random.random(), y)


class Keeps(Loop):
    def once(self) -> Any:
        x, y = next(self.batches)
        self.kept = x
        return self.update(x, y), y


class Ahead(Loop):
    """Takes the batch of the next call."""

    def once(self) -> Any:
        if self.kept is None:
            return None
        x, y = self.kept
        loss = (self.model(x) - y).square().mean()
        self.kept = next(self.batches)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Ended(Loop):
    def once(self) -> Any:
        batch = next(self.batches, None)
        if batch is None:
            return self.model(torch.ones(3)).detach()
        return self.update(*batch)


class Given(Loop):
    """Gives it to the step."""

    def once(self, batches: Any) -> Any:
        x, y = next(batches)
        return self.update(x, y)


class BehindNoise(Loop):
    def once(self) -> Any:
        noise = torch.randn(4, 3)
        x, y = next(self.batches)
        return self.update(x + noise, y)


class Numbered:
    """An iterator with code of the program's."""

    def __init__(self) -> None:
        self.items, self.index = pairs(20), 0

    def __next__(self) -> Any:
        self.index += 1
        return self.items[self.index - 1]


MAKE: dict[str, Callable[[], Loop]] = {
    "cycled": lambda: Loop(lambda: cycled(loader())),
    "loader": lambda: Loop(lambda: iter(loader(48))),
    "a loader that draws": lambda: Loop(lambda: cycled(DataLoader(Noisy(), 4, shuffle=True))),
    "a list": lambda: Loop(lambda: iter(pairs())),
    "itertools": lambda: Loop(lambda: itertools.cycle(zip(*xs_and_ys(), strict=True))),
    "code": lambda: Loop(Numbered),
    "other shapes": lambda: Loop(lambda: iter([(x[: 2 + i % 3], y[: 2 + i % 3])
                                               for i, (x, y) in enumerate(pairs())])),
    "all kinds": lambda: OfKinds(of_all_kinds),
    "a named tuple": lambda: Named(lambda: (Pair(*each) for each in pairs())),
    "objects": lambda: OfObjects(lambda: ([Batch(*each, i / 2)] for i, each in enumerate(pairs()))),
    "anew": lambda: Anew(lambda: iter(loader())),
    "anew, by workers": lambda: Anew(lambda: iter(loader(workers=1))),
    "the first": First,
    "an epoch": Epoch,
    "an epoch with a scheduler": Scheduled,
    "a loop over an iterator": lambda: LoopOver(lambda: cycled(loader())),
    "several": lambda: Several(lambda: cycled(loader())),
    "every third": lambda: EveryThird(lambda: cycled(loader())),
    "any of two": lambda: AnyOf(lambda: cycled(loader())),
    "keeps": lambda: Keeps(lambda: cycled(loader())),
    "ended": lambda: Ended(lambda: iter(pairs(5))),
    "views of one tensor": lambda: Loop(windows),
    "views, kept": lambda: Keeps(windows),
    "behind noise": lambda: BehindNoise(lambda: itertools.cycle(pairs(3))),
}  # fmt: skip


def trained(make: Callable[[], Loop], captured: bool, calls: int = 9) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    loop = make()
    step = graphopt.compile(loop.once) if captured else loop.once
    left: list[Any] = [step() for _ in range(calls)]
    left += [loop.kept, loop.epoch, *loop.model.state_dict().values(), torch.get_rng_state()]
    return [*left, random.getstate(), numpy.random.get_state()[1].tolist()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_the_same_as_eager(make: Callable[[], Loop]) -> None:
    assert all(map(same, trained(make, True), trained(make, False)))


def test_of_one_shape_one_graph() -> None:
    loop = Loop(lambda: iter(pairs()))
    step = graphopt.compile(loop.once)
    for _epoch in range(3):
        loop.batches = iter(pairs(3))
        for _ in range(3):
            step()
    assert len(step.captures) == 1


class Holder:
    """What holds an iterator, and is made anew."""

    def __init__(self, factor: int) -> None:
        self.batches = iter([(torch.ones(4, 3) * factor, torch.ones(4, 1))] * 3)


def test_an_object_made_anew_has_an_iterator_of_its_own() -> None:
    class Held(Loop):
        def once(self) -> Any:
            x, y = next(self.kept.batches)
            return self.update(x, y), x

    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        loop = Held()
        step = graphopt.compile(loop.once) if captured else loop.once
        for index in range(7):
            if index % 3 == 0:
                loop.kept = Holder(index + 1)
            found.append(step())
    assert all(map(same, found[:7], found[7:]))


@pytest.mark.parametrize("ended", [StopIteration, Exception])
def test_an_iterator_of_a_list_begins_anew(ended: type[Exception]) -> None:
    """The first call has none: `next(None)` raises."""

    class Begun(Loop):
        def once(self) -> Any:
            try:
                x, y = next(self.batches)
            except ended:
                self.batches = iter(self.kept)
                x, y = next(self.batches)
            return self.update(x, y), x

    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        loop = Begun()
        loop.kept, loop.batches = pairs(3), None if ended is Exception else iter(())
        step = graphopt.compile(loop.once) if captured else loop.once
        found += [(step(), len(list(copy.copy(loop.batches)))) for _ in range(8)]
    assert all(map(same, found[:8], found[8:]))


@pytest.mark.parametrize("captured", [False, True])
def test_the_end_is_raised(captured: bool) -> None:
    loop = Loop(lambda: iter(pairs(3)))
    step = graphopt.compile(loop.once) if captured else loop.once
    for _ in range(3):
        step()
    with pytest.raises(StopIteration):
        step()


def test_an_iterator_among_the_arguments() -> None:
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        loop, batches = Given(), iter(pairs())
        step = graphopt.compile(loop.once) if captured else loop.once
        ends.append([step(batches) for _ in range(4)] + [len(list(batches))])
    assert ends[0] == ends[1]


def reads_model(loop: Loop) -> Iterator[Any]:
    while True:
        yield torch.ones(4, 3), loop.model(torch.ones(4, 3)).detach()


def counts(loop: Loop) -> Iterator[Any]:
    while True:
        loop.epoch += 1
        yield torch.ones(4, 3), torch.ones(4, 1)


class ReadsEpoch(Loop):
    def once(self) -> Any:
        epoch = self.epoch
        x, y = next(self.batches)
        return self.update(x * epoch, y)


class Writes(Loop):
    def once(self) -> Any:
        x, y = next(self.batches)
        return self.update(x.mul_(2), y)


def test_code_that_uses_the_model_is_refused() -> None:
    loop = Loop()
    loop.batches = reads_model(loop)
    with pytest.raises(CaptureError, match="whose code may use what the step changes"):
        graphopt.compile(loop.once)()


def test_code_that_changes_what_the_step_has_read_is_refused() -> None:
    loop = ReadsEpoch()
    loop.batches = counts(loop)
    with pytest.raises(CaptureError, match="whose code may use what the step changes"):
        graphopt.compile(loop.once)()


def test_code_that_uses_what_a_scheduler_changes_is_refused() -> None:
    with pytest.raises(CaptureError, match="an iterator"):
        graphopt.compile(OfRate().once)()


def test_behind_a_function_of_the_programs_it_is_refused() -> None:
    with pytest.raises(CaptureError, match="behind a function on the host"):
        graphopt.compile(CallsBack(lambda: iter(pairs())).once)()


def test_a_batch_that_is_changed_in_place_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"batch\.clone\(\)"):
        graphopt.compile(Writes(lambda: iter(pairs())).once)()


def test_a_step_of_too_many_batches_is_refused() -> None:
    loop = Epoch()
    loop.loader = loader(200)
    with pytest.raises(CaptureError, match=r"more than 32 values .* in one call"):
        graphopt.compile(loop.once)()


def test_draws_in_another_order_are_refused() -> None:
    with pytest.raises(CaptureError, match="behind random numbers that the step draws with torch"):
        graphopt.compile(BehindNoise(lambda: cycled(loader())).once)()


def test_a_tensor_in_the_memory_of_a_parameter_is_refused() -> None:
    loop = Loop()
    loop.batches = iter([(loop.model.weight.detach(), torch.ones(1, 1))])
    with pytest.raises(CaptureError, match="in the memory of"):
        graphopt.compile(loop.once)()


def of_ranks(rank: int) -> bool:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    batches = pairs(4)
    taken = iter(batches)

    def step(model: Any, optimizer: Any, batch: Any = None) -> Tensor:
        x, y = next(taken) if batch is None else batch
        loss: Tensor = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    found = []
    for given in ([None] * 4, batches):
        torch.manual_seed(0)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        run = graphopt.compile(step)
        losses = [run(model, optimizer, each) for each in given]
        run.flush()
        found.append([*losses, *(each.detach().clone() for each in model.parameters())])
    return all(map(torch.equal, *found))


def test_each_rank_takes_its_own(two_ranks: Pool) -> None:
    assert two_ranks.run(of_ranks) == [True, True]


@pytest.mark.parametrize("from_outside", [False, True])
def test_beside_a_tensor_of_inference_mode(from_outside: bool) -> None:
    """As rollouts are kept; a generator of the step goes over its rows."""

    class Rollouts(Loop):
        def rows(self) -> Iterator[Tensor]:
            for begin in (0, 2):
                yield self.kept[torch.arange(2) + begin] * self.kept.mean()

        def once(self) -> Any:
            rows = self.batches if from_outside else self.rows()
            return [self.update(x, x[:, :1]) for x in rows]

    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        loop = Rollouts()
        step = graphopt.compile(loop.once) if captured else loop.once
        outcomes: list[Any] = []
        for _ in range(4):
            with torch.inference_mode():
                loop.kept = torch.randn(4, 3)
            loop.batches = loop.rows()
            try:
                outcomes.append(step())
            except CaptureError:
                outcomes.append("refused")
                break
        found.append(outcomes)
    assert found[1] == (["refused"] if from_outside else found[0])


def test_a_generator_of_the_class_of_the_step() -> None:
    """Its class holds the captured step, and that the graphs; the generator uses neither."""
    found = []
    for captured in (False, True):

        class Both:
            def forever(self) -> Iterator[Any]:
                while True:
                    yield from pairs(3)

            def step(self, loop: Any, batches: Any) -> Any:
                return loop.update(*next(batches))

        if captured:
            Both.step = graphopt.compile(Both.step)  # type: ignore[method-assign]
        torch.manual_seed(0)
        loop, both = Loop(), Both()
        batches = both.forever()
        found.append([both.step(loop, batches) for _ in range(5)])
    assert found[0] == found[1]
