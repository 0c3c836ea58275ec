"""Capture: eager code to one functional FX graph."""

from graphopt.ir.source import SourceLine
from graphopt.tracing.capture import CapturedStep, capture
from graphopt.tracing.inputs.entries import InputSpec

__all__ = ["CapturedStep", "InputSpec", "SourceLine", "capture"]
