"""Interception of a step's questions about tensors, numbers and modules during the trace."""
