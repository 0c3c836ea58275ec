"""Real ranks of which one fails: the others end in an error of graphopt's, in time, or train on.

Each case starts three processes. `pytest -rP` shows how long the ranks took to notice.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from faults import (
    AGREE_SECONDS,
    COLLECTIVE_SECONDS,
    FROM_THE_START,
    KINDS,
    PHASES,
    STORES,
    WORLD,
    Fault,
    serve,
)
from gloo import PRELOADED

# A rank may wait for both time-outs in turn; the rest is for a machine that does other things too.
BOUND_SECONDS = AGREE_SECONDS + COLLECTIVE_SECONDS + 15.0
HANG_SECONDS = 3 * BOUND_SECONDS
RUNS = 10


@dataclass
class Outcome:
    """How a training with a fault ended.

    Attributes:
        answers: by rank, what it sent last; None where the process died without an answer.
        seconds: from the fault to the last error of another rank; 0 without one.
        hung: ranks whose process had to be ended.
    """

    answers: list[tuple[Any, ...] | None]
    seconds: float
    hung: list[int]


def run(fault: Fault) -> Outcome:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _place(fault.store) as place:
        ours, processes = [], []
        for rank in range(WORLD):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(rank, fault, place, there), daemon=True)
            process.start()
            there.close()
            ours.append(here)
            processes.append(process)
        deadline = time.monotonic() + HANG_SECONDS
        messages = [_messages(connection, deadline) for connection in ours]
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
    return _outcome(fault, messages, hung)


def _messages(connection: Connection, deadline: float) -> list[tuple[Any, ...]]:
    """All that a rank sends until it ends."""
    found = []
    while wait([connection], timeout=max(0.0, deadline - time.monotonic())):
        try:
            found.append(connection.recv())
        except (EOFError, ConnectionError):
            break
    return found


def _outcome(fault: Fault, messages: list[list[tuple[Any, ...]]], hung: list[int]) -> Outcome:
    answers = [sent[-1] if sent and sent[-1][0] != "began" else None for sent in messages]
    began = [sent[0][1] for sent in messages if sent and sent[0][0] == "began"]
    errors = [
        answer[4]
        for rank, answer in enumerate(answers)
        if rank != fault.rank and answer is not None and answer[0] == "error"
    ]
    seconds = max(errors) - began[0] if errors and began else 0.0
    return Outcome(answers, seconds, hung)


@contextmanager
def _place(store: str) -> Iterator[str]:
    """Where the store of the ranks is: a path, or a host and a port."""
    if store == "file":
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            yield str(Path(folder) / "store")
        return
    agent = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60))
    port = agent.port
    if store == "rank 0":
        del agent  # the port is free again for rank 0
    yield f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def losses() -> list[list[float]]:
    """What each rank's training gives where nothing goes wrong."""
    answers = run(Fault("none")).answers
    assert all(answer is not None and answer[0] == "done" for answer in answers), answers
    return [answer[1] for answer in answers if answer is not None]


def check(fault: Fault, outcome: Outcome, losses: list[list[float]]) -> None:
    """Nobody hangs, nobody gets an error of torch's, and who trains on has the right numbers."""
    print(f"{fault}: {outcome.seconds:.1f} s")
    assert not outcome.hung, outcome
    assert outcome.seconds < BOUND_SECONDS, outcome
    for rank, answer in enumerate(outcome.answers):
        if rank == fault.rank:
            assert answer is not None or fault.kind in ("kill", "terminate"), outcome
            continue
        assert answer is not None, outcome
        if answer[0] == "error":
            assert answer[2], f"rank {rank} ended in an error that is not graphopt's: {answer}"
        else:
            assert answer[1] == losses[rank], outcome


@pytest.mark.parametrize(("rank", "store"), [(0, "rank 0"), (1, "agent")])
def test_killed_while_it_traces(rank: int, store: str, losses: list[list[float]]) -> None:
    fault = Fault("kill", "trace 1", rank=rank, store=store)
    outcome = run(fault)
    check(fault, outcome, losses)
    for other, answer in enumerate(outcome.answers):
        if other == rank:
            continue
        assert answer is not None
        assert answer[1] == "SpmdMismatchError"
        # Where the store has gone as well, whichever was noticed first.
        ended = f"the process of rank(s) [{rank}] has ended"
        assert ended in answer[3] or (rank == 0 and "cannot reach the store" in answer[3])


def test_interrupted_between_two_collectives(losses: list[list[float]]) -> None:
    fault = Fault("interrupt", "between collectives", rank=2, pipeline="none")
    outcome = run(fault)
    check(fault, outcome, losses)
    for rank in (0, 1):
        answer = outcome.answers[rank]
        assert answer is not None
        assert answer[1] == "CollectiveError"
        assert "step 3: all_reduce of " in answer[3]
        assert "rank 2 said:  KeyboardInterrupt" in answer[3]


def test_no_rank_goes_on_at_another_collective(losses: list[list[float]]) -> None:
    """After one rank left the step between two collectives, and all call it again."""
    fault = Fault("interrupt", "between collectives", rank=1, pipeline="none", retries=1)
    outcome = run(fault)
    check(fault, outcome, losses)
    for answer in outcome.answers:
        assert answer is not None
        assert answer[1] == "CollectiveError"
        assert "make the group anew on all ranks" in answer[3]


def test_the_rank_that_hosts_the_store_leaves_last(losses: list[list[float]]) -> None:
    """A mismatch ends it, but not before all others know of the mismatch."""
    fault = Fault("another model", rank=2, store="rank 0")
    outcome = run(fault)
    check(fault, outcome, losses)
    for answer in outcome.answers:
        assert answer is not None
        assert answer[1] == "SpmdMismatchError"
        assert "rank 2 has other parameters or buffers than rank 0" in answer[3]


@pytest.mark.parametrize("phase", ["trace 1", "trace 2"])
def test_all_ranks_try_again(phase: str, losses: list[list[float]]) -> None:
    """After one rank was interrupted, and told the others."""
    fault = Fault("interrupt", phase, rank=0, store="rank 0", retries=1)
    outcome = run(fault)
    check(fault, outcome, losses)
    assert [answer[0] for answer in outcome.answers if answer is not None] == ["done"] * WORLD


@pytest.mark.full
def test_late_rank(losses: list[list[float]]) -> None:
    """The others give up on it, and try again until it comes."""
    fault = Fault("long delay", "before capture", store="agent", retries=20, agree=3.0)
    outcome = run(fault)
    check(fault, outcome, losses)
    assert [answer[0] for answer in outcome.answers if answer is not None] == ["done"] * WORLD


def faults(seed: int) -> Iterator[Fault]:
    """Cases that go on in turn through all kinds and phases, in an order of their own."""
    choose = random.Random(seed)
    cases = [Fault(kind, phase) for kind in KINDS for phase in PHASES]
    cases += [Fault(kind) for kind in FROM_THE_START] * 2
    for case in choose.sample(cases, RUNS):
        yield replace(
            case,
            rank=choose.randrange(WORLD),
            store=choose.choice(STORES),
            pipeline=choose.choice(["default", "none"]),
        )


@pytest.mark.full
@pytest.mark.parametrize("index", range(RUNS))
def test_random_fault(index: int, seed: int, losses: list[list[float]]) -> None:
    fault = list(faults(seed))[index]
    check(fault, run(fault), losses)
