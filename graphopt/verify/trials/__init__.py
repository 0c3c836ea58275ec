"""Runs on random inputs, where a proof cannot decide or is not asked for.

A refused pass is tried out for its author, and a part that was rewritten with other rounding is
compared with a tolerance.
"""
