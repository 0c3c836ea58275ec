"""Checks, during export, for changes of gradients that the exported graph would lose.

Hooks on activations, on nodes of autograd and on what autograd saves, and backwards inside of
forward, run when autograd runs. The graph has no node for them. Of a `torch.autograd.Function` it
has what forward computes, so that autograd differentiates that in place of calling its backward:

    y = Sign.apply(x)     # backward: the gradient as it is
    %y = aten.sign(%x)    # what export records: the gradient is zero
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphopt import _compat
from graphopt._compat import autograd_functions as _private
from graphopt._compat.tensor_classes import TensorBase
from graphopt.ir.user_frames import current_user_line
from graphopt.pipelining.errors import LostGradientError

_HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})
_BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward})
_ATTRIBUTES: Any = vars(torch.Tensor) | vars(TensorBase)
_GRADIENT_SWITCHES = frozenset({torch.Tensor.requires_grad_, _ATTRIBUTES["requires_grad"].__set__})
_GRAD_FN = _ATTRIBUTES["grad_fn"].__get__
_DATA = _ATTRIBUTES["data"].__get__
_OPERATOR_HINT = (
    "change the gradient in the backward of an operator of your own (torch.library.custom_op, with"
    " register_autograd), which stages keep"
)
_FUNCTION_HINT = (
    "make it an operator (torch.library.custom_op, with register_autograd), which stages keep; or"
    " divide the model by hand: graphopt.pipelining.Stage.from_module runs modules as they are"
)
_CHECKPOINT_HINT = (
    "pass use_reentrant=False to torch.utils.checkpoint.checkpoint, whose gradients are the same"
    " (transformers: gradient_checkpointing_enable({'use_reentrant': False}))"
)


class GradientWatch(TorchFunctionMode):
    """Refuses autograd functions, gradient hooks and backward calls that an exported graph cannot
    keep.

    Attributes:
        refusal: the first one; code of the model may have caught it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusal: LostGradientError | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func, kwargs = _compat.function_asked(func), kwargs or {}
        if (
            torch.compiler.is_dynamo_compiling()
        ):  # the branches of a torch.cond, which Dynamo captures
            return func(*args, **kwargs)
        self._check(func, args, kwargs)
        if func == _DATA and _compat.is_traced():
            return args[0].detach()  # which has a node
        result = func(*args, **kwargs)
        if func is torch.autograd.grad:
            return _constant(result) if not _creates_graph(kwargs, args) else result
        if func == _GRAD_FN and result is not None:
            return _WatchedNode(self, result)
        return result

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func in _HOOKS:
            self.refuse(f"a hook on a tensor ({func.__name__})", _OPERATOR_HINT)
        if func in _BACKWARDS:
            self.refuse(
                "a backward inside of forward, which adds to the gradients of parameters",
                "use torch.autograd.grad, whose results are part of the graph",
            )
        if func in _GRADIENT_SWITCHES and _switches_parameter(*args, **kwargs):
            self.refuse(
                "a parameter that is frozen or unfrozen in forward",
                "set requires_grad before the pipe is made",
            )
        if _private.saved_tensor_hooks_are_foreign():
            self.refuse(
                "hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks)",
                "enter saved_tensors_hooks around schedule.step",
            )

    def refuse_function(self, cls: Any) -> NoReturn:
        """Refuses an autograd function that is applied.

        Raises:
            LostGradientError: always.
        """
        if _private.is_reentrant_checkpoint(cls):
            reason = "a checkpoint with use_reentrant=True runs its own backward"
            self.refuse(reason, _CHECKPOINT_HINT)
        name = "" if _private.is_generated(cls) else f" {cls.__name__}"
        self.refuse(f"the backward of an autograd.Function{name} would be lost", _FUNCTION_HINT)

    def refuse(self, reason: str, hint: str) -> NoReturn:
        """Refuses the model now, and again each time that the watch is asked.

        Raises:
            LostGradientError: always.
        """
        line = current_user_line()
        refusal = LostGradientError(reason, location=None if line is None else str(line), hint=hint)
        self.refusal = self.refusal or refusal
        raise refusal


class _WatchedNode:
    """An autograd node that refuses the registration of hooks."""

    def __init__(self, watch: GradientWatch, node: Any) -> None:
        self._watch, self._node = watch, node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            self._watch.refuse(f"a hook on a node of autograd ({name})", _OPERATOR_HINT)
        return getattr(self._node, name)


def check_module_hooks(module: nn.Module) -> None:
    """Refuses a model whose modules have backward hooks.

    Raises:
        LostGradientError: a module has one.
    """
    for name, child in module.named_modules():
        if _private.module_backward_hooks(child):
            raise LostGradientError(
                f"the module '{name}' ({type(child).__name__}) has a backward hook",
                hint="remove it before the pipe is made, and "
                "register it on the modules of stages, or " + _OPERATOR_HINT,
            )


def _creates_graph(kwargs: dict[str, Any], args: tuple[Any, ...]) -> bool:
    return bool(kwargs.get("create_graph", args[4] if len(args) > 4 else False))


def _constant(gradients: Any) -> Any:
    """Detaches gradients, which were computed without a graph for autograd."""
    return _compat.tree_map(
        lambda value: value.detach() if isinstance(value, torch.Tensor) else value, gradients
    )


def _switches_parameter(tensor: torch.Tensor, requires_grad: bool = True) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad != requires_grad
