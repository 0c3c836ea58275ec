"""From graph to compiled code. Import as ``graphopt.lowering``."""

if __name__ == "lowering":
    raise ImportError("import graphopt.lowering instead of lowering", name=__name__)
