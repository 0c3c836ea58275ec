"""Python numbers in a traced step: read from tensors, known before a call, or used as sizes and
positions."""
