"""Cases that report progress, and decide by what they have recorded: meters, windows, confusion
matrices."""

from __future__ import annotations

import io
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import graphopt

from .case import Case, cured, mlp, refused, repeated


class SmoothedValue:
    """The windowed meter of torchvision's references and detectron."""

    def __init__(self, window_size: int = 3) -> None:
        self.deque: deque[float] = deque(maxlen=window_size)
        self.total, self.count = 0.0, 0
        self.fmt = "{median:.4f} ({global_avg:.4f})"

    def update(self, value: float, n: int = 1) -> None:
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self) -> Any:
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self) -> float:
        return self.total / self.count

    def __str__(self) -> str:
        return self.fmt.format(median=self.median, global_avg=self.global_avg)


class MetricLogger:
    def __init__(self) -> None:
        self.meters: defaultdict[str, SmoothedValue] = defaultdict(SmoothedValue)

    def update(self, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = value.item()
            assert isinstance(value, (float, int))
            self.meters[name].update(value)

    def __str__(self) -> str:
        return "  ".join(f"{name}: {meter}" for name, meter in self.meters.items())


def detect(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Trains a detector; returns its losses."""
    out = model(x)
    loss_dict = {"loss_classifier": F.cross_entropy(out[:, :3], y),
                 "loss_box_reg": F.smooth_l1_loss(out[:, 3], x[:, 0])}  # fmt: skip
    losses = sum(loss for loss in loss_dict.values())
    optimizer.zero_grad()
    losses.backward()  # type: ignore[union-attr]
    optimizer.step()
    return {"loss": losses, **loss_dict}  # type: ignore[dict-item]


def detecting(inside: bool) -> Case:
    """Detection with a logger of losses that are printed, inside of the step or behind it."""
    model, logger, said = mlp(6, 16, 4), MetricLogger(), io.StringIO()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)

    def report(losses: dict[str, Tensor]) -> None:
        logger.update(**losses)
        logger.update(lr=optimizer.param_groups[0]["lr"])
        print(f"Epoch: [0] {logger}", file=said)

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        report(detect(model, optimizer, x, y))

    calls = repeated(model, optimizer, draw=lambda: (torch.randn(5, 6), torch.randint(3, (5,))))
    state = [model, optimizer, said]
    if inside:
        return Case(step, calls, state)
    return Case(detect, calls, state, lambda index, losses: report(losses))


@refused("makes a text of")
def detection_with_metric_logger() -> Case:
    """Detection as in torchvision's references: smoothed losses, printed with their medians."""
    return detecting(inside=True)


@cured
def detection_with_metric_logger_cured() -> Case:
    """Detection that returns its losses; the logger runs outside the step."""
    return detecting(inside=False)


def segmenting(call: Callable[..., None]) -> Case:
    """Segmentation with a numpy evaluator that the step runs by `call`."""
    model, confusion, said = nn.Conv2d(1, 3, 3, padding=1), np.zeros((3, 3)), io.StringIO()
    optimizer = SGD(model.parameters(), lr=0.1)

    def evaluate(output: Tensor, target: Tensor, loss: float) -> None:
        nonlocal confusion
        pred, truth = np.argmax(output.data.cpu().numpy(), axis=1), target.cpu().numpy()
        label = 3 * truth[truth < 3].astype("int") + pred[truth < 3]
        confusion += np.bincount(label, minlength=9).reshape(3, 3)
        right = np.diag(confusion)
        iou = np.nanmean(right / (confusion.sum(axis=1) + confusion.sum(axis=0) - right))
        print("Acc:{}, mIoU:{}, loss: {:.3f}".format(right.sum(), iou, loss), file=said)  # noqa: UP032

    def step(model: Any, optimizer: Any, image: Tensor, target: Tensor) -> Any:
        output = model(image)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        call(evaluate, output, target, loss.item())
        return loss.item()

    def images() -> tuple[Tensor, Tensor]:
        return torch.randn(2, 1, 4, 4), torch.randint(3, (2, 4, 4))

    calls = repeated(model, optimizer, draw=images)
    return Case(step, calls, [model, optimizer, said, confusion])


@refused("computes with an array of numpy's")
def segmentation_with_confusion_matrix() -> Case:
    """Segmentation with a numpy evaluator in the step, as in published DeepLab."""
    return segmenting(lambda function, *values: function(*values))


@cured
def segmentation_with_confusion_matrix_cured() -> Case:
    """Segmentation whose evaluator is a callback on each prediction."""
    return segmenting(graphopt.callback)


def plateau(inside: bool) -> Case:
    """A plateau schedule by hand, inside of the step or behind it."""
    model, said = mlp(4, 16, 1), io.StringIO()
    optimizer = SGD(model.parameters(), lr=0.1)
    losses, rates = list[float](), list[float]()

    def train(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def record(loss: float) -> Any:
        losses.append(loss)
        if len(losses) >= 2 and losses[-1] > np.mean(losses[-2:]) * 0.99:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            print("reducing lr to", optimizer.param_groups[0]["lr"], file=said)
        rates.append(optimizer.param_groups[0]["lr"])
        print(f"{len(losses)}: {loss:.4f} of {np.mean(losses[-3:]):.4f}", file=said)
        return np.mean(losses[-3:])

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        return record(train(model, optimizer, x, y))

    calls = repeated(model, optimizer, draw=lambda: (torch.randn(6, 4), torch.randn(6, 1)))
    state = [model, optimizer, said, losses, rates]
    if inside:
        return Case(step, calls, state)
    return Case(train, calls, state, lambda index, loss: record(loss))


@refused("computes with an array of numpy's")
def rate_by_windows_of_losses() -> Case:
    """A plateau schedule by hand: means of recorded losses decide the learning rate."""
    return plateau(inside=True)


@cured
def rate_by_windows_of_losses_cured() -> Case:
    """A plateau schedule outside the step, which returns its loss."""
    return plateau(inside=False)
