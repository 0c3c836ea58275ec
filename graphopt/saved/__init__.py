"""Graphs in files: saved in one process, loaded, rewritten and shown in another."""

from graphopt.saved.errors import SavedGraphError
from graphopt.saved.files import load_description, load_graph, save_graph
from graphopt.saved.listing import full_listing

__all__ = ["SavedGraphError", "full_listing", "load_description", "load_graph", "save_graph"]
