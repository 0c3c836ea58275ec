"""Symbolic values: what a tensor holds, as terms that are equal only for equal computations.

`terms` is the table of hash-consed terms, `axioms` the rules by which operators act on runs of
elements; the other files are the arithmetic of these rules: permutations, casts, elementwise
operators, entries of lists, scattered and gathered reductions.
"""
