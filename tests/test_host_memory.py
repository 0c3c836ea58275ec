"""Memory on the CPU that a step frees is there for the next one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from graphopt.runtime.memory import says_of_malloc

PROGRAM = """
import resource, sys
import torch
import graphopt
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

step = graphopt.compile(train) if sys.argv[1] == "graphopt" else train
for _ in range(6):
    step(torch.ones(2048, 256))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    step(torch.ones(2048, 256))
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 30)
"""

IN_A_STEP = 2048 * 256 * 4 * 6 / 4096
"""Pages of what six layers keep for the backward."""


def fresh_pages(program: str, **environment: str) -> float:
    """Of one step."""
    kept = {k: v for k, v in os.environ.items() if not says_of_malloc({k: v})}
    command = [sys.executable, "-c", PROGRAM, program]
    found = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=True
    )
    return float(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings are glibc's")
def test_steps_need_no_fresh_pages() -> None:
    assert fresh_pages("graphopt") < IN_A_STEP / 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings are glibc's")
@pytest.mark.parametrize("program", ["eager", "graphopt"])
def test_settings_of_the_program_hold(program: str) -> None:
    assert fresh_pages(program, MALLOC_TRIM_THRESHOLD_="131072") > IN_A_STEP / 2


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, False),
        ({"MALLOC_ARENA_MAX": "2", "PATH": "/usr/lib/malloc"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, True),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, False),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, True),
        ({"LD_PRELOAD": "/usr/lib/libtcmalloc.so"}, True),
    ],
)
def test_what_speaks_of_an_allocator(environment: dict[str, str], says: bool) -> None:
    assert says_of_malloc(environment) is says
