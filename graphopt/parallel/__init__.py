"""Kinds of parallelism: each expands the communication markers of a captured step.

    capture       writes markers: this gradient, these buffers are to be the same on all ranks
    parallelize   lets the kind expand them: `DataParallel` averages gradients, copies buffers

A kind is a subclass of `OverRanks` with a method `expand` (graphopt/parallel/data_parallel.py is
one, and all that knows of averages); it is given to `graphopt.compile(parallel=…)`.
"""

from graphopt.parallel.data_parallel import DataParallel
from graphopt.parallel.kinds import Manual, OverRanks, Parallel
from graphopt.parallel.resolving import resolve
from graphopt.parallel.zero import ZeRO

__all__ = ["DataParallel", "Manual", "OverRanks", "Parallel", "ZeRO", "resolve"]
