"""A proof that the submodules of a split graph together compute what the whole graph did."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import VerificationError
from graphopt.ir.metadata import known_value
from graphopt.partition.hazards import hazards
from graphopt.partition.module_attributes import Attributes
from graphopt.verify.checks.same_calls import call_problems
from graphopt.verify.composition import ComposedGraph, NamedObjects
from graphopt.verify.equivalence import check_equivalence
from graphopt.verify.problems import Problem


def check_split(whole: fx.GraphModule, split: fx.GraphModule, attributes: Attributes) -> None:
    """Proves that a graph of submodules computes what the whole graph did.

    The calls of submodules give way to what they do; what comes of it has to make the calls of
    `whole`, each with the same arguments, and in an order that keeps updates in place and random
    numbers where they were. For graphs of operators it also has to leave the same terms.

    Raises:
        VerificationError: it does not.
    """
    objects = NamedObjects(state=True)
    before, after = (
        _composed(module, objects, attributes, names)
        for module, names in ((whole, ()), (split, split.meta["partition_names"]))
    )
    found = next(_problems(before, after, objects), None)
    if found is not None:
        raise VerificationError(f"split_module was refused: {found}")


def _composed(
    module: fx.GraphModule, objects: NamedObjects, attributes: Attributes, pieces: Collection[str]
) -> fx.Graph:
    composition = ComposedGraph(objects, attributes.find, pieces=pieces)
    return composition.end(composition.call(module, composition.inputs(module.graph)))


def _problems(before: fx.Graph, after: fx.Graph, objects: NamedObjects) -> Iterator[Problem]:
    yield from call_problems(before, after, partial(hazards, find=objects.find))
    if all(map(_is_known, before.nodes)):
        report = check_equivalence(before, after)
        yield from report.problems if report.decidable else ()


def _is_known(node: fx.Node) -> bool:
    """True if symbolic evaluation supports a node."""
    if node.op == "call_function":
        return isinstance(node.target, _compat.OpOverload) or node.target is operator.getitem
    return node.op != "placeholder" or isinstance(known_value(node), torch.Tensor)
