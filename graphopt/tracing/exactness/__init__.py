"""Operators that torch computes otherwise under a trace than in eager code: each is given the
form that has eager's bits."""
