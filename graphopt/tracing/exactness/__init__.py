"""Replacements for operators that torch computes differently under a trace, with eager's bits."""
