"""`graphopt estimate`: what a user's own step would gain, predicted or measured.

`target` finds the step and what it is called with, `predict` simulates it for numbers of ranks and
a network, `measure` runs it in turns with DistributedDataParallel, and `tables` prints both.
"""
