"""Compile many regions at once, before they are needed.

The regions go to processes of their own, which leave what they compile in Inductor's cache on disk;
there this process finds it. (Inductor's compiler keeps state per process, so that threads would
disturb each other.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import torch

from graphopt.lowering.compiler import Options, compile_body, same_random_numbers
from graphopt.lowering.subgraph import LoweredSubgraph
from graphopt.saved import load_graph, save_graph


def compile_ahead(regions: Sequence[LoweredSubgraph]) -> None:
    """Compile regions in parallel, one process for each core and at most 8, with a progress bar
    where standard error is a terminal. A region that fails there is compiled, and fails, here."""
    pending = [region for region in regions if not region.is_compiled and region.failure is None]
    with same_random_numbers():  # the progress bar draws
        if len(pending) > 1:
            _fill_cache(pending)
        for region in pending:
            region.prepare()


def _fill_cache(regions: Sequence[LoweredSubgraph]) -> None:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    workers = min(len(regions), os.cpu_count() or 1, 8)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor(workers) as pool,
    ):
        task = progress.add_task("compiling", total=len(regions))
        jobs = []
        for index, region in enumerate(regions):
            path = Path(folder, f"{index}.pt")
            save_graph(region.graph_module, path)
            jobs.append(pool.submit(_compile_elsewhere, path, region.options))
        for _ in as_completed(jobs):
            progress.advance(task)


def _compile_elsewhere(path: Path, options: Options) -> None:
    job = json.dumps({"options": asdict(options), "threads": torch.get_num_threads()})
    command = [sys.executable, "-m", __name__, str(path), job]
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)


def main(path: str, job: str) -> None:
    """Compile the region in a file, and leave the code in the cache."""
    settings = json.loads(job)
    torch.set_num_threads(settings["threads"])
    body = load_graph(path)
    region = LoweredSubgraph(body, path)
    compile_body(body, region.kinds, Options(**settings["options"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
