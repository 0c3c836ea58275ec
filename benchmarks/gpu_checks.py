"""Correctness checks on a CUDA device: training as in eager code, and the tests that need one.

    python benchmarks/gpu_checks.py
    python benchmarks/gpu_checks.py --quick --json gpu.json

The exit status is 1 if a check failed, and 2 without a device; benchmarks/README.md says what is
checked.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step_models import GPT_ALPHABET, GPT_LENGTH, train_step
from torch import Tensor, nn

import graphopt
from graphopt.demo.model import CharGPT, GPTSize

VARIANTS = (
    "graphopt none",
    "graphopt default",
    "graphopt inductor",
    "graphopt inductor+cudagraphs",
)
STEPS = 5
LIMIT = 3.0
"""How many times eager's own error the error of compiled code may be."""

REPOSITORY = Path(__file__).resolve().parent.parent


class Check(NamedTuple):
    """The result of one check."""

    name: str
    passed: bool
    found: str


class Warnings(logging.Handler):
    """Collects warnings about regions and pieces that run operator by operator."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "operator by operator" in record.getMessage():
            self.found.append(record.getMessage())


@contextmanager
def fallbacks() -> Iterator[list[str]]:
    """While active, collects graphopt's messages about parts that it could not compile or
    record."""
    handler, logger = Warnings(), logging.getLogger("graphopt")
    logger.addHandler(handler)
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)


class TrainingRun(NamedTuple):
    """The result of a training: final parameters, and losses when returned and at the end."""

    parameters: list[Tensor]
    kept: list[Tensor]
    read: list[float]


def train(variant: str, device: str, dropout: float, dtype: torch.dtype) -> TrainingRun:
    """Trains a small GPT for five steps at falling learning rates, with a new seed in the
    middle."""
    torch.manual_seed(0)
    size = GPTSize(GPT_ALPHABET, length=GPT_LENGTH, layers=2, dropout=dropout)
    model: nn.Module = CharGPT(size).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    step: Callable[..., Tensor] = train_step
    if variant != "eager":
        step = graphopt.compile(train_step, **options(variant))
    generator = torch.Generator().manual_seed(1)
    run = TrainingRun([], [], [])
    for number in range(STEPS):
        tokens = torch.randint(GPT_ALPHABET, (8, GPT_LENGTH + 1), generator=generator).to(device)
        if number in (0, 3):
            torch.manual_seed(number)
        loss = step(model, optimizer, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        run.kept.append(loss.detach())
        run.read.append(float(loss))
        schedule.step()
    if isinstance(step, graphopt.TrainStep):
        step.flush()
    run.parameters.extend(parameter.detach() for parameter in model.parameters())
    if device == "cuda":
        torch.cuda.synchronize()
    return run


def options(variant: str) -> dict[str, Any]:
    """The options of a variant; random operators are not lowered, so that they draw as eager."""
    name = variant.partition(" ")[2]
    return {"pipeline": name} if name in ("none", "default") else {"lower": name}


def relative_error(actual: list[Tensor], exact: list[Tensor]) -> float:
    """The norm of two tensor lists' difference, relative to the second's norm."""
    difference = sum(
        float((a.double() - e).square().sum()) for a, e in zip(actual, exact, strict=True)
    )
    return float((difference / sum(float(e.square().sum()) for e in exact)) ** 0.5)


def check_numerics(device: str) -> Iterator[Check]:
    """Compares each graphopt variant with eager, and with eager in float64."""
    exact = train("eager", device, 0.0, torch.float64).parameters
    plain = train("eager", device, 0.0, torch.float32)
    dropped = train("eager", device, 0.2, torch.float32)
    own = relative_error(plain.parameters, exact)
    for variant in VARIANTS:
        with fallbacks() as found:
            run = train(variant, device, 0.0, torch.float32)
            masked = train(variant, device, 0.2, torch.float32)
        error = relative_error(run.parameters, exact)
        yield Check(
            f"{variant}: error to float64 over eager's",
            error <= LIMIT * own,
            f"{error / own:.3f}  ({error:.2e} / {own:.2e})",
        )
        gap = relative_error(masked.parameters, [p.double() for p in dropped.parameters])
        yield Check(f"{variant}: dropout and schedule as eager", gap <= 1e-3, f"{gap:.2e}")
        if "inductor" not in variant:
            pairs = zip(run.parameters + run.kept, plain.parameters + plain.kept, strict=True)
            same = all(torch.equal(a, b) for a, b in pairs)
            yield Check(f"{variant}: bit for bit eager", same, "same" if same else "differs")
        lasting = [float(loss) for loss in run.kept + masked.kept] == run.read + masked.read
        yield Check(f"{variant}: kept losses stay", lasting, f"{len(run.kept)} losses")
        yield Check(f"{variant}: nothing falls back", not found, "; ".join(found) or "0 parts")


def check_programs(quick: bool) -> Iterator[Check]:
    """Runs the tests of CUDA graphs and the coverage set, or quickly only the tests that need a
    device."""
    pattern = "test_cudagraphs_gpu.py" if quick else "test_cudagraphs*.py"
    files = sorted(map(str, (REPOSITORY / "tests").glob(pattern)))
    yield check_program(
        "tests of CUDA graphs", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files
    )
    if not quick:
        coverage = REPOSITORY / "benchmarks" / "coverage.py"
        yield check_program("coverage", str(coverage), "--device", "cuda", "--jobs", "4")


def check_program(name: str, *arguments: str) -> Check:
    """Runs a Python program in a process of its own, which must exit with status 0."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    return Check(name, done.returncode == 0, "; ".join([last, *failed]))


def main() -> int:
    """Runs all checks and prints what each found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out what takes long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the checks as well")
    parser.add_argument("--rehearse", action="store_true", help="check numerics alone, on the CPU")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print("there is no CUDA device; --rehearse runs this script on the CPU", file=sys.stderr)
        return 2
    checks = list(check_numerics("cpu" if options.rehearse else "cuda"))
    if not options.rehearse:
        checks += check_programs(options.quick)
    for check in checks:
        print(f"{check.name}: {'ok' if check.passed else 'FAILED'}  {check.found}")
    if options.json:
        options.json.write_text(json.dumps([check._asdict() for check in checks], indent=2))
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
