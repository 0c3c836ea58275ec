"""Functionalization: rewrites the raw trace, with updates in place, to the captured dialect.

What is functional in the trace is copied; memory that is only written as a whole is followed from
write to write (`whole_writes`); all else runs under torch's functionalization (`interpreter`).
"""
