"""`torch.autograd.Function` calls, kept as single nodes in exported graphs.

Export would replace such a call by what the function's forward computes, so that autograd
differentiates that in place of calling the function's backward:

    y = Sign.apply(x)     # backward: the gradient as it is
    %y = aten.sign(%x)    # what export records: the gradient is zero

So the call becomes one node, which applies the function.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

from graphopt import _compat
from graphopt._compat import autograd_functions as _private
from graphopt.ir.user_frames import current_user_line
from graphopt.pipelining.errors import LostGradientError


class FunctionCall:
    """Applies an autograd function to tensors; its other arguments are fixed.

    Pickles where the function and the other arguments do.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        # Read by fx, which names nodes after it.
        self.__name__ = str(function.__name__)
        self._arguments = _compat.tree_map(_without_tensor, (args, kwargs))

    def __call__(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args, kwargs = _compat.tree_map(
            lambda leaf: next(given) if isinstance(leaf, _TensorPosition) else leaf, self._arguments
        )
        return self.function.apply(*args, **kwargs)


class _TensorPosition:
    """The position of a tensor among the arguments of an autograd function."""


def _without_tensor(leaf: Any) -> Any:
    return _TensorPosition() if isinstance(leaf, torch.Tensor) else leaf


class FunctionRecorder:
    """Records each autograd function that is applied during export as one node.

    Attributes:
        refusal: the first function that cannot be kept; others may have caught the error.
    """

    def __init__(self) -> None:
        self.refusal: LostGradientError | None = None
        self._calls: list[FunctionCall] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While active, autograd functions that this thread traces become single nodes."""
        with _private.functions_handled_by(self._record, self._unseen):
            yield

    def restore(self, traced: fx.GraphModule) -> None:
        """Makes the nodes of an exported graph, and of graphs in it, apply the functions."""
        for module in traced.modules():
            if not isinstance(module, fx.GraphModule):
                continue
            nodes = _private.calls(module.graph)
            for node in nodes:
                index: Any = node.args[0]
                node.target, node.args = self._calls[index], node.args[1:]
            if nodes:
                module.recompile()

    def _record(self, cls: Any, apply: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._kept(cls, apply, args, kwargs)
        except LostGradientError as refusal:
            self.refusal = self.refusal or refusal
            raise

    def _unseen(self, cls: Any) -> None:
        if _private.is_function(cls):
            self.refusal = self.refusal or _refusal(
                cls, "was bound before it is called (`f = F.apply`)", "write F.apply(…) in forward"
            )
            raise self.refusal

    def _kept(self, cls: Any, apply: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_function(cls)
        leaves = _compat.tree_leaves((args, kwargs))
        _check_arguments(cls, leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        versions = [_compat.version_of(tensor) for tensor in tensors]
        with _OwnTensors(cls, tensors, _private.traced_tensors()), _private.tracing_paused():
            result = apply(*args, **kwargs)
        if versions != [_compat.version_of(tensor) for tensor in tensors]:
            raise _refusal(cls, "changes an argument in place", "compute a new tensor in forward")
        _check_result(cls, result)
        self._calls.append(FunctionCall(cls, args, kwargs))
        name = cls.__name__.lower()
        return _private.record_call(len(self._calls) - 1, name, tensors, result)


class _OwnTensors(_compat.TorchDispatchMode):
    """Refuses a forward that reads tensors of the model beyond its arguments: they might be on
    another rank than the stage."""

    def __init__(
        self, cls: Any, arguments: list[torch.Tensor], traced: Container[torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cls, self._traced = cls, traced
        self._arguments = {id(tensor) for tensor in arguments}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in _compat.tree_leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor) or id(leaf) in self._arguments:
                continue
            if leaf in self._traced:
                raise _refusal(
                    self._cls,
                    "reads a tensor of the model that is not among its arguments",
                    "pass the tensor to apply()",
                )
        return func(*args, **(kwargs or {}))


def _check_function(cls: Any) -> None:
    if _private.is_reentrant_checkpoint(cls):
        raise LostGradientError(
            "a checkpoint with use_reentrant=True runs its own backward",
            location=_here(),
            hint="pass use_reentrant=False to torch.utils.checkpoint.checkpoint, whose gradients"
            " are the same (transformers:"
            " gradient_checkpointing_enable({'use_reentrant': False}))",
        )
    if not _private.is_function(cls):
        raise LostGradientError(
            f"{cls.__name__}: an autograd.Function inside a transform or an operator that calls"
            " functions, such as torch.func.grad or torch.cond",
            location=_here(),
            hint="apply the function outside of it",
        )


def _check_arguments(cls: Any, leaves: list[Any]) -> None:
    for leaf in leaves:
        if _holds_tensors(leaf):
            raise _refusal(
                cls,
                f"takes {type(leaf).__name__} {getattr(leaf, '__name__', '')}, which holds"
                " parameters or other tensors".replace(" ,", ","),
                "pass the tensors to apply()",
            )


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """True if a value, itself no tensor, is a module or function that holds tensors."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, MethodType):
        return _holds_tensors(value.__self__)
    if not isinstance(value, FunctionType) or depth == 0:
        return False
    cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
    return any(isinstance(v, torch.Tensor) or _holds_tensors(v, depth - 1) for v in cells)


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _check_result(cls: Any, result: Any) -> None:
    leaves = result if isinstance(result, tuple) else (result,)
    nested = (leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))
    if any(isinstance(v, torch.Tensor) for leaf in nested for v in _compat.tree_leaves(leaf)):
        raise _refusal(cls, "returns tensors inside a container", "return them as a tuple")


def _refusal(cls: Any, what: str, instead: str) -> LostGradientError:
    return LostGradientError(
        f"the autograd.Function {cls.__name__} {what}, so that its call cannot be kept",
        location=_here(),
        hint=instead,
    )


def _here() -> str | None:
    line = current_user_line()
    return None if line is None else str(line)
