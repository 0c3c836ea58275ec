"""graphopt's passes inside `torch.compile`: as a backend, and as Inductor's custom passes."""

from graphopt.hooks.dynamo import backend
from graphopt.hooks.inductor import InductorPass, inductor_pass, inductor_passes
from graphopt.hooks.partial import graph_kind

__all__ = ["InductorPass", "backend", "graph_kind", "inductor_pass", "inductor_passes"]
