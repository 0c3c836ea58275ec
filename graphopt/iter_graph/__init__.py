"""Software pipelining of training steps: parts of iteration *k* that run inside iteration *k+1*."""

from graphopt.iter_graph.graph import IterGraph, copy_graph
from graphopt.iter_graph.module import IterGraphModule
from graphopt.iter_graph.rules import check_late

__all__ = ["IterGraph", "IterGraphModule", "check_late", "copy_graph"]
