"""Optimizers as popular packages write them, with Python counts and branches on them."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99),
                 weight_decay: float = 0.0) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                grad, state = p.grad, self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = state["exp_avg"] * beta1 + grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(grad, alpha=1 - beta2)


class NumberedAdam(Optimizer):
    """Adam with its step as a Python number, as it was written for years."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denom = state["exp_avg_sq"].sqrt().add_(group["eps"])
                correction1 = 1 - beta1 ** state["step"]
                correction2 = 1 - beta2 ** state["step"]
                step_size = group["lr"] * math.sqrt(correction2) / correction1
                p.addcdiv_(state["exp_avg"], denom, value=-step_size)


class LAMB(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-6, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.data, self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                beta1, beta2 = group["betas"]
                state["step"] += 1
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                weight_norm = p.data.pow(2).sum().sqrt().clamp(0, 10)
                adam_step = exp_avg / exp_avg_sq.sqrt().add(group["eps"])
                if group["weight_decay"] != 0:
                    adam_step.add_(p.data, alpha=group["weight_decay"])
                adam_norm = adam_step.pow(2).sum().sqrt()
                trust = torch.where(
                    (weight_norm > 0) & (adam_norm > 0), weight_norm / adam_norm, 1.0
                )
                p.data.add_(adam_step * trust, alpha=-group["lr"])


class Adan(Optimizer):
    """Adan: the step is a number in the group, and the previous gradient is kept."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.98, 0.92, 0.99),
                 eps: float = 1e-8, weight_decay: float = 0.0) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2, beta3 = group["betas"]
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            correction1 = 1.0 - beta1 ** group["step"]
            correction2 = 1.0 - beta2 ** group["step"]
            correction3 = math.sqrt(1.0 - beta3 ** group["step"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                    state["exp_avg_diff"] = torch.zeros_like(p)
                if "neg_pre_grad" not in state or group["step"] == 1:
                    state["neg_pre_grad"] = p.grad.clone().mul_(-1.0)
                self._update(p, group, state, correction1, correction2, correction3)

    def _update(self, p: Tensor, group: Any, state: Any, c1: Any, c2: Any, c3: Any) -> None:
        grad = p.grad
        beta1, beta2, beta3 = group["betas"]
        difference = state["neg_pre_grad"]
        difference.add_(grad)
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_diff"].mul_(beta2).add_(difference, alpha=1 - beta2)
        difference.mul_(beta2).add_(grad)
        state["exp_avg_sq"].mul_(beta3).addcmul_(difference, difference, value=1 - beta3)
        denom = (state["exp_avg_sq"].sqrt() / c3).add_(group["eps"])
        p.addcdiv_(state["exp_avg"], denom, value=-group["lr"] / c1)
        p.addcdiv_(state["exp_avg_diff"], denom, value=-group["lr"] * beta2 / c2)
        p.div_(1 + group["lr"] * group["weight_decay"])
        difference.zero_().add_(grad, alpha=-1.0)


class MADGRAD(Optimizer):
    """MADGRAD: a count of its own in `state`, read by `.item()`."""

    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9,
                 weight_decay: float = 0.0, eps: float = 1e-6) -> None:  # fmt: skip
        defaults = {"lr": lr, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0], dtype=torch.long)
        k = self.state["k"].item()
        for group in self.param_groups:
            eps, momentum = group["eps"], group["momentum"]
            lr = group["lr"] + eps
            ck = 1 - momentum
            lamb = lr * math.pow(k + 1, 0.5)
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.data, self.state[p]
                if "grad_sum_sq" not in state:
                    state["grad_sum_sq"] = torch.zeros_like(p.data).detach()
                    state["s"] = torch.zeros_like(p.data).detach()
                    if momentum != 0:
                        state["x0"] = torch.clone(p.data).detach()
                if group["weight_decay"] != 0:
                    grad = grad + group["weight_decay"] * p.data
                state["grad_sum_sq"].addcmul_(grad, grad, value=lamb)
                rms = state["grad_sum_sq"].pow(1 / 3).add_(eps)
                state["s"].data.add_(grad, alpha=lamb)
                z = state["x0"].addcdiv(state["s"], rms, value=-1)
                p.data.mul_(1 - ck).add_(z, alpha=ck)
        self.state["k"] += 1


class LaProp(Optimizer):
    def __init__(self, params: Any, lr: float = 4e-4, betas: Any = (0.9, 0.999),
                 eps: float = 1e-15) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_lr_1"], state["exp_avg_lr_2"] = 0.0, 0.0
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                lr = group["lr"]
                state["exp_avg_lr_1"] = state["exp_avg_lr_1"] * beta1 + (1 - beta1) * lr
                state["exp_avg_lr_2"] = state["exp_avg_lr_2"] * beta2 + (1 - beta2)
                correction1 = state["exp_avg_lr_1"] / lr if lr != 0.0 else 1.0
                step_size = 1 / correction1
                denom = state["exp_avg_sq"].div(state["exp_avg_lr_2"]).sqrt_().add_(group["eps"])
                state["exp_avg"].mul_(beta1).add_(p.grad / denom, alpha=(1 - beta1) * lr)
                p.add_(state["exp_avg"], alpha=-step_size)


class Lookahead(Optimizer):
    """Lookahead, which wraps another optimizer."""

    def __init__(self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = self.optimizer.param_groups
        self.state: Any = defaultdict(dict)
        self.fast_state = self.optimizer.state
        self.defaults = self.optimizer.defaults
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def update(self, group: Any) -> None:
        for fast in group["params"]:
            state = self.state[fast]
            if "slow_param" not in state:
                state["slow_param"] = torch.zeros_like(fast.data)
                state["slow_param"].copy_(fast.data)
            slow = state["slow_param"]
            slow += (fast.data - slow) * self.alpha
            fast.data.copy_(slow)

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self.update(group)
            group["counter"] += 1
            if group["counter"] >= self.k:
                group["counter"] = 0
        return loss

    def state_dict(self) -> Any:
        slow = dict(enumerate(self.state.values()))
        return {"fast": self.optimizer.state_dict(), "slow": slow}


class ScheduleFree(Optimizer):
    """Schedule-free AdamW: settings of the group are computed from its own count."""

    def __init__(self, params: Any, lr: float = 0.0025, warmup: int = 3) -> None:
        counts = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0}
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "warmup": warmup, **counts})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            k = group["k"]
            scheduled = (k + 1) / group["warmup"] if k < group["warmup"] else 1.0
            lr = group["lr"] * scheduled * math.sqrt(1 - beta2 ** (k + 1))
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = lr_max**2
            total = group["weight_sum"] = group["weight_sum"] + weight
            share = weight / total
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                z, exp_avg_sq = state["z"], state["exp_avg_sq"]
                exp_avg_sq.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                grad = p.grad.div_(exp_avg_sq.sqrt().add_(1e-8))
                p.lerp_(end=z, weight=share)
                p.add_(grad, alpha=lr * (beta1 * (1 - share) - 1))
                z.sub_(grad, alpha=lr)
            group["k"] = k + 1


class Prodigy(Optimizer):
    """Prodigy, which estimates the distance to the solution from gradients, as a number of the
    group."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-3) -> None:
        numbers = {"d": d0, "d0": d0, "d_max": d0, "d_numerator": 0.0, "k": 0}
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), **numbers})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        beta3, d, d0, step_size = (
            math.sqrt(beta2),
            group["d"],
            group["d0"],
            group["d"] * group["lr"],
        )
        numerator, denominator = group["d_numerator"] * beta3, 0.0
        for p in group["params"]:
            state = self.state[p]
            if "p0" not in state:
                state["p0"] = p.detach().clone()
                for name in ("s", "exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(p)
            moved = torch.dot(p.grad.flatten(), (state["p0"] - p).flatten()).item()
            numerator += (d / d0) * step_size * moved
            state["exp_avg"].mul_(beta1).add_(p.grad, alpha=d * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=d * d * (1 - beta2))
            state["s"].mul_(beta3).add_(p.grad, alpha=(d / d0) * step_size)
            denominator += state["s"].abs().sum().item()
        if denominator == 0:
            return
        group["d_max"] = max(group["d_max"], numerator / denominator)
        group["d"], group["d_numerator"], group["k"] = group["d_max"], numerator, group["k"] + 1
        for p in group["params"]:
            state = self.state[p]
            root = state["exp_avg_sq"].sqrt().add_(group["d"] * 1e-8)
            p.addcdiv_(state["exp_avg"], root, value=-step_size)
