"""An order of low memory use: gathers just before their use, scatters awaited at once.

    g1 = all_gather(w1)                      g1 = all_gather(w1)
    g2 = all_gather(w2)                      y  = mm(x, wait(g1))
    y  = mm(x, wait(g1))                     g2 = all_gather(w2)
    z  = mm(y, wait(g2))            ==>      z  = mm(y, wait(g2))
    s  = reduce_scatter(d)                   s  = reduce_scatter(d)
    e  = mm(z, d)                            r  = wait(s)
    r  = wait(s)                             e  = mm(z, d)

What is sent is held until it has been waited for, so that scatters which nobody waits for hold all
gradients. Compute keeps its order. It is where a search for orders within a budget begins
(`graphopt.schedule.overlap`), and the memory of what stands late is not counted twice.
"""

from __future__ import annotations

from torch import fx

from graphopt.ir.views import view_tail
from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.emitting import Emitter
from graphopt.schedule.program import Program
from graphopt.schedule.tables import MOST_PREPARATION, ancestors


def frugal_order(program: Program, before: Predecessors) -> list[fx.Node]:
    """Returns all nodes with gathers launched as late, and scatters awaited as early, as possible.

    Args:
        before: what each node needs (`graphopt.schedule.constraints`).
    """
    held: set[fx.Node] = set()
    for message in program.messages:
        if message.kind.startswith("all_gather"):
            held.add(message.launch)
            held.update(ancestors(message.launch, before, MOST_PREPARATION) or ())
            held.update(node for wait in message.waits for node in view_tail(wait))
    emitter = Emitter(program.order, before)
    for node in program.order:
        if node in held:
            continue
        emitter.emit(node)
        launched = program.launched.get(node)
        if launched is not None and launched.kind.startswith("reduce_scatter"):
            for wait in launched.waits:
                emitter.emit(wait)
    return list(emitter.finished().order)
