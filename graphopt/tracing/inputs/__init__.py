"""Inputs of a step: arguments, implicit inputs (modules, optimizers and tensors that it reaches in
other ways), and their stand-ins during the trace."""
