"""n replicas of a step in one process, whose collectives exchange values."""

from graphopt.replicas.lockstep import Lockstep
from graphopt.replicas.steps import ReplicatedStep

__all__ = ["Lockstep", "ReplicatedStep"]
