"""Marks in a model at the boundaries of its pipeline stages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from graphopt._compat import pipelining as _compat
from graphopt.errors import PartitionError

# The label names the mark in errors. Export keeps the operator in the graph.
torch.library.define("graphopt::pipe_split", "(str label) -> ()")


@torch.library.impl("graphopt::pipe_split", "BackendSelect")
def _no_operation(label: str) -> None:
    return None


_PIPE_SPLIT = torch.ops.graphopt.pipe_split.default
fx.has_side_effect(_PIPE_SPLIT)


def pipe_split() -> None:
    """Marks a boundary between two stages; a model that runs by itself ignores it.

    >>> class Model(torch.nn.Module):
    ...     def forward(self, x):
    ...         x = x + 1
    ...         graphopt.pipelining.pipe_split()
    ...         return x * 2
    >>> graphopt.pipelining.pipeline(Model(), (torch.ones(2),)).num_stages
    2
    """
    caller = sys._getframe(1)
    place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    _PIPE_SPLIT(f"pipe_split() at {place}")


def is_mark(node: fx.Node) -> bool:
    """True if a node marks a stage boundary, ours or torch's own `pipe_split`."""
    return node.target is _PIPE_SPLIT or _compat.is_torch_mark(node.target)


def mark_label(node: fx.Node) -> str:
    """The name by which error messages call a mark."""
    if node.target is _PIPE_SPLIT:
        return str(node.args[0])
    return f"pipe_split() of torch.distributed.pipelining (%{node.name})"


def insert_mark_after(node: fx.Node, label: str) -> None:
    """Inserts a stage boundary after `node`."""
    with node.graph.inserting_after(node):
        node.graph.call_function(_PIPE_SPLIT, (label,))


class SplitPoint(Enum):
    """The place of a boundary: before or after a module's forward.

    >>> [point.name for point in graphopt.pipelining.SplitPoint]
    ['BEGINNING', 'END']
    """

    BEGINNING = auto()
    END = auto()


class _MarkedForward:
    """A module's forward with boundaries before or after it."""

    def __init__(self, forward: Callable[..., Any], name: str, overridden: bool) -> None:
        self.forward = forward
        self.name = name
        self.overridden = overridden
        self.points: set[SplitPoint] = set()
        functools.update_wrapper(self, forward)

    def label(self, point: SplitPoint) -> str:
        return f"{point.name} of '{self.name}'"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if SplitPoint.BEGINNING in self.points:
            _PIPE_SPLIT(self.label(SplitPoint.BEGINNING))
        result = self.forward(*args, **kwargs)
        if SplitPoint.END in self.points:
            _PIPE_SPLIT(self.label(SplitPoint.END))
        return result


class Annotation:
    """Split points set on a module's submodules, removed by `undo()` or at the end of `with`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def undo(self) -> None:
        """Removes the split points."""
        remove_split_points(self._module)

    def __enter__(self) -> Annotation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def annotate_split_points(module: nn.Module, spec: Mapping[str, SplitPoint]) -> Annotation:
    """Mark boundaries at the beginning or end of submodules, without changing the model's code.

    `pipeline` and `Pipe.from_tracing` remove the marks when they have traced the module. A
    submodule may be annotated several times; each point counts once.

    Args:
        module: the model.
        spec: for each submodule, by qualified name, where the boundary is. A `SplitPoint` of
            `torch.distributed.pipelining` counts as ours.

    Raises:
        PartitionError: there is no such submodule, or a point is not a `SplitPoint`. Nothing is
            annotated then.

    >>> from graphopt.pipelining import SplitPoint, annotate_split_points, pipeline
    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
    >>> with annotate_split_points(model, {"0": SplitPoint.END}):
    ...     pipeline(model, (torch.ones(2),)).num_stages
    2
    """
    if not isinstance(spec, Mapping):
        raise PartitionError(
            f"split points are a mapping from names of submodules to SplitPoints, not {spec!r}"
        )
    points = {name: _split_point(name, point) for name, point in spec.items()}
    targets = {name: _submodule(module, name) for name in spec}
    for name, point in points.items():
        _marked_forward(targets[name], name).points.add(point)
    return Annotation(module)


def _split_point(name: object, point: object) -> SplitPoint:
    if not isinstance(name, str):
        raise PartitionError(f"a split point is for the name of a submodule, not for {name!r}")
    if isinstance(point, SplitPoint):
        return point
    if _compat.is_torch_split_point(point):
        return SplitPoint[point.name]
    raise PartitionError(f"the split point of '{name}' is {point!r}, not a SplitPoint")


def remove_split_points(module: nn.Module) -> None:
    """Restores the forward of all annotated submodules."""
    for child in module.modules():
        marked = child.__dict__.get("forward")
        if not isinstance(marked, _MarkedForward):
            continue
        if marked.overridden:
            child.__dict__["forward"] = marked.forward
        else:
            del child.__dict__["forward"]


def annotated_labels(module: nn.Module) -> list[str]:
    """The labels of all split points set on submodules."""
    marked = (child.__dict__.get("forward") for child in module.modules())
    return [
        forward.label(point)
        for forward in marked
        if isinstance(forward, _MarkedForward)
        for point in SplitPoint
        if point in forward.points
    ]


def _submodule(module: nn.Module, name: str) -> nn.Module:
    found, path = module, ""
    for part in name.split("."):
        children = _compat.children_by_name(found)
        if part not in children:
            where = f"'{path}'" if path else f"the {type(module).__name__}"
            raise PartitionError(
                f"split point '{name}': {where} has no submodule '{part}'"
                f" (it has: {', '.join(children) or 'none'})"
            )
        found, path = children[part], f"{path}.{part}".lstrip(".")
    return found


def _marked_forward(module: nn.Module, name: str) -> _MarkedForward:
    present = module.__dict__.get("forward")
    if isinstance(present, _MarkedForward):
        return present
    marked = _MarkedForward(module.forward, name, overridden=present is not None)
    module.__dict__["forward"] = marked
    return marked


class PipeSequential(nn.Sequential):
    """An `nn.Sequential` in which each child is a stage of its own.

    >>> from graphopt.pipelining import PipeSequential, pipeline
    >>> model = PipeSequential(torch.nn.ReLU(), torch.nn.Tanh())
    >>> pipeline(model, (torch.ones(2),)).num_stages
    2
    """

    @staticmethod
    def from_sequential(sequential: nn.Sequential) -> PipeSequential:
        """Make a sequential with the same children and names, with a boundary between any two."""
        result = PipeSequential()
        for name, child in _compat.children_by_name(sequential).items():
            result.add_module(name, child)
        return result

    def forward(self, input: Any) -> Any:
        for index, (name, module) in enumerate(_compat.children_by_name(self).items()):
            if index:
                _PIPE_SPLIT(f"boundary before '{name}'")
            input = module(input)
        return input
