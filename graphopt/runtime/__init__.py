"""Execution of captured steps: binding of live tensors, graphs of branches, late updates.

`captured_graphs` finds the graph whose guards hold for a call; `bound_step` binds it to the live
tensors and runs it, and `results` puts what it gives where the step put it. `branch` goes on with
another graph where a decision by value goes the other way. `late*` keeps updates in flight,
`joint*` and `agreed` let ranks agree on a capture, and `eager` runs a step that is not captured.
"""
