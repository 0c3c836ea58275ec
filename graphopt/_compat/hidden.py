"""Functions that torch.compile is not to look into. Written for torch 2.11 to 2.15."""

from __future__ import annotations

from types import FunctionType


def undisabled(function: FunctionType) -> FunctionType:
    """The function that `torch.compiler.disable` wrapped; other functions themselves.

    torch.compile replaces functions of torch by such wrappers when it is first used, `_fused_adam`
    and `Adam._init_group` among them. Called otherwise than by it they do the same.
    """
    while vars(function).get("_torchdynamo_disable") is True and _is_wrapper(function):
        function = vars(function)["_torchdynamo_orig_callable"]
    return function


def _is_wrapper(function: FunctionType) -> bool:
    """Attributes are copied by `functools.wraps`: another function may have those of a wrapper."""
    original = vars(function).get("_torchdynamo_orig_callable")
    own = vars(function).get("_torchdynamo_wrapper_id") == id(function)
    return own and type(original) is FunctionType
