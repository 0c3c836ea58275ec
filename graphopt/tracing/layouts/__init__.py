"""Memory layouts of traced tensors: the strides of real kernels where shape rules are wrong."""
