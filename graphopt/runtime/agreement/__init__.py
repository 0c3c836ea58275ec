"""What ranks agree on before a graph runs: parameters, order of averages, collectives.

`communication` is what a training step has of it. A call is captured alone, under an earlier
agreement, or in a meeting of all ranks (`joint_capture`), which leaves an agreement (`agreed`).
"""
