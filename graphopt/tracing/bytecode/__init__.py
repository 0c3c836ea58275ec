"""The functions that a step runs, followed instruction by instruction while it is traced.

`observe` is told of each instruction of functions that are observed. `accesses` says which of them
may read or write outside, `instructions` what they do then, `callees` and `calls` what they call
and what functions without Python code read and write. All goes into the record of
`graphopt.tracing.outside`.
"""
