"""Normalization of operator calls: arguments by position wherever they have one.

    aten.view(self=x, size=[4])     ==>     aten.view(x, [4])

Both forms are the same call, but analyses of reads, writes and aliases expect the first argument at
the first position.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from graphopt import _compat


def give_by_position(graph: fx.Graph) -> int:
    """Moves keyword arguments that have a position to that position. Returns how many there were.

    Arguments behind one that is not given keep their names.

    >>> from graphopt.ir.positions import give_by_position
    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> view = graph.call_function(torch.ops.aten.view.default, (), {"self": x, "size": [4]})
    >>> give_by_position(graph), view.args, view.kwargs
    (2, (x, [4]), {})
    """
    moved = 0
    for node in graph.nodes:
        if node.kwargs and isinstance(node.target, _compat.OpOverload):
            moved += _moved(node, node.target)
    return moved


def _moved(node: fx.Node, target: _compat.OpOverload) -> int:
    args, kwargs = list[Any](node.args), dict(node.kwargs)
    for parameter in _compat.schema_of(target).arguments[len(args) :]:
        if parameter.kwarg_only or parameter.name not in kwargs:
            break
        args.append(kwargs.pop(parameter.name))
    moved = len(args) - len(node.args)
    if moved:
        node.args, node.kwargs = tuple(args), kwargs
    return moved
