"""Simulation of several ranks in one process: replicas of a step exchange values by collectives."""

from graphopt.replicas.lockstep import Lockstep
from graphopt.replicas.replica_steps import ReplicatedStep

__all__ = ["Lockstep", "ReplicatedStep"]
