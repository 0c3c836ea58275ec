"""The coverage set: training loops as people publish them, by family."""

from . import (
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

FAMILIES = (
    language, vision, adversarial, reinforcement, representation, sequences, optimizers, styles,
    trainers, counting, randomness, reporting,
)  # fmt: skip

__all__ = ["FAMILIES", "STEPS", "Build", "Case", "cases", "cured_cases", "refusals", "tensors_of"]
