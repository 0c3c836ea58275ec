"""A model divided into stages: marks, export, division, and the proof of it."""
