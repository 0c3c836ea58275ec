"""Implicit inputs of a step's earlier graphs, given to the first trace of the next one.

A trace that finds something has to be done anew (`implicit`). The next graph of the same step uses
most of the same: its first trace has that from the beginning, and where it leaves some of that
alone, the step is traced without. That of the first graph has what the code names
(`named_in_code`).

    graph 1   trace ─ finds a model in a list ─▶ trace ─ finds the optimizer ─▶ trace
    graph 2   with both: trace
    graph 3   with both: trace ─ steps no optimizer ─▶ with the model: trace
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from graphopt.tracing.call import Call, SizesKept
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.inputs.implicit import EarlierInputs, ImplicitInputs, tensors_of
from graphopt.tracing.inputs.named_in_code import named_in


def with_remembered(call: Call) -> Call:
    """The call with the implicit inputs of earlier graphs or, without any, those that the code
    names."""
    earlier = call.earlier
    if earlier is None or not (earlier.objects or earlier.tensors or earlier.related):
        earlier = named_in(call.fn, *call.given)
    known = {id(leaf) for leaf in call.leaves} | {id(tensor) for _, tensor in call.besides.tensors}
    names = {name for name, _ in (*call.besides.objects, *call.besides.tensors)}
    live = [(name, reference, reference()) for name, reference in earlier.objects]
    known |= _within(call.leaves) | _within(value for *_, value in live)
    more = ImplicitInputs()
    for name, reference, value in live:
        if value is not None and _is_new(name, value, names, known):
            more.objects.append((name, reference))
    # What stood elsewhere may be in a module by now, which finds it.
    known |= {id(each) for value in (*call.leaves, *_of(more)) for each in _tensors_in(value)}
    for name, tensor in earlier.tensors:
        if _is_new(name, tensor, names, known):
            more.tensors.append((name, tensor))
    new = copy.copy(call.using(call.besides.joined(more)) or call)
    new.remembered = frozenset(
        [*(id(reference()) for _, reference in more.objects), *(id(t) for _, t in more.tensors)]
    )
    if earlier.related and not call.decided:
        new = new.knowing_sizes() or new
    return new


def _of(besides: ImplicitInputs) -> list[Any]:
    return [reference() for _, reference in besides.objects]


def _within(values: Iterable[Any]) -> set[int]:
    """The ids of modules that are inside others."""
    modules = [value for value in values if isinstance(value, nn.Module)]
    return {id(child) for each in modules for child in each.modules() if child is not each}


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors that become inputs with a module or optimizer."""
    if isinstance(value, nn.Module):
        return tensors_of(value.modules())
    groups = value.param_groups if isinstance(value, Optimizer) else ()
    return (parameter for group in groups for parameter in group["params"])


def _is_new(name: str, value: Any, names: set[str], known: set[int]) -> bool:
    if id(value) in known or name in names:
        return False
    names.add(name)
    known.add(id(value))
    return True


def without(call: Call, idle: Collection[int]) -> Call:
    """The call without some of its remembered implicit inputs, given by id."""
    if not idle:
        return call
    objects = [each for each in call.besides.objects if id(each[1]()) not in idle]
    tensors = [each for each in call.besides.tensors if id(each[1]) not in idle]
    new = copy.copy(call.using(replace(call.besides, objects=objects, tensors=tensors)) or call)
    new.remembered = call.remembered - frozenset(idle)
    return new


def remembered(graphs: Iterable[tuple[ImplicitInputs, Inputs]]) -> EarlierInputs:
    """The implicit inputs of several graphs, in order."""
    known = [*graphs]
    return EarlierInputs(
        [each for besides, _ in known for each in besides.objects],
        [each for besides, inputs in known for each in _plain_tensors(besides, inputs)],
        any(inputs.sizes is not SizesKept.UNKNOWN for _, inputs in known),
    )


def _plain_tensors(besides: ImplicitInputs, inputs: Inputs) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the implicit tensors that are the same objects in each call."""
    special = {id(entry.tensor) for entry in inputs.module_tensors if entry.rebindable}
    special.update(id(made) for table, name, made in besides.made if table.get(name) is not made)
    return (each for each in besides.tensors if id(each[1]) not in special)


def idle_in(
    graph: fx.Graph, call: Call, inputs: Inputs, stepped: Collection[int]
) -> frozenset[int]:
    """The ids of remembered inputs that a trace has not used.

    Args:
        graph: what was traced.
        stepped: positions of the optimizers that have stepped, among those of the call.
    """
    if not call.remembered:
        return frozenset()
    used: set[int] = set()
    nodes = iter(graph.find_nodes(op="placeholder"))
    for holder, node in zip(inputs.placeholders, nodes, strict=False):
        used.update(id(member.tensor) for member in holder.members if node.users)
    of_state = {s.optimizer for s, node in zip(inputs.states, nodes, strict=False) if node.users}
    modules = [call.leaves[position] for position in call.modules]
    of_modules = {id(tensor) for module in modules for tensor in module.parameters()}
    used |= {id(m) for m in modules if any(id(t) in used for t in tensors_of(m.modules()))}
    for index, optimizer in enumerate(call.optimizer_objects()):
        groups = optimizer.param_groups
        parameters = {id(parameter) for group in groups for parameter in group["params"]}
        if index in stepped or index in of_state or (parameters - of_modules) & used:
            used.add(id(optimizer))
    return frozenset(call.remembered - used)
