"""Optimizers as popular packages write them: with Python counts, with branches on them."""

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
    """Adam as it was written for years: the step is a Python number, with `math.sqrt` of it."""

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
    """The step is a number in the group; the gradient before is kept."""

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
    """A count of its own in `state`, read by `.item()`."""

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
    """Wraps another optimizer, as popular packages do."""

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
