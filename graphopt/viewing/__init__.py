"""A graph as an HTML page."""

from graphopt.viewing.page import view_page

__all__ = ["view_page"]
