"""The proof that a sharded step equals the step of one device: one rank's graph, read for all
ranks together.

The blocks that the ranks hold are put side by side, so that the result can be compared with the
step of one device; `marker_meaning` says what the markers of a capture stand for.
"""
