"""A helper process in which torch believes a device exists; see `graphopt.testing.pretended`.

`cuda.cpp` is what torch has to be told before it is imported, `library` builds it, `bootstrap` is
the script that the process runs.
"""
