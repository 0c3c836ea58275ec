"""Stages of a pipeline: the class that schedules run, its graphs, and its gradients."""
