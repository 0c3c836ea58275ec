"""Python numbers of a step: read from tensors, known before a call, computed from one another,
used as sizes and positions."""
