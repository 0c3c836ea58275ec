"""Peak memory of tensors on the CPU, to the byte."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def tensor_peak(work: Callable[[], object]) -> int:
    """Do the work; the bytes of tensors at one time beyond those that existed before.

    From the allocations that torch's profiler records. It sees none of other threads, so that a
    tensor which a communication thread frees seems to live on: of several ranks the lowest peak
    is the nearest.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    now = peak = 0
    for change in sorted(changes, key=lambda event: float(event["ts"])):
        now += change["args"]["Bytes"]
        peak = max(peak, now)
    return peak
