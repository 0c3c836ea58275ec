"""Made-up training steps of any size, in the captured dialect, built without tracing anything.

A step is a stack of linear layers with GELU (and dropout), its backward, averaged gradients, and an
optimizer. With `ranks=None` it has no collectives and runs on real tensors: see `inputs_of`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphopt import _compat

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def training_step(
    layers: int = 2,
    *,
    optimizer: str = "fused",
    ranks: int | None = 2,
    dropout: bool = False,
    width: int = 8,
    batch: int = 4,
) -> fx.GraphModule:
    """One step of a stack of `layers` layers of `width`, with two parameters each.

    Args:
        optimizer: "fused" (AdamW), "foreach" or "loop" (SGD with momentum).
        ranks: gradients are averaged over so many ranks; None: there is no communication.
    """
    step = _Step(width, batch, ranks, dropout)
    step.add_inputs(layers, adam=optimizer == "fused")
    step.add_forward()
    step.add_backward()
    step.add_waits()
    {"fused": step.add_fused, "foreach": step.add_foreach, "loop": step.add_loop}[optimizer]()
    return step.finish()


def step_of_size(nodes: int, **options: Any) -> fx.GraphModule:
    """A `training_step` with about so many nodes."""
    small, large = (len(training_step(layers, **options).graph.nodes) for layers in (1, 2))
    return training_step(max(1, round((nodes - small) / (large - small)) + 1), **options)


def inputs_of(graph_module: fx.GraphModule) -> list[Tensor]:
    """Random real tensors for the placeholders, the same for the same graph."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta["val"]
        drawn = torch.randn(value.shape, dtype=value.dtype, generator=generator)
        values.append(drawn.abs() * 0.1)
    return values


