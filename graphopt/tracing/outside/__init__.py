"""What a step reads from outside its arguments: observed while it is traced, guarded afterwards.

`graphopt.tracing.bytecode` tells of each read and write. `record` has the places that were read,
with the values found there; `places` says what a place is, and `held` what may take the place of an
object. `unrepeated` has the changes that no later call would repeat. `steps` begins and ends the
record of one trace, and `graphopt.guards` looks at its places before each call.
"""
