"""Execution of captured steps: binding of live tensors, graphs of branches, late updates.

`captured_graphs` finds the graph whose guards hold for a call; `bound_step` binds it to the live
tensors and runs it, and `results` puts what it gives where the step put it. `recaptures` says why
another graph is needed and how many are kept, and `eager` runs a step that is not captured. `late`
keeps updates in flight, and in `agreement` ranks agree on a capture; where a decision by value goes
the other way, `graphopt.branches` goes on with another graph.
"""
