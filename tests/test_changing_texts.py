"""Texts outside a step that the program changes between two calls: one graph where the step only
shows them, and one for each text where it has to know what they are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

TEXTS = ("warm", "train", "train", "", "a {x} %s", "warm")


class AverageMeter:
    """That of torch's imagenet example, as ProgressMeter."""

    def __init__(self, name: str, fmt: str = ":f") -> None:
        self.name, self.fmt = name, fmt
        self.reset()

    def reset(self) -> None:
        self.val: Any = 0
        self.avg: Any = 0
        self.sum: Any = 0
        self.count = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self) -> str:
        fmtstr = "{name} {val" + self.fmt + "} ({avg" + self.fmt + "})"
        return fmtstr.format(**self.__dict__)


class ProgressMeter:
    def __init__(self, num_batches: int, meters: Sequence[AverageMeter], prefix: str = "") -> None:
        self.batch_fmtstr = self._get_batch_fmtstr(num_batches)
        self.meters, self.prefix = meters, prefix

    def display(self, batch: int) -> None:
        entries = [self.prefix + self.batch_fmtstr.format(batch)]
        entries += [str(meter) for meter in self.meters]
        print("\t".join(entries))

    def _get_batch_fmtstr(self, num_batches: int) -> str:
        num_digits = len(str(num_batches // 1))
        fmt = "{:" + str(num_digits) + "d}"
        return "[" + fmt + "/" + fmt.format(num_batches) + "]"


class Training:
    """A small model, what the program changes, and what the step says."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.randn(4, 3)
        self.phase, self.log, self.last = "none", [], ""
        self.said: list[Any] = []
        self.number = 0

    def loss(self) -> Tensor:
        loss: Tensor = self.model(self.x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


Body = Callable[[Training], Any]


def epochs(compiled: bool, anew: bool, epochs: int) -> tuple[list[Tensor], int]:
    """The loop of torch's imagenet example."""
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batches = [(torch.randn(5, 4), torch.randint(8, (5,))) for _ in range(4)]

    def train(i: int, images: Tensor, target: Tensor, losses: Any, progress: Any) -> None:
        loss = nn.functional.cross_entropy(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 0:
            progress.display(i + 1)

    step: Any = graphopt.compile(train) if compiled else train
    losses = AverageMeter("Loss", ":.4e")
    progress = ProgressMeter(len(batches), [losses])
    for epoch in range(epochs):
        if anew:
            losses = AverageMeter("Loss", ":.4e")
            progress = ProgressMeter(len(batches), [losses], prefix=f"Epoch: [{epoch}]")
        losses.reset()
        progress.prefix = f"Epoch: [{epoch}]"
        for i, batch in enumerate(batches):
            step(i, *batch, losses, progress)
    return [p.detach() for p in model.parameters()], len(step.captures) if compiled else 0


@pytest.mark.parametrize("anew", [False, True])
def test_the_prefix_of_imagenets_progress_meter_changes_in_each_epoch(
    anew: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = epochs(False, anew, 20)
    said = capsys.readouterr().out
    found, graphs = epochs(True, anew, 20)
    assert capsys.readouterr().out == said and len(said.splitlines()) == 40
    assert all(map(torch.equal, found, expected))
    assert graphs <= 6


def trained(body: Body, compiled: bool, texts: Sequence[Any] = TEXTS) -> tuple[Any, int]:
    """What a step says, returns and leaves, and how many graphs it took."""
    training = Training()

    def call(x: Tensor) -> Any:
        return body(training)

    step: Any = graphopt.compile(call) if compiled else call
    returned = []
    for text in texts:
        for _ in range(2):
            training.phase = text
            returned.append(step(training.x))
    weight = training.model.weight.detach().tolist()
    left = (returned, training.said, training.log, training.last, training.phase, weight)
    return left, len(step.captures) if compiled else 0


def shows(t: Training) -> Any:
    loss = t.loss()
    print(t.phase, f"{t.phase:>8} loss {loss.item():.3f}", f"{t.phase}|{t.phase:6}")
    logging.getLogger("changing").warning("%s %.3f", t.phase, loss.item())
    template = "%s|%-6s"
    parts = t.phase + "!", "-" * len(t.phase), t.phase[:2]
    return template % (t.phase, t.phase), [t.phase.upper()], parts


def keeps(t: Training) -> None:
    t.loss()
    t.last = "".join([t.phase, "x"])
    t.log.append(f"<{t.phase}>")
    graphopt.callback(t.said.append, t.phase)


def appends_and_asks_how_many(t: Training) -> Any:
    t.loss()
    t.log.append(t.phase)
    print(t.log)
    return len(t.log), t.log[-1:], sorted(t.log)


def keeps_before_a_callback_changes_it(t: Training) -> None:
    t.loss()
    t.last = t.phase
    graphopt.callback(setattr, t, "phase", "changed")


def decides(t: Training) -> Any:
    t.loss()
    if t.phase == "train":
        print("training")
    return t.phase or "nothing", not t.phase, t.phase in ("warm", "x"), t.phase.startswith("w")


def looks_up(t: Training) -> Any:
    t.loss()
    named = {"warm": 1, t.phase + "s": 2}
    return named.get(t.phase), named, dict(zip([t.phase], "a", strict=True)).get("train")


def goes_through(t: Training) -> Any:
    t.loss()
    letters = ["x"]
    letters += t.phase
    first, *rest = t.phase + "ab"
    return list(t.phase), letters, first, rest, "-".join(t.phase)


def sorts(t: Training) -> Any:
    t.loss()
    rows = [SimpleNamespace(name=t.phase + "x"), SimpleNamespace(name="t")]
    items = [t.phase, "t"]
    items.sort()
    return [row.name for row in sorted(rows, key=lambda row: row.name)], items


def raises_and_catches(t: Training) -> Any:
    t.loss()
    found = []
    for function in (int, lambda text: text[2], lambda text: text.index("a"), str.format):
        try:
            found.append(function(t.phase))
        except (ValueError, IndexError, KeyError) as error:
            found.append(str(error))
    return found


def rewrites_a_list(t: Training) -> Any:
    t.loss()
    t.log[:] = [t.phase]
    return t.log[0], len(t.log)


def writes(t: Training) -> None:
    t.loss()
    print(t.phase)
    t.last = t.phase
    t.phase = "done"
    print(t.phase)


def gives_to_other_code(t: Training) -> Any:
    t.loss()
    path = Path("/tmp") / t.phase
    closed_over = [t.phase + "x"]
    graphopt.callback(lambda: t.said.append(closed_over[0]))
    return str(path), path.exists(), hash(t.phase) == hash(str(t.phase)), type(t.phase) is str


BODIES: dict[Body, int] = {
    shows: 2,
    keeps: 2,
    appends_and_asks_how_many: 4,
    keeps_before_a_callback_changes_it: 3,
    decides: 4,
    looks_up: 4,
    goes_through: 4,
    sorts: 4,
    raises_and_catches: 4,
    rewrites_a_list: 8,
    writes: 8,
    gives_to_other_code: 4,
}
"""Steps, and how many graphs they may take: there are four texts."""


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_a_step_does_with_a_text_is_what_eager_code_does(
    body: Body, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = trained(body, False)
    said = capsys.readouterr().out, [r.getMessage() for r in caplog.records]
    caplog.clear()
    found, graphs = trained(body, True)
    logged = [r.getMessage() for r in caplog.records if r.name == "changing"]
    assert (found, capsys.readouterr().out, logged) == (expected, *said)
    assert graphs <= BODIES[body]


def test_what_is_no_text_any_more_needs_another_graph() -> None:
    def body(t: Training) -> Any:
        t.loss()
        return t.phase, [t.phase]

    texts = ["a", "b", 5, "c", None, b"d", "e"]
    (expected, _), (found, graphs) = trained(body, False, texts), trained(body, True, texts)
    assert found == expected and graphs <= 5


def test_a_function_that_remembers_what_it_gave_remembers_the_text() -> None:
    @functools.lru_cache
    def title(t: Training) -> str:
        return t.phase + ":"

    def body(t: Training) -> Any:
        t.loss()
        return t.phase, title(t)

    for compiled in (False, True):
        left, _ = trained(body, compiled)
        assert [second for _, second in left[0]] == ["warm:"] * 12


def test_a_list_is_changed_itself_by_code_that_is_not_followed() -> None:
    def body(t: Training) -> Any:
        t.loss()
        t.number += 1
        items = [f"{t.number}", t.phase]
        return items.pop(0), items

    (expected, _), (found, _) = trained(body, False), trained(body, True)
    assert found == expected


def test_a_text_that_never_changes_is_a_constant() -> None:
    training = Training()
    step = graphopt.compile(lambda x: (training.loss(), print(training.phase), training.phase)[2])
    for _ in range(3):
        assert step(training.x) == "none"
    assert len(step.captures) == 1 and not step.captures[0].signature.texts
