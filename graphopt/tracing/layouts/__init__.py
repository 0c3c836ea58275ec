"""How tensors lie in memory: the strides that kernels give, where shape rules say others."""
