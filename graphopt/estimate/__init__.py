"""`graphopt estimate`: predicts or measures the gain for a user's own training step.

`target` finds the step and what it is called with, `predict` simulates it for numbers of ranks and
a network, `measure` runs it in turns with DistributedDataParallel, and `tables` prints both.
"""
