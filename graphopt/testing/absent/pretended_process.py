"""The main function of the process with a simulated device, after torch is imported."""

from __future__ import annotations

import pickle
import runpy
import sys
from multiprocessing import spawn
from typing import Any

from graphopt import _compat
from graphopt._compat import absent_devices


def run(job: dict[str, Any]) -> Any:
    """Runs a job's function or script with fake tensors, as rank 0 of all ranks."""
    absent_devices.believe(job["capability"])
    if job["ranks"] > 1:
        _compat.start_fake_group(job["ranks"])
    if "script" in job:
        return _run_script(job["script"], job["arguments"])
    spawn.prepare(job["preparation"])  # its `__main__`, where the function may have come from
    function, args, kwargs = pickle.loads(job["call"])
    with _compat.new_fake_mode():
        return function(*args, **kwargs)


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    with _compat.new_fake_mode():
        runpy.run_path(path, run_name="__main__")
