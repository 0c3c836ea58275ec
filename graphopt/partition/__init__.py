"""Splits one graph into a graph of submodules; see docs/partition.md."""

from graphopt.partition.assignment import Partition
from graphopt.partition.ordering import PartitionCycleError
from graphopt.partition.planning import partition_graph
from graphopt.partition.splitting import split_module

__all__ = ["Partition", "PartitionCycleError", "partition_graph", "split_module"]
