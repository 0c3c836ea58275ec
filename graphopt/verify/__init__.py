"""Proofs and checks: is a graph well-formed, and still the same computation?"""

from graphopt.spmd import check_spmd
from graphopt.verify.captured import SpecReport, check_captured, check_graph

__all__ = ["SpecReport", "check_captured", "check_graph", "check_spmd"]
