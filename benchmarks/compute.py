"""Step time, start, memory and numerics: eager, torch.compile and graphopt, on one device.

    python benchmarks/compute.py
    python benchmarks/compute.py --models gpt,llama --threads 2 --json compute.json
    python benchmarks/compute.py --quick

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from compute_models import HUGGING_FACE, WORKLOADS
from compute_show import means_table, model_tables
from compute_variants import COMPILED_MODEL, INDUCTOR, VARIANTS
from rich.console import Console
from spread import Figures

WORKER = Path(__file__).with_name("compute_worker.py")
QUICK_MODELS = ("mlp",)
ROUNDS, QUICK_ROUNDS = 12, 3
STARTED = (COMPILED_MODEL, INDUCTOR)
LINES_OF_A_FAILURE = 12
POLL_SECONDS = 0.1
WIDTH = 120
"""Of the tables, where the output is no terminal."""


class PartError(Exception):
    """A part ended with an exception; says with which."""


class Launcher:
    """Runs parts of the benchmark in processes of their own."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._threads = threads

    def run(self, *tasks: Figures, cache: Path, at_once: int = 1) -> list[Figures]:
        """What each task finds, with all that Inductor keeps in a folder, made if it is not there.

        Precompiled headers it keeps with temporary files, whose folder is part of the key of what
        it compiles.
        """
        temporary = cache / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self._threads),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TMPDIR": str(temporary),
        }
        waiting = list(enumerate(tasks))
        running: dict[int, subprocess.Popen[bytes]] = {}
        found: dict[int, Figures] = {}
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    number, task = waiting.pop(0)
                    running[number] = self._start(number, task, environment)
                time.sleep(POLL_SECONDS)
                for number in [n for n, process in running.items() if process.poll() is not None]:
                    found[number] = self._result(number, running.pop(number))
        finally:
            for process in running.values():
                process.kill()
                process.wait()
        return [found[number] for number in range(len(tasks))]

    def _start(
        self, number: int, task: Figures, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        result, log = self._files(number)
        with log.open("w") as file:
            return subprocess.Popen(
                [sys.executable, str(WORKER), json.dumps(task), str(result)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def _result(self, number: int, process: subprocess.Popen[bytes]) -> Figures:
        result, log = self._files(number)
        if process.returncode:
            lines = log.read_text(errors="replace").rstrip().splitlines()[-LINES_OF_A_FAILURE:]
            raise PartError("\n".join([f"a part failed: {process.args!r}", *lines]))
        figures: Figures = json.loads(result.read_text())
        return figures

    def _files(self, number: int) -> tuple[Path, Path]:
        return self._folder / f"{number}.json", self._folder / f"{number}.log"


def measure(model: str, rounds: int, launcher: Launcher, console: Console) -> Figures:
    """Everything about one model."""
    found: Figures = {"sizes": WORKLOADS[model].sizes}
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        cache = Path(folder, "cache")
        with console.status(f"{model}: cold and warm start"):
            found["start"] = measure_starts(model, launcher, cache)
        with console.status(f"{model}: steps in turns"):
            task = {"part": "steps", "model": model, "rounds": rounds}
            found |= launcher.run(task, cache=cache)[0]
        with console.status(f"{model}: numerics, and peak memory of each variant alone"):
            working = [variant for variant in VARIANTS if variant not in found["failed"]]
            found |= measure_untimed(model, working, launcher, cache)
    return found


def measure_starts(model: str, launcher: Launcher, cache: Path) -> dict[str, Figures]:
    """Seconds of a start with no cache and of the next. Leaves what was compiled in `cache`."""
    found = {}
    for variant in STARTED:
        task = {"part": "start", "model": model, "variant": variant}
        cold, warm = (launcher.run(task, cache=cache)[0]["seconds"] for _ in range(2))
        found[variant] = {"cold": cold, "warm": warm}
        cache.rename(cache.with_name(variant))
    for variant in STARTED:
        shutil.copytree(cache.with_name(variant), cache, dirs_exist_ok=True)
    return found


def measure_untimed(
    model: str, variants: list[str], launcher: Launcher, cache: Path
) -> dict[str, Figures]:
    """Numerics, and peak bytes of tensors of each variant; two processes at a time."""
    tasks: list[Figures] = [{"part": "numerics", "model": model}]
    tasks += [{"part": "memory", "model": model, "variant": variant} for variant in variants]
    numerics, *peaks = launcher.run(*tasks, cache=cache, at_once=2)
    memory = {variant: one["peak"] for variant, one in zip(variants, peaks, strict=True)}
    return {"numerics": numerics, "memory": memory}


# -------------------------------------------------------------------------------- command line


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=models, help=f"of {', '.join(WORKLOADS)}; with commas")
    parser.add_argument(
        "--quick", action="store_true", help=f"few rounds; {', '.join(QUICK_MODELS)} alone"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add the figures to those in a file"
    )
    return parser.parse_args()


def models(text: str) -> list[str]:
    """Names of models, given with commas between them."""
    names = text.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no model {unknown[0]!r}")
    return names


def chosen(options: argparse.Namespace, console: Console) -> list[str]:
    """The models to measure, without those whose library is not there."""
    names = options.models or (QUICK_MODELS if options.quick else WORKLOADS)
    if importlib.util.find_spec("transformers") is not None:
        return list(names)
    left_out = [name for name in names if name in HUGGING_FACE]
    if left_out:
        console.print(f"left out: {', '.join(left_out)} (pip install transformers)")
    return [name for name in names if name not in HUGGING_FACE]


def main() -> None:
    """Measure what the command line asks for and print it."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and cleans up
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    conditions = {"torch": torch.__version__, "threads": options.threads, "rounds": rounds}
    found = earlier(options.json, conditions)
    console.print(", ".join(f"{name}: {value}" for name, value in conditions.items()))
    failed = False
    with tempfile.TemporaryDirectory(prefix="graphopt-") as name:
        launcher = Launcher(Path(name), options.threads)
        for model in chosen(options, console):
            try:
                found[model] = measure(model, rounds, launcher, console)
            except PartError as error:
                failed = True
                console.print(f"{model}: {error}", markup=False)
                continue
            for table in model_tables(model, found[model]):
                console.print(table)
            if options.json:
                options.json.write_text(json.dumps(conditions | {"models": found}, indent=2))
    if found:
        console.print(means_table(found))
    sys.exit(failed)


def earlier(path: Path | None, conditions: Figures) -> dict[str, Figures]:
    """The models in a file of an earlier run, if it ran under the same conditions."""
    if path is None or not path.exists():
        return {}
    report: Figures = json.loads(path.read_text())
    models: dict[str, Figures] = report.pop("models")
    if report != conditions:
        sys.exit(f"{path} is of a run with {report}; name another file")
    return models


if __name__ == "__main__":
    main()
