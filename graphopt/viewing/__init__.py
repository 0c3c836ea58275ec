"""Views of a step: an HTML page, a short form for notebooks, and DOT."""

from graphopt.readable.html_page import trace_page
from graphopt.viewing.notebook import graph_html
from graphopt.viewing.page import view_page

__all__ = ["graph_html", "trace_page", "view_page"]
