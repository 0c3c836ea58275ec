"""Checks that a graph is well formed, and that a rewritten graph still computes the same."""

from graphopt.ranks.spmd import check_spmd
from graphopt.verify.captured import SpecReport, check_captured, check_graph
from graphopt.verify.dependencies import check_dependencies
from graphopt.verify.dependency.network import dependency_graph
from graphopt.verify.equivalence import EquivalenceReport, check_equivalence
from graphopt.verify.problems import DependencyReport, Problem
from graphopt.verify.stage_checks import check_divided, check_finalized

__all__ = [
    "DependencyReport",
    "EquivalenceReport",
    "Problem",
    "SpecReport",
    "check_captured",
    "check_dependencies",
    "check_divided",
    "check_equivalence",
    "check_finalized",
    "check_graph",
    "check_spmd",
    "dependency_graph",
]
