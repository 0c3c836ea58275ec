"""Division of a model into pipeline stages: marks, export, division, and its proof."""
