"""Capture: eager code to one functional FX graph."""

from graphopt.tracing.capture import CapturedStep, capture
from graphopt.tracing.inputs import InputSpec
from graphopt.tracing.source import SourceLine

__all__ = ["CapturedStep", "InputSpec", "SourceLine", "capture"]
