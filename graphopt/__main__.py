"""`python -m graphopt`."""

from graphopt.cli import app

app()
