"""Process-wide torch settings that change operators' results, and contexts that disable modes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from graphopt._compat.torch_functions import function_modes, hooks_on_saved_tensors, is_unwatched
from graphopt._compat.user_modes import global_hooks, unknown_modes

_CPU = torch.device("cpu")
"""The default device where no mode says another."""

_UNWATCHED: tuple[Any, ...] = (_CPU, [], [], None, False)
"""What `_modes` returns where there are none."""


def global_settings() -> tuple[Any, ...]:
    """The torch settings that operator results may depend on: global hooks, default device,
    active modes and disabled libraries."""
    # What `torch.backends` says of these, without its Python.
    return (
        global_hooks(),
        _UNWATCHED if is_unwatched() else _modes(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch.is_autocast_cache_enabled(),
    )


def _modes() -> tuple[Any, ...]:
    """The default device, active modes, hooks on what autograd saves, and its search for
    anomalies."""
    functions = torch._C._len_torch_function_stack()
    return (
        torch.get_default_device() if functions else _CPU,
        [type(mode) for mode in function_modes()],
        unknown_modes(),
        hooks_on_saved_tensors(),
        torch.is_anomaly_enabled(),
    )


def autocast_regions() -> int:
    """The number of autocast regions that this thread has entered."""
    entered = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return entered


def is_profiling() -> bool:
    """True if a profiler records this thread."""
    return bool(torch.autograd._profiler_enabled())


without_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch
"""While active, no dispatch mode sees this thread's operators."""


@contextmanager
def without_modes() -> Iterator[None]:
    """While active, the caller's tracing, fake tensor, counting and functorch modes see nothing."""
    from torch._dispatch.python import no_python_dispatcher
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        no_python_dispatcher(),
        torch._C._PreserveDispatchKeyGuard(),
    ):
        # Inside an operator on fake tensors, as where their garbage is collected there, those on
        # all tensors would be of the meta device.
        torch._C._set_meta_in_tls_dispatch_include(False)
        yield


_AUTOGRAD = (
    "AutogradFunctionality",
    *("AutogradOther", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"),
)


@contextmanager
def differentiating() -> Iterator[None]:
    """While active, autograd records operators, even inside a kernel."""
    with torch.enable_grad(), torch._C._PreserveDispatchKeyGuard():
        for key in map(torch._C.DispatchKey.__members__.__getitem__, _AUTOGRAD):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def _free_guards(error: BaseException) -> None:
    """Frees the local variables of torch's frames in an error's tracebacks. Among them are guards
    that put dispatch keys back when they are freed: whenever the program drops the error."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        chain += [each.__cause__, each.__context__]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_code.co_filename.startswith(_TORCH):
                with suppress(RuntimeError):  # it still runs
                    frame.clear()


_TORCH = os.path.dirname(torch.__file__) + os.sep


@contextmanager
def dispatch_keys_kept() -> Iterator[None]:
    """Restores this thread's dispatch keys afterwards: a mode that raises inside an operator may
    leave them changed."""
    sets = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
    setters = (
        torch._C._dispatch_tls_set_dispatch_key_included,
        torch._C._dispatch_tls_set_dispatch_key_excluded,
    )
    before = [read() for read in sets]
    try:
        yield
    except BaseException as error:
        _free_guards(error)
        raise
    finally:
        for former, read, set_key in zip(before, sets, setters, strict=True):
            if former.raw_repr() != read().raw_repr():
                for key in torch._C.DispatchKey.__members__.values():
                    set_key(key, former.has(key))
