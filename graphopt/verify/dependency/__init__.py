"""The dependency check: what each kept node and result of a rewritten graph is computed from.

A graph is read as a data flow of entries and runs of elements. Nodes that both graphs have are
anchors. Every anchor, result and update must still be reached by the sources that reached it
before, through the same collectives. Nothing is said about which operators compute a value.
"""
