"""Answers about a CUDA device that does not exist, for `graphopt.testing.pretended`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from graphopt._compat import deepcopied


def believe(capability: tuple[int, int]) -> None:
    """Makes Python's questions about CUDA return one device of the given compute capability.

    For a process of its own: nothing takes this back.
    """
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    major, minor = capability
    properties = SimpleNamespace(
        name=f"pretended CUDA device {major}.{minor}",
        major=major,
        minor=minor,
        total_memory=80 << 30,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
    )
    answers = {
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: major >= 8,
        "is_initialized": lambda: True,
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.default_generators = (torch.Generator(),)
    torch.backends.cudnn.is_available = lambda: True
    # A fake tensor of `torch.tensor(1.0, device="cuda")` keeps its value, which stays on the CPU.
    torch._C._set_only_lift_cpu_tensors(True)
    setattr(FakeTensorMode, "avoid_device_init", property(lambda self: True))  # noqa: B010
    # Torch 2.11 asks for it all the same.
    setattr(fake_tensor, "init_gpu_context", lambda device: None)  # noqa: B010
    setattr(FakeTensor, "__deepcopy__", deepcopied)  # noqa: B010
    torch.utils.swap_tensors = _swap


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """`torch.utils.swap_tensors` that also works on weakly referenced fake tensors, for
    `module.to("cuda")`."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
