"""What a step works on: its arguments, the modules, optimizers and tensors that it reaches
in other ways (implicit inputs), and the stand-ins of all these while it is traced."""