class _Step:
    """The graph that is being built. `_meta` has a tensor on the meta device for each node, so that
    views share storage; fake tensors are made from them."""

    def __init__(self, width: int, batch: int, ranks: int | None, dropout: bool) -> None:
        self.graph = fx.Graph()
        self.width, self.batch, self.ranks, self.dropout = width, batch, ranks, dropout
        self._mode = _compat.new_fake_mode()
        self._meta: dict[fx.Node, Any] = {}
        self._phase = "forward"
        self._updates: list[fx.Node] = []

    def _annotate(self, node: fx.Node, value: Any) -> fx.Node:
        self._meta[node] = value
        fake = _compat.tree_map(
            lambda t: _compat.fake_like(self._mode, t, torch.device("cpu")), value
        )
        node.meta["val"] = fake
        return node

    def _input(self, name: str, kind: str, *shape: int, dtype: Any = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name.replace(".", "_"))
        node.meta |= {"kind": kind, "fqn": name}
        return self._annotate(node, torch.empty(shape, dtype=dtype, device="meta"))

    def _call(
        self, target: Callable[..., Any], *args: Any, shape: Any = None, **kwargs: Any
    ) -> fx.Node:
        """A call whose result has `shape`, or is what `target` makes of its first argument."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta |= {"phase": self._phase, "provenance": ("capture",)}
        if shape is not None:
            return self._annotate(node, torch.empty(shape, device="meta"))
        return self._annotate(node, target(self._meta[args[0]], *args[1:], **kwargs))

    def _number(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta |= {"phase": self._phase, "provenance": ("capture",)}
        node.meta["val"] = _compat.new_unknown(self._mode, integer=False)
        return node

    def _list(
        self, target: Any, first: Sequence[fx.Node], *args: Any, **kwargs: Any
    ) -> list[fx.Node]:
        """A list operator with one result for each element of `first`, and these results."""
        node = self._listed(target, first, args, kwargs)
        self._annotate(node, [torch.empty_like(self._meta[element]) for element in first])
        return [self._item(node, index) for index in range(len(first))]

    def _listed(self, target: Any, first: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, (list(first), *args), kwargs)
        node.meta |= {"phase": self._phase, "provenance": ("capture",)}
        return node

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        item = self.graph.call_function(operator.getitem, (node, index))
        item.meta |= {"phase": self._phase, "provenance": ("capture",)}
        self._meta[item] = self._meta[node][index]
        item.meta["val"] = node.meta["val"][index]
        return item

    def add_inputs(self, layers: int, adam: bool) -> None:
        shapes = {"weight": (self.width, self.width), "bias": (self.width,)}
        names = [(f"{i}.{name}", shapes[name]) for i in range(layers) for name in shapes]
        self.parameters = [self._input(f"p{name}", "parameter", *shape) for name, shape in names]
        states = ("exp_avg", "exp_avg_sq") if adam else ("momentum",)
        self.states = {
            state: [
                self._input(f"o{name}.{state}", "optimizer_state", *shape) for name, shape in names
            ]
            for state in states
        }
        if adam:
            self.steps = [self._input(f"o{name}.step", "optimizer_state") for name, _ in names]
        self.lr = self._input("lr", "hyperparameter", dtype=torch.float64)
        self.x = self._input("x", "user_input", self.batch, self.width)

    def add_forward(self) -> None:
        self._saved: list[tuple[fx.Node, ...]] = []
        x, shape = self.x, (self.batch, self.width)
        for weight, bias in zip(self.parameters[::2], self.parameters[1::2], strict=True):
            t = self._call(aten.t.default, weight)
            linear = self._call(aten.addmm.default, bias, x, t, shape=shape)
            saved = (x, t, linear)
            x = self._call(aten.gelu.default, linear, shape=shape)
            if self.dropout:
                x, mask = self._drop(x)
                saved += (mask,)
            self._saved.append(saved)
        self.loss = self._call(aten.sum.default, x, shape=())
        self._result = x

    def _drop(self, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        node = self.graph.call_function(aten.native_dropout.default, (x, 0.1, True))
        node.meta |= {"phase": self._phase, "provenance": ("capture",)}
        value = self._meta[x]
        self._annotate(node, [torch.empty_like(value), torch.empty_like(value, dtype=torch.bool)])
        return self._item(node, 0), self._item(node, 1)

    def add_backward(self) -> None:
        self._phase = "backward"
        shape = (self.batch, self.width)
        one = self._call(aten.ones_like.default, self.loss, shape=())
        gradient = self._call(aten.expand.default, one, list(shape))
        self.gradients: dict[fx.Node, fx.Node] = {}
        for index in reversed(range(len(self._saved))):
            x, t, linear, *mask = self._saved[index]
            if mask:
                args = (gradient, mask[0], 1 / 0.9)
                gradient = self._call(aten.native_dropout_backward.default, *args, shape=shape)
            gradient = self._call(aten.gelu_backward.default, gradient, linear, shape=shape)
            over = self._call(aten.t.default, gradient)
            square = (self.width, self.width)
            mm = self._call(aten.mm.default, over, x, shape=square)
            bias = self._call(aten.sum.dim_IntList, gradient, [0], True, shape=(1, self.width))
            view = self._call(aten.view.default, bias, [self.width])
            weight, parameter = self.parameters[2 * index : 2 * index + 2]
            self.gradients[parameter] = self._average(view)
            self.gradients[weight] = self._average(mm)
            if index:
                back = self._call(aten.t.default, t)
                gradient = self._call(aten.mm.default, gradient, back, shape=shape)

    def _average(self, gradient: fx.Node) -> fx.Node:
        """The gradient over all ranks, launched and not waited for."""
        if self.ranks is None:
            return gradient
        self._phase = "communication"
        shape = self._meta[gradient].shape
        scaled = self._call(aten.mul.Tensor, gradient, 1.0 / self.ranks, shape=shape)
        launched = self._call(c10d.all_reduce.default, scaled, "sum", "0", shape=shape)
        self._phase = "backward"
        return launched

    def add_waits(self) -> None:
        if self.ranks is None:
            return
        self._phase = "communication"
        for parameter, launched in self.gradients.items():
            shape = self._meta[launched].shape
            self.gradients[parameter] = self._call(c10d.wait_tensor.default, launched, shape=shape)

    def add_fused(self) -> None:
        self._phase = "optimizer"
        steps = self._list(aten._foreach_add.Scalar, self.steps, 1)
        lists = [
            self.parameters,
            [self.gradients[parameter] for parameter in self.parameters],
            self.states["exp_avg"],
            self.states["exp_avg_sq"],
            [],
        ]
        settings = {"lr": self.lr, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01}
        settings |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
        node = self._listed(
            aten._fused_adamw.tensor_lr, self.parameters, (*lists[1:], steps), settings
        )
        self._annotate(node, [[torch.empty_like(self._meta[n]) for n in part] for part in lists])
        self._update(self.steps, steps)
        for index, old in ((0, self.parameters), (2, lists[2]), (3, lists[3])):
            part = self._item(node, index)
            self._update(old, [self._item(part, i) for i in range(len(old))])

    def add_foreach(self) -> None:
        self._phase = "optimizer"
        gradients = [self.gradients[parameter] for parameter in self.parameters]
        old = self.states["momentum"]
        decayed = self._list(aten._foreach_mul.Scalar, old, 0.9)
        momentum = self._list(aten._foreach_add.List, decayed, gradients)
        step = self._step_size()
        new = self._list(aten._foreach_add.List, self.parameters, momentum, alpha=step)
        self._update(old, momentum)
        self._update(self.parameters, new)

    def add_loop(self) -> None:
        self._phase = "optimizer"
        step = self._step_size()
        for parameter, old in zip(self.parameters, self.states["momentum"], strict=True):
            shape = self._meta[parameter].shape
            decayed = self._call(aten.mul.Tensor, old, 0.9, shape=shape)
            gradient = self.gradients[parameter]
            momentum = self._call(aten.add.Tensor, decayed, gradient, shape=shape)
            new = self._call(aten.add.Tensor, parameter, momentum, alpha=step, shape=shape)
            self._update([old, parameter], [momentum, new])

    def _step_size(self) -> fx.Node:
        lr = self._number(aten._local_scalar_dense.default, self.lr)
        return self._number(operator.neg, lr)

    def _update(self, old: Sequence[fx.Node], new: Sequence[fx.Node]) -> None:
        for placeholder, value in zip(old, new, strict=True):
            copy = self.graph.call_function(aten.copy_.default, (placeholder, value))
            copy.meta |= {"phase": self._phase, "provenance": ("capture",)}
            self._meta[copy] = self._meta[placeholder]
            copy.meta["val"] = placeholder.meta["val"]
            self._updates.append(copy)

    def finish(self) -> fx.GraphModule:
        self.graph.output(([self.loss], self._updates, []))
        return fx.GraphModule(torch.nn.Module(), self.graph)
