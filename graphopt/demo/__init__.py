"""`graphopt demo`: one training step, run by eager DDP and as a captured graph, compared."""
