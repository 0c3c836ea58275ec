"""Guards: records of what a captured graph has read, and one check per call that it is unchanged.

`make_fx` specializes a graph without saying on what. `Guards` (`guards.py`) holds all of it, one
file for each sort of thing: arguments and numbers, modules, tensors, optimizers and their state,
and what the step has read outside its arguments. While nothing changes, a call asks one question:
`snapshots` compares words of memory, such as the versions of all dictionaries, in one call
(`known_words.py`), and has everything else as flat lists, which are compared with what is there in
C (`conditions.py`). Where something differs, each guard looks at its own things one by one, decides
whether the change is one that the graph depends on, and names it for the log.
"""

import graphopt.tracing  # noqa: F401  # which is imported first: it uses some of the files here
