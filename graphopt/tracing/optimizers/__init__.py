"""Optimizers: the state that the first step makes, the step after it, scaled gradients."""
