"""What a step reads from outside its arguments: observed while it is traced, guarded afterwards.

observe       which functions run, instruction by instruction
instructions  what an instruction reads and writes
attributes    where `x.name` is found
calls         what functions without Python code read and write
record        the places that were read, with the values found there
places        what they hold, and what may take its place (`held`); `graphopt.guards` looks at them
"""
