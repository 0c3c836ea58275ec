"""Graphs in files: saved in one process, loaded in another to be rewritten or shown."""

from graphopt.saved.errors import SavedGraphError
from graphopt.saved.files import load_description, load_graph, save_graph

__all__ = ["SavedGraphError", "load_description", "load_graph", "save_graph"]
