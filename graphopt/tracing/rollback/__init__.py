"""What a trace puts back: afterwards all that a step can reach is as before.

`substitute` puts stand-ins into modules and optimizers for the time of a trace. `host_state` keeps
the contents of all objects that `reachable` finds, compares them with what the step has left, and
writes them back; `contents` has one row for each kind of object.
"""
