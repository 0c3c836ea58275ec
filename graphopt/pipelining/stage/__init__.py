"""One stage of a pipeline: what schedules run, its graphs, and its gradients."""
