"""Functions that `torch.compile` must not trace (`torch.compiler.disable`), and their originals."""

from __future__ import annotations

from types import FunctionType


def undisabled(function: FunctionType) -> FunctionType:
    """The function wrapped by `torch.compiler.disable`, or the function itself.

    torch.compile replaces functions of torch by such wrappers when it is first used, `_fused_adam`
    and `Adam._init_group` among them. Called otherwise than by it they do the same.
    """
    while vars(function).get("_torchdynamo_disable") is True and _is_wrapper(function):
        function = vars(function)["_torchdynamo_orig_callable"]
    return function


def _is_wrapper(function: FunctionType) -> bool:
    """True if a function is itself a `torch.compiler.disable` wrapper: `functools.wraps` copies its
    attributes to others."""
    original = vars(function).get("_torchdynamo_orig_callable")
    own = vars(function).get("_torchdynamo_wrapper_id") == id(function)
    return own and type(original) is FunctionType
