"""Tools for tests of passes: `check_pass`, simulated ranks, and devices that do not exist."""

from graphopt.testing.checking import TOLERANCE, UPDATE, StepUnderTest, check_pass
from graphopt.testing.pretended import Pretended, pretended
from graphopt.testing.ranks import FakeRanks, fake_ranks

__all__ = [
    "TOLERANCE",
    "UPDATE",
    "FakeRanks",
    "Pretended",
    "StepUnderTest",
    "check_pass",
    "fake_ranks",
    "pretended",
]
