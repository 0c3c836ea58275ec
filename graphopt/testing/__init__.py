"""For tests of passes: `check_pass`, ranks without processes, devices that are not there."""

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
