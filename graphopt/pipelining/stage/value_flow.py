"""Shapes, dtypes and gradient flags of the tensors that flow between stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import tensors_in
from graphopt.ir.metadata import fake_value, known_value
from graphopt.pipelining.pipe.backward import value_before_cut
from graphopt.pipelining.pipe.placement import arguments_of, module_of, results, stage_nodes
from graphopt.pipelining.stage.chain import ChainPlan


@dataclass(frozen=True)
class StageFlow:
    """The tensors that stages exchange: without data, contiguous, on the meta device.

    Attributes:
        received: the tensors that each stage receives.
        returned: the tensors that the last stage returns.
    """

    received: list[tuple[torch.Tensor, ...]]
    returned: tuple[torch.Tensor, ...]

    def sent(self, stage: int) -> tuple[torch.Tensor, ...]:
        """The tensors that a stage sends on, or returns."""
        return self.received[stage + 1] if stage + 1 < len(self.received) else self.returned


def find_flow(top: fx.GraphModule, plan: ChainPlan) -> StageFlow:
    """Runs the stages on fake tensors to find the shapes and gradient flags that they exchange."""
    values = {node: known_value(node) for node in top.graph.find_nodes(op="placeholder")}
    mode = _compat.fake_mode_of(list(tensors_in(list(values.values())))) or _mode_of(top)
    with mode, torch.enable_grad():
        for call in stage_nodes(top.graph):
            arguments = [values[value_before_cut(node)] for node in arguments_of(call)]
            result = _FakeRun(module_of(top, call)).run(*arguments)
            by_index = result if isinstance(result, (tuple, list)) else (result,)
            values.update({value: by_index[index] for index, value in results(call).items()})

    def kinds(nodes: list[fx.Node]) -> tuple[torch.Tensor, ...]:
        return tuple(described(values[node], values[node].requires_grad) for node in nodes)

    return StageFlow(list(map(kinds, plan.received)), kinds(plan.returned))


class _FakeRun(fx.Interpreter):
    """Runs a stage with fake tensors in place of its parameters and buffers."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        actual = super().get_attr(target, args, kwargs)
        if not isinstance(actual, torch.Tensor):
            return actual
        fake: torch.Tensor = fake_value(self.current)
        return fake.detach().requires_grad_(actual.requires_grad)

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        return super().run_node(n)


def _mode_of(top: fx.GraphModule) -> Any:
    """The fake mode of the first parameter, for models without tensor arguments."""
    values = (
        known_value(node)
        for call in stage_nodes(top.graph)
        for node in module_of(top, call).graph.nodes
    )
    return _compat.fake_mode_of(list(tensors_in(list(values))))


def described(
    tensor: torch.Tensor, requires_grad: bool, device: torch.device | str = "meta"
) -> torch.Tensor:
    """A contiguous tensor of the same kind, without values, on another device."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return empty.requires_grad_(requires_grad and is_differentiable(tensor))


def is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
