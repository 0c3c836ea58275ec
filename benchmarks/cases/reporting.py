"""Cases that report progress, and decide by what they have recorded: meters, windows, confusion
matrices."""

from __future__ import annotations

import io
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt

from .case import STEPS, Case, cured, refused


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


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


def texts_as_numbers(said: io.StringIO) -> Tensor:
    """Texts that a case has printed, as numbers for comparison."""
    return torch.tensor(list(said.getvalue().encode()))


@refused("makes a text of")
def detection_with_metric_logger() -> Case:
    """Detection as in torchvision's references: smoothed losses, printed with their medians."""
    model, logger, said = network(6, 4), MetricLogger(), io.StringIO()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    left: list[Tensor] = []

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        out = model(x)
        loss_dict = {"loss_classifier": F.cross_entropy(out[:, :3], y),
                     "loss_box_reg": F.smooth_l1_loss(out[:, 3], x[:, 0])}  # fmt: skip
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()  # type: ignore[union-attr]
        optimizer.step()
        logger.update(loss=losses, **loss_dict)
        logger.update(lr=optimizer.param_groups[0]["lr"])
        print(f"Epoch: [0] {logger}", file=said)

    def after(index: int, result: Any) -> None:
        left[:] = [texts_as_numbers(said)]

    calls = [(model, optimizer, torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(STEPS)]
    return Case(step, calls, [model, optimizer, left], after)


@cured
def detection_with_metric_logger_cured() -> Case:
    """Detection that returns its losses; the logger runs outside the step."""
    model, logger, said = network(6, 4), MetricLogger(), io.StringIO()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    left: list[Tensor] = []

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = model(x)
        loss_dict = {"loss_classifier": F.cross_entropy(out[:, :3], y),
                     "loss_box_reg": F.smooth_l1_loss(out[:, 3], x[:, 0])}  # fmt: skip
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()  # type: ignore[union-attr]
        optimizer.step()
        return {"loss": losses, **loss_dict}  # type: ignore[dict-item]

    def after(index: int, result: Any) -> None:
        logger.update(**result)
        logger.update(lr=optimizer.param_groups[0]["lr"])
        print(f"Epoch: [0] {logger}", file=said)
        left[:] = [texts_as_numbers(said)]

    calls = [(model, optimizer, torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(STEPS)]
    return Case(step, calls, [model, optimizer, left], after)


@refused("computes with an array of numpy's")
def segmentation_with_confusion_matrix() -> Case:
    """Segmentation with a numpy evaluator in the step, as in published DeepLab."""
    model = nn.Conv2d(1, 3, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    confusion, said, left = np.zeros((3, 3)), io.StringIO(), list[Tensor]()

    def step(model: Any, optimizer: Any, image: Tensor, target: Tensor) -> Any:
        nonlocal confusion
        output = model(image)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pred, truth = np.argmax(output.data.cpu().numpy(), axis=1), target.cpu().numpy()
        label = 3 * truth[truth < 3].astype("int") + pred[truth < 3]
        confusion += np.bincount(label, minlength=9).reshape(3, 3)
        right = np.diag(confusion)
        iou = np.nanmean(right / (confusion.sum(axis=1) + confusion.sum(axis=0) - right))
        print("Acc:{}, mIoU:{}, loss: {:.3f}".format(right.sum(), iou, loss.item()), file=said)  # noqa: UP032
        return loss.item()

    def after(index: int, result: Any) -> None:
        left[:] = [texts_as_numbers(said), torch.from_numpy(confusion.copy())]

    calls = [
        (model, optimizer, torch.randn(2, 1, 4, 4), torch.randint(3, (2, 4, 4)))
        for _ in range(STEPS)
    ]
    return Case(step, calls, [model, optimizer, left], after)


@cured
def segmentation_with_confusion_matrix_cured() -> Case:
    """Segmentation whose evaluator is a callback on each prediction."""
    model = nn.Conv2d(1, 3, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    confusion, said, left = np.zeros((3, 3)), io.StringIO(), list[Tensor]()

    def evaluate(output: Tensor, target: Tensor, loss: float) -> None:
        nonlocal confusion
        pred, truth = np.argmax(output.cpu().numpy(), axis=1), target.cpu().numpy()
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
        graphopt.callback(evaluate, output, target, loss.item())
        return loss.item()

    def after(index: int, result: Any) -> None:
        left[:] = [texts_as_numbers(said), torch.from_numpy(confusion.copy())]

    calls = [
        (model, optimizer, torch.randn(2, 1, 4, 4), torch.randint(3, (2, 4, 4)))
        for _ in range(STEPS)
    ]
    return Case(step, calls, [model, optimizer, left], after)


@refused("computes with an array of numpy's")
def rate_by_windows_of_losses() -> Case:
    """A plateau schedule by hand: means of recorded losses decide the learning rate."""
    model, said = network(4, 1), io.StringIO()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, rates, left = list[float](), list[float](), list[Tensor]()

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) >= 2 and losses[-1] > np.mean(losses[-2:]) * 0.99:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            print("reducing lr to", optimizer.param_groups[0]["lr"], file=said)
        rates.append(optimizer.param_groups[0]["lr"])
        print(f"{len(losses)}: {loss.item():.4f} of {np.mean(losses[-3:]):.4f}", file=said)
        return np.mean(losses[-3:])

    def after(index: int, result: Any) -> None:
        left[:] = [texts_as_numbers(said), torch.tensor([*losses, *rates])]

    calls = [(model, optimizer, torch.randn(6, 4), torch.randn(6, 1)) for _ in range(STEPS)]
    return Case(step, calls, [model, optimizer, left], after)


@cured
def rate_by_windows_of_losses_cured() -> Case:
    """A plateau schedule outside the step, which returns its loss."""
    model, said = network(4, 1), io.StringIO()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, rates, left = list[float](), list[float](), list[Tensor]()

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def after(index: int, loss: Any) -> None:
        losses.append(loss)
        if len(losses) >= 2 and losses[-1] > np.mean(losses[-2:]) * 0.99:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            print("reducing lr to", optimizer.param_groups[0]["lr"], file=said)
        rates.append(optimizer.param_groups[0]["lr"])
        print(f"{len(losses)}: {loss:.4f} of {np.mean(losses[-3:]):.4f}", file=said)
        left[:] = [texts_as_numbers(said), torch.tensor([*losses, *rates])]

    calls = [(model, optimizer, torch.randn(6, 4), torch.randn(6, 1)) for _ in range(STEPS)]
    return Case(step, calls, [model, optimizer, left], after)
