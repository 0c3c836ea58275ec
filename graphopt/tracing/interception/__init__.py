"""What the code of a step asks of tensors, numbers and modules, answered while it is traced."""
