"""The autocast, inference and grad modes that a graph enters, leaves and sets while it runs."""

from __future__ import annotations

from torch import fx

from graphopt._compat.partition import ENTER_INFERENCE_MODE, EXIT_OF, SET_GRAD_ENABLED

MODE_SWITCHES = frozenset([*EXIT_OF, *EXIT_OF.values(), SET_GRAD_ENABLED])
"""Functions that enter, leave or set a mode."""


def switches_mode(node: fx.Node) -> bool:
    """True if a node enters, leaves or sets a mode."""
    return node.op == "call_function" and node.target in MODE_SWITCHES


def sets_grad_mode(node: fx.Node) -> bool:
    """True if a node sets the grad mode."""
    return node.target is SET_GRAD_ENABLED


def enters_inference_mode(node: fx.Node) -> bool:
    """True if a node begins an inference-mode region, whose end restores the grad mode."""
    return node.target is ENTER_INFERENCE_MODE


def exit_of(node: fx.Node) -> fx.Node | None:
    """Returns the node that ends the region that a node begins, or None."""
    return next((user for user in node.users if user.target is EXIT_OF.get(node.target)), None)


def is_endless(node: fx.Node) -> bool:
    """True if a node begins a region that nothing ends."""
    return node.target in EXIT_OF and exit_of(node) is None


def switch_mode(active: list[fx.Node], node: fx.Node) -> None:
    """Updates the nodes whose modes are in effect, outermost first, for one that switches a
    mode."""
    if sets_grad_mode(node):
        inner = _begin_of_innermost(active)
        active[inner:] = [*(n for n in active[inner:] if not sets_grad_mode(n)), node]
    elif node.target in EXIT_OF:
        active.append(node)
    else:
        entered = node.all_input_nodes[0]
        index = active.index(entered)
        del active[index : None if enters_inference_mode(entered) else index + 1]


def _begin_of_innermost(active: list[fx.Node]) -> int:
    """Returns the index of what is within the innermost inference region."""
    inside = [index for index, node in enumerate(active) if enters_inference_mode(node)]
    return inside[-1] + 1 if inside else 0
