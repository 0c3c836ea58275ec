"""Optimizers in a traced step: state that the first call creates, dropped and scaled gradients."""
