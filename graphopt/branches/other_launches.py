"""A warning that a rank decides alone about collectives of ranks that it has no agreement with:
they may decide differently, and wait for each other."""

from __future__ import annotations

import logging

from torch import fx

from graphopt import _compat
from graphopt.errors import AssumptionFailedError
from graphopt.graph_utils import is_collective
from graphopt.host.decisions.assumptions import Assumption, assumption_number
from graphopt.ir.metadata import input_kind
from graphopt.parallel.markers import Group
from graphopt.runtime.bound_step import BoundStep
from graphopt.tracing.ranks.uniformity import own_values

logger = logging.getLogger("graphopt")


def warn_of_other_launches(one: BoundStep, other: BoundStep, failed: AssumptionFailedError) -> None:
    """Warns if two branches launch different collectives by a value of this rank alone.

    Args:
        failed: the decision.
    """
    decided = assumption_number(one.module.graph, failed.index)
    instead = assumption_number(other.module.graph, failed.index)
    if decided is None or instead is None:
        return  # a library that finds out that it is traced does not decide any more
    for name in sorted(one.apart | other.apart):
        ranks = _compat.ranks_of_group(name) or ()
        differs = _differ(_launches(decided, name), _launches(instead, name))
        if differs and _is_own(decided, Group(name, len(ranks))):
            logger.warning(
                "a value that may be another one on each rank decides what is launched for the"
                " ranks %s\n  from:  %s\n  hint:  where they do not all decide alike, they wait for"
                " each other until the time-out of the group; decide by the value after"
                " torch.distributed.all_reduce(value)",
                list(ranks),
                failed.place,
            )


def _is_own(decision: fx.Node, group: Group) -> bool:
    """True if a decision is known to depend on this rank's arguments or random numbers."""
    kinds = map(input_kind, decision.graph.find_nodes(op="placeholder"))
    mine = [kind == "user_input" for kind in kinds]
    own = own_values(decision.graph, mine, group, decision)
    return not own.isdisjoint(decision.all_input_nodes[:1])


def _launches(decision: fx.Node, name: str) -> tuple[list[str], bool]:
    """The launches in a group up to the next decision, and whether there is one."""
    node, found = decision, list[str]()
    while (node := node.next).op != "output":
        if isinstance(node.target, Assumption):
            return found, True
        if is_collective(node) and str(node.args[-1]) == name:
            options = [arg for arg in node.args if isinstance(arg, str)]
            found.append(" ".join([str(node.target), *options]))
    return found, False


def _differ(one: tuple[list[str], bool], other: tuple[list[str], bool]) -> bool:
    """True if launches differ, whatever a further decision adds."""
    (first, first_goes_on), (second, second_goes_on) = one, other
    if any(a != b for a, b in zip(first, second, strict=False)):
        return True
    shorter_goes_on = first_goes_on if len(first) < len(second) else second_goes_on
    return len(first) != len(second) and not shorter_goes_on
