"""n replicas of a step in one process, whose collectives exchange values."""

from graphopt.replicas.lockstep import Lockstep
from graphopt.replicas.replica_steps import ReplicatedStep

__all__ = ["Lockstep", "ReplicatedStep"]
