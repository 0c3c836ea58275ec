"""Optimizers: the state that the first step makes, gradients that it drops, scaled gradients."""
