"""Stages of pipelines, compiled or not, trained for some steps: what the tests of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt.pipelining import Pipe, SplitPoint, pipeline, reduce_replicated_gradients
from pipeline_cases import CASES, MICROBATCHES, WIDTH
from zoo import MODELS

ROWS = 4
"""Of a microbatch of a model of the zoo."""

BOUNDARIES = {
    "gpt": ("block", "norm"),
    "mlp": ("layers.1", "head"),
    "convnet": ("features.3", "head"),
    "reused": ("mix",),
    "partial": ("head",),
    "running-mean": (),
    "shared-storage": (),
    "checkpointed": ("head",),
}
"""Where the models of the zoo are divided: at the beginning of these."""

SCHEDULES = {
    "gpipe": torch_pipelining.ScheduleGPipe,
    "1f1b": torch_pipelining.Schedule1F1B,
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "zero bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zero bubble V": torch_pipelining.ScheduleZBVZeroBubble,
}

Loss = Callable[[Any, Tensor], Tensor]


@dataclass
class Problem:
    """A pipe with the data of a step: arguments, keyword arguments and targets of a whole batch."""

    pipe: Pipe
    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    target: Tensor
    loss: Loss


def problem(name: str, stages: int = 4, boundaries: Sequence[str] | None = None) -> Problem:
    """A model of `pipeline_cases`, in any number of stages, or of the zoo, at its boundaries."""
    torch.manual_seed(0)
    if name in CASES and name != "mlp":
        return _marked(name, stages)
    model = MODELS[name].make()
    inputs, targets = MODELS[name].batch(0, ROWS * MICROBATCHES)
    names = BOUNDARIES[name] if boundaries is None else boundaries
    spec = dict.fromkeys(names, SplitPoint.BEGINNING)
    return Problem(pipeline(model, (inputs[:ROWS],), split_spec=spec), (inputs,), {}, targets, loss)


def _marked(name: str, stages: int) -> Problem:
    case = CASES[name]
    model = case.model(stages)
    example = case.microbatch(0)
    pipe = pipeline(model, *example, multi_use_param_spec=case.sharing)
    chosen = pipe.loss_fn if pipe.has_loss_and_backward else case.loss
    return Problem(pipe, *case.batch(MICROBATCHES), chosen)


class TwoHeads(nn.Module):
    """What a loss reads of it differs: both results, one of them, or one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return torch.relu(self.first(x)), torch.sigmoid(self.second(x)) * x


LOSSES: dict[str, Loss] = {
    "both": lambda output, target: (output[0] * output[1]).sum(),
    "the first": lambda output, target: output[0].square().mean(),
    "the second, expanded": lambda output, target: output[1].sum(),
    "transposed": lambda output, target: (output[0].T.contiguous() * target.T).sum(),
}


def two_heads(loss: str) -> Problem:
    """One stage, and one of the losses."""
    torch.manual_seed(0)
    pipe = pipeline(TwoHeads(), (torch.randn(3, WIDTH),))
    x, target = torch.randn(2, 3 * MICROBATCHES, WIDTH)
    return Problem(pipe, (x,), {}, target, LOSSES[loss])


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


class Training:
    """Some stages of a problem, all on this rank, and what their training leaves behind."""

    def __init__(
        self,
        given: Problem,
        schedule: str,
        *,
        stages: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        compiled: dict[str, Any] | None = None,
        loss: Loss | None = None,
        microbatches: int = MICROBATCHES,
        **options: Any,
    ) -> None:
        self.given = given
        indices = range(given.pipe.num_stages) if stages is None else stages
        self.stages = [given.pipe.build_stage(index, "cpu", group) for index in indices]
        if compiled is not None:
            for stage in self.stages:
                stage.compile(**compiled)
        single = schedule in ("gpipe", "1f1b")
        self.schedule: Any = SCHEDULES[schedule](
            self.stages[0] if single else self.stages,
            microbatches,
            loss_fn=loss or given.loss,
            **options,
        )
        parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2) if parameters else None
        self.outputs: list[Any] = []

    def run(self, **options: Any) -> Any:
        """Gradients of one step; its losses and output are noted."""
        first = any(stage.is_first for stage in self.stages)
        last = any(stage.is_last for stage in self.stages)
        losses: list[Tensor] = []
        given = self.given
        wanted = {"target": given.target, "losses": losses} if last else {}
        args, kwargs = (given.args, given.kwargs) if first else ((), {})
        output = self.schedule.step(*args, **kwargs, **wanted, **options)
        self.outputs.append((output, losses))

    def step(self) -> None:
        """One step of training."""
        self.run()
        reduce_replicated_gradients(*self.stages)
        self.outputs.append(self.gradients())
        self.update()

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for stage in self.stages
            for name, parameter in stage.submod.named_parameters(remove_duplicate=False)
        }

    def gradients(self) -> dict[str, Tensor | None]:
        return {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in self.named_parameters().items()
        }

    def state(self) -> list[Any]:
        """All that training has left, the state of the random number generator included."""
        states = [dict(stage.submod.state_dict()) for stage in self.stages]
        return [self.outputs, states, torch.get_rng_state()]


def train(training: Training, steps: int = 2) -> list[Any]:
    torch.manual_seed(5)
    for _ in range(steps):
        training.step()
    return training.state()


class Launches(TorchDispatchMode):
    """Notes the operators that run, in order: how communication lies between compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))
