"""The coverage set: training loops as people publish them, by family."""

from . import (  # noqa: F401
    adversarial,
    counting,
    language,
    optimizers,
    randomness,
    reinforcement,
    reporting,
    representation,
    sequences,
    styles,
    trainers,
    vision,
)
from .case import STEPS, Build, Case, cases, cured_cases, refusals, tensors_of

__all__ = ["STEPS", "Build", "Case", "cases", "cured_cases", "refusals", "tensors_of"]
