"""Cases of image models and training tricks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .case import Case, case, mlp, repeated, trains, trains_all


class BasicBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or width != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), BasicBlock(8, 8), BasicBlock(8, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def labelled() -> tuple[Tensor, Tensor]:
    return torch.rand(4, 3, 8, 8), torch.randint(0, 5, (4,))


def classify(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def warm_up_then_cosine(optimizer: Any) -> SequentialLR:
    schedules = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 10)]
    return SequentialLR(optimizer, schedules, [2])


trains(
    resnet, SGD, labelled, warm_up_then_cosine,
    name="resnet_with_schedule", lr=0.1, momentum=0.9, weight_decay=5e-4,
)(classify)  # fmt: skip


@trains(resnet, Adam, labelled)
def accuracy_returned(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Image classification that returns loss and correct answers as numbers."""
    model.train()
    optimizer.zero_grad()
    outputs = model(x)
    _, preds = torch.max(outputs, 1)
    loss = F.cross_entropy(outputs, y)
    loss.backward()
    optimizer.step()
    return loss.item() * x.size(0), torch.sum(preds == y.data).item()


def classified_by(criterion: Any) -> Case:
    """Classification by a loss that the step knows by its closure."""
    model = resnet()
    optimizer = AdamW(model.parameters())

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Case(step, repeated(model, optimizer, draw=labelled), [model, optimizer])


@case
def class_weights() -> Case:
    """A loss with a buffer of class weights."""
    return classified_by(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])))


class FocalLoss:
    """The focal loss as a plain class that holds a tensor."""

    def __init__(self, alpha: Tensor, gamma: float = 2.0) -> None:
        self.alpha, self.gamma = alpha, gamma

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        logpt = F.log_softmax(logits, 1).gather(1, target.view(-1, 1)).view(-1)
        at = self.alpha.gather(0, target)
        return (-1 * (1 - logpt.exp()) ** self.gamma * logpt * at).mean()


@case
def focal_loss() -> Case:
    return classified_by(FocalLoss(torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2])))


@case
def mixup() -> Case:
    model = resnet()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor, lam: float) -> Tensor:
        index = torch.randperm(x.size(0))
        mixed = lam * x + (1 - lam) * x[index, :]
        out = model(mixed)
        loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    each = enumerate(repeated(model, optimizer, draw=labelled))
    return Case(step, [(*call, 0.1 + 0.2 * index) for index, call in each], [model, optimizer])


@case
def amp_with_scaler() -> Case:
    """An active GradScaler, with bfloat16 so that it works on a CPU."""
    model = resnet()
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Case(step, repeated(model, optimizer, draw=labelled), [model, optimizer, scaler])


def with_average() -> tuple[Any, ...]:
    model = resnet()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    return model, averaged, AdamW(model.parameters())


@trains_all(with_average, labelled)
def averaged_model(model: Any, averaged: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A model average by torch.optim.swa_utils, updated in the step."""
    loss = classify(model, optimizer, x, y)
    averaged.update_parameters(model)
    return loss


@case
def averaged_model_between_calls() -> Case:
    model = resnet()
    averaged = AveragedModel(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    calls = repeated(model, optimizer, draw=labelled)
    state = [model, averaged, optimizer]
    return Case(classify, calls, state, lambda index, loss: averaged.update_parameters(model))


class SAM(Optimizer):
    """Sharpness-aware minimization, as in its best-known implementation."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, "adaptive": False, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                e_w = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p)
                p.add_(e_w)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self) -> Tensor:
        device = self.param_groups[0]["params"][0].device
        norms = [
            ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2).to(device)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        return torch.norm(torch.stack(norms), p=2)


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), *mlp(192, 16, 5))


@trains(flat, SAM, labelled, base=SGD, lr=0.1, momentum=0.9)
def sharpness_aware(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.first_step(zero_grad=True)
    F.cross_entropy(model(x), y).backward()
    optimizer.second_step(zero_grad=True)
    return loss


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, 0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.encoder(x)[:, 0])


