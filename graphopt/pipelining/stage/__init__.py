"""Pipeline stages that schedules run: the stage class, its compiled graphs, its gradients."""
