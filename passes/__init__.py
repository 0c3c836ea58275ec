"""Graph passes, one per file. Import as ``graphopt.passes``."""

if __name__ == "passes":
    raise ImportError("import graphopt.passes instead of passes", name=__name__)
