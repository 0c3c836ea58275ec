"""For tests of passes: `check_pass`, and ranks without processes."""

from graphopt.testing.checking import TOLERANCE, UPDATE, StepUnderTest, check_pass
from graphopt.testing.ranks import FakeRanks, fake_ranks

__all__ = ["TOLERANCE", "UPDATE", "FakeRanks", "StepUnderTest", "check_pass", "fake_ranks"]