def inverse(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


trains(ViT, AdamW, labelled, inverse, name="vision_transformer", lr=1e-3, fused=True)(classify)


def autoencoder() -> nn.Module:
    model = nn.ModuleDict(
        {
            "embed": nn.Linear(12, 16),
            "encoder": nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
            "decoder": nn.Linear(16, 12),
        }
    )
    model.mask_token = nn.Parameter(torch.zeros(1, 1, 16))
    return model


@trains(autoencoder, AdamW, labelled, lr=1e-3, betas=(0.9, 0.95))
def masked_autoencoder(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A masked autoencoder that shuffles patches by an argsort of noise."""
    patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(4, 16, 12)
    n, length, _ = patches.shape
    keep = int(length * 0.25)
    noise = torch.rand(n, length)
    shuffle = torch.argsort(noise, dim=1)
    restore = torch.argsort(shuffle, dim=1)
    kept = shuffle[:, :keep]
    seen = torch.gather(model["embed"](patches), 1, kept.unsqueeze(-1).repeat(1, 1, 16))
    mask = torch.ones([n, length])
    mask[:, :keep] = 0
    mask = torch.gather(mask, dim=1, index=restore)
    h = model["encoder"](seen)
    h = torch.cat([h, model.mask_token.repeat(n, length - keep, 1)], dim=1)
    h = torch.gather(h, 1, restore.unsqueeze(-1).repeat(1, 1, 16))
    loss = ((model["decoder"](h) - patches) ** 2).mean(dim=-1)
    loss = (loss * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def unet() -> nn.Module:
    return nn.ModuleDict(
        {
            "down": nn.Conv2d(3, 8, 3, 2, 1),
            "up": nn.ConvTranspose2d(8, 8, 2, 2),
            "out": nn.Conv2d(11, 2, 1),
        }
    )


@trains(unet, RMSprop, labelled, lr=1e-4, momentum=0.9, foreach=True)
def segmentation(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A small U-Net with a Dice loss and class weights in a global tensor."""
    h = model["up"](F.relu(model["down"](x)))
    logits = model["out"](torch.cat([x, F.interpolate(h, x.shape[2:], mode="bilinear")], 1))
    target = (x.mean(1) > 0.5).long()
    soft = F.softmax(logits, 1)
    hot = F.one_hot(target, 2).permute(0, 3, 1, 2).float()
    dice = (2 * (soft * hot).sum() + 1e-6) / (soft.sum() + hot.sum() + 1e-6)
    loss = F.cross_entropy(logits, target, weight=PIXEL_WEIGHTS) + 1 - dice
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


PIXEL_WEIGHTS = torch.tensor([0.3, 0.7])


def detector() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 9, 1))


def boxes_with_labels() -> tuple[Tensor, ...]:
    return torch.rand(2, 3, 4, 4), torch.rand(32, 4), torch.randint(0, 5, (32,))


@trains(detector, SGD, boxes_with_labels, lr=0.01)
def detection_losses(
    model: Any, optimizer: Any, x: Tensor, boxes: Tensor, labels: Tensor
) -> Tensor:
    """Detection losses on matching anchors, whose number a mask decides in each batch."""
    out = model(x).permute(0, 2, 3, 1).reshape(-1, 9)
    positive = labels > 0
    box_loss = F.smooth_l1_loss(out[positive][:, :4], boxes[positive], reduction="sum")
    class_loss = F.cross_entropy(out[:, 4:], labels)
    loss = class_loss + box_loss / positive.sum().clamp(min=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def with_teacher() -> tuple[Any, ...]:
    model = resnet()
    return model, copy.deepcopy(model).requires_grad_(False), Adam(model.parameters())


@trains_all(with_teacher, labelled, numbered=True)
def mean_teacher(
    model: Any, teacher: Any, optimizer: Any, x: Any, y: Any, global_step: int
) -> Tensor:
    """Mean teacher: labels of -1 are left out, and the step number sets the teacher's rate."""
    out = model(x)
    with torch.no_grad():
        goal = teacher(x + torch.randn_like(x) * 0.1).softmax(1)
    loss = F.cross_entropy(out, y, ignore_index=-1) + F.mse_loss(out.softmax(1), goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    alpha = min(1 - 1 / (global_step + 1), 0.99)
    for ema, parameter in zip(teacher.parameters(), model.parameters(), strict=True):
        ema.data.mul_(alpha).add_(parameter.data, alpha=1 - alpha)
    return loss
