"""What all tests share: threads, random seeds, and how hypothesis behaves."""

from __future__ import annotations

import gc
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported, and for the processes that tests start as well: several ranks on few
# cores are slower with more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from hypothesis import settings

import durations
import frozen
import slices
from deep import watch_captures
from gloo import Pool, pool

# Test modules are imported and their tests collected: millions of objects, and no garbage.
gc.set_threshold(50_000, 50, 100)

# Capturing takes as long as it takes, and a failure must come back on the next run.
settings.register_profile("graphopt", deadline=None, derandomize=True)
settings.load_profile("graphopt")
pytest.register_assert_rewrite("twins", "refusal")

# torch describes every tensor and symbol that it traces, with stacks, as soon as its structured log
# has a handler, and pytest gives its own to each logger that does not propagate: a fifth of the
# time of a capture.
logging.getLogger("torch.__trace").propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seed`: what tests marked `full` make their random cases from."""
    parser.addoption("--seed", type=int, default=0, help="what random cases are made from")


def pytest_configure(config: pytest.Config) -> None:
    """A run without tests marked `full` makes fewer random cases."""
    slices.choose("not full" not in config.getoption("markexpr"))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest files first: workers take one after another, and one that takes minutes would be
    left alone at the end. What takes too long for the normal run is `full`, what takes too long
    for `make check` `slow`; some cases are left out (`covering`)."""
    seconds = defaultdict(lambda: durations.TYPICAL, durations.listed())
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    quickest: dict[str, list[pytest.Item]] = {}
    for cases in sorted(tests.values(), key=lambda cases: seconds[_function(cases[0])]):
        if not all(item.get_closest_marker("full") for item in cases):
            quickest.setdefault(cases[0].path.stem, cases)
    for cases in tests.values():
        each = seconds[_function(cases[0])]
        of_all = cases is quickest.get(cases[0].path.stem)
        _mark_rest(cases, "full", durations.NORMAL, each, of_all)
        _mark_rest(cases, "slow", 0 if _starts_ranks(cases[0]) else durations.CHECK, each, False)
    left_out = [
        item
        for cases in tests.values()
        for item in _left_out(cases, seconds[_function(cases[0])], config)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]
    whole = "not full" not in config.getoption("markexpr")
    longest: dict[str, float] = defaultdict(float)
    for item in items:
        if whole or item.get_closest_marker("full") is None:
            longest[item.path.stem] += seconds[_function(item)]
    items.sort(key=lambda item: -longest[item.path.stem])


def _function(item: pytest.Item) -> str:
    """A test by the name under which its duration is listed."""
    return f"{item.path.stem}::{item.name.partition('[')[0]}"


def _starts_ranks(item: pytest.Item) -> bool:
    return any(name.endswith("_ranks") for name in getattr(item, "fixturenames", ()))


def _mark_rest(
    cases: list[pytest.Item], mark: str, budget: float, each: float, at_least_one: bool
) -> None:
    """Mark those cases of one test that are too many for so many seconds; all of them where one
    takes longer, unless one is to be left.

    Args:
        each: seconds of one case.
    """
    normal = [item for item in cases if item.get_closest_marker("full") is None]
    count = max(int(budget / each), int(at_least_one))
    chosen = slices.spread([_parameters(item) for item in normal], count)
    for number, item in enumerate(normal):
        if number not in chosen:
            item.add_marker(mark)


def _left_out(cases: list[pytest.Item], each: float, config: pytest.Config) -> list[pytest.Item]:
    """Of the cases of one test, those that no run has with this seed.

    Args:
        each: seconds of one case.
    """
    mark, seed = cases[0].get_closest_marker("covering"), config.getoption("--seed")
    kept = {n for n, item in enumerate(cases) if item.get_closest_marker("full") is None}
    parameters = [_parameters(item) for item in cases]
    if mark is not None:
        chosen = slices.covering(parameters, *mark.args, seed, kept)
    else:
        chosen = kept | slices.sample(parameters, max(1, int(durations.WHOLE / each)), seed)
    return [item for number, item in enumerate(cases) if number not in chosen]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    call = getattr(item, "callspec", None)
    return {} if call is None else dict(call.params)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The number given as `--seed`."""
    return int(request.config.getoption("--seed"))


@pytest.fixture(scope="module", autouse=True)
def _left_to_itself() -> None:
    """Leave out of garbage collections what the files before made; within a file, collect
    seldom."""
    frozen.set_aside()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True)
def _rest_left_out() -> Iterator[None]:
    """As for a file, after a test that has imported something or left much."""
    yield
    frozen.set_rest_aside()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    """Two gloo ranks, for all tests of this process: starting them takes longer than most tests."""
    with pool(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Pool]:
    """As `two_ranks`, three of them."""
    with pool(3) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Pool]:
    """As `two_ranks`, four of them."""
    with pool(4) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _refusals_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every test: what a refused capture leaves behind fails it."""
    watch_captures(monkeypatch)


@pytest.fixture
def without_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting from the environment, and files that appear are in a folder of the test."""
    for variable in ("VERIFY", "DUMP", "DISABLE", "STOP_AFTER"):
        monkeypatch.delenv(f"GRAPHOPT_{variable}", raising=False)
    monkeypatch.setenv("GRAPHOPT_REPRO", "graphopt-repro")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often steps have been traced, as the one item of a list."""
    from graphopt.tracing import trace

    count = [0]
    traced: Callable[..., Any] = trace._traced

    def counted(*args: Any) -> Any:
        count[0] += 1
        return traced(*args)

    monkeypatch.setattr(trace, "_traced", counted)
    return count
