"""Settings of the process that decide what operators do, and modes that are switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from graphopt._compat.torch_functions import function_modes, hooks_on_saved_tensors
from graphopt._compat.watching import global_hooks, unknown_modes

_CPU = torch.device("cpu")
"""The default device where no mode says another."""


def global_settings() -> tuple[Any, ...]:
    """Settings of torch that decide which operators run: hooks of all modules and optimizers,
    the default device, modes and hooks that a program has entered, libraries that are switched
    off."""
    # What `torch.backends` says of these, without its Python.
    return (
        global_hooks(),
        _CPU if not torch._C._len_torch_function_stack() else torch.get_default_device(),
        [type(mode) for mode in function_modes()],
        unknown_modes(),
        hooks_on_saved_tensors(),
        torch.is_anomaly_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch.is_autocast_cache_enabled(),
    )


def autocast_regions() -> int:
    """The number of autocast regions that this thread has entered."""
    entered = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return entered


def is_profiling() -> bool:
    """True if a profiler records this thread."""
    return bool(torch.autograd._profiler_enabled())


def without_dispatch() -> AbstractContextManager[None]:
    """While active, no mode sees the operators that this thread calls."""
    context: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return context


@contextmanager
def without_modes() -> Iterator[None]:
    """No tracing, fake tensor, counting or functorch mode of the caller's sees what runs inside."""
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
    """Autograd records what runs inside, also within a kernel, which torch calls below it."""
    with torch.enable_grad(), torch._C._PreserveDispatchKeyGuard():
        for key in map(torch._C.DispatchKey.__members__.__getitem__, _AUTOGRAD):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


@contextmanager
def dispatch_keys_kept() -> Iterator[None]:
    """What torch's dispatcher passes over on this thread is as before afterwards. An operator that
    differentiates forward leaves it otherwise where a mode raises inside."""
    sets = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
    setters = (
        torch._C._dispatch_tls_set_dispatch_key_included,
        torch._C._dispatch_tls_set_dispatch_key_excluded,
    )
    before = [read() for read in sets]
    try:
        yield
    finally:
        for former, read, set_key in zip(before, sets, setters, strict=True):
            if former.raw_repr() != read().raw_repr():
                for key in torch._C.DispatchKey.__members__.values():
                    set_key(key, former.has(key))
