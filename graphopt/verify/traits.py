"""What an operator does to dependencies: its row, under the name that the verifier has for it."""

from graphopt.ir.operators import operator_of as traits_of

__all__ = ["traits_of"]
