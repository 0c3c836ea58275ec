"""Metadata of nodes, with one typed accessor for each key.

docs/ir.md documents the keys. This module is the only place that spells them; a key of a single
module is a constant there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.source import SourceLine

VALUE, PHASE, SOURCE = "val", "phase", "source"
MODULES, PROVENANCE = "nn_module_stack", "provenance"
KIND, NAME, PLACEMENT, RETURNED = "kind", "fqn", "placement", "returned"
HELD, HELD_SOMEWHERE = "held", "held_somewhere"
SENT, WRITES, KEPT = "sends", "writes", "kept"
LATE_GROUP, CARRIED_INDEX = "late_group", "carried_index"

CARRIED = "carried"
"""The kind of a placeholder that takes a value from the last iteration."""

OF_TRACE = (PHASE, SOURCE, MODULES, PROVENANCE, SENT)
"""The metadata keys that a trace sets on each node."""

OF_CALL = (PHASE, SOURCE, LATE_GROUP)
"""The metadata keys that the call of an outlined part copies from the part's first node."""

STATE_KINDS = frozenset({"parameter", "buffer", "optimizer_state"})
"""Kinds of placeholders that are the same live tensors in each call."""


def fake_value(node: fx.Node) -> Any:
    """Returns the value of a node: a FakeTensor, a symbolic number or a nest of them.

    Raises:
        KeyError: that is not known.
    """
    return node.meta[VALUE]


def known_value(node: fx.Node) -> Any:
    """Returns the value of a node as `fake_value` does, or None if it has none."""
    return node.meta.get(VALUE)


def storages_of(node: fx.Node) -> set[Any]:
    """Returns the storages of the tensors that a node computes, as far as they are known."""
    leaves: list[Any] = _compat.tree_leaves(known_value(node))
    return {_compat.storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}


def has_value(node: fx.Node) -> bool:
    return VALUE in node.meta


def set_value(node: fx.Node, value: Any) -> None:
    node.meta[VALUE] = value


def phase_of(node: fx.Node) -> str | None:
    """Returns the phase of a training step that a node belongs to.

    Returns:
        "forward", "backward", "communication" or "optimizer". None where that is not known: of
        inputs, of nodes that a pass has made without `like`, of graphs of other tools, and inside
        `torch.compile` of graphs in which nothing needs a gradient.

    >>> from graphopt.graph_utils import phase_of
    >>> phase_of(gm.graph.output_node()) is None
    True
    """
    phase: str | None = node.meta.get(PHASE)
    return phase


def set_phase(node: fx.Node, phase: str | None) -> None:
    """Sets the phase of the step to which a node belongs."""
    node.meta[PHASE] = phase


def source_line(node: fx.Node) -> SourceLine | None:
    """Returns the user's source line from which a node comes, or None."""
    line: SourceLine | None = node.meta.get(SOURCE)
    return line


def modules_of(node: fx.Node) -> Mapping[str, tuple[str, Any]]:
    """Returns the modules in whose forward a node was made, outermost first: path -> (qualified
    name, class)."""
    return node.meta.get(MODULES) or {}


def provenance_of(node: fx.Node) -> tuple[str, ...]:
    """Returns the names of the passes that made a node, oldest first; the first is "capture"."""
    return tuple(node.meta.get(PROVENANCE, ()))


def input_kind(node: fx.Node) -> str | None:
    """Returns the kind of input of a placeholder. None for other nodes, and for graphs of other
    origin."""
    kind: str | None = node.meta.get(KIND)
    return kind


def input_name(node: fx.Node) -> str | None:
    """Returns the qualified name of a placeholder's tensor, as in a `state_dict`, or None."""
    name: str | None = node.meta.get(NAME)
    return name


def is_state(node: fx.Node) -> bool:
    """True if a placeholder is a tensor of a model or an optimizer, the same in each call."""
    return node.op == "placeholder" and input_kind(node) in STATE_KINDS


def is_returned(placeholder: fx.Node) -> bool:
    """True if the step returns the live tensor of a placeholder, or receives it as an argument,
    too."""
    return bool(placeholder.meta.get(RETURNED))


def is_held(placeholder: fx.Node) -> bool:
    """True if other code on this rank refers to a state tensor, so that its uses are unknown."""
    return bool(placeholder.meta.get(HELD))


def is_held_somewhere(placeholder: fx.Node) -> bool:
    """True if `is_held` on any rank, as known when the ranks agreed on the capture."""
    return bool(placeholder.meta.get(HELD_SOMEWHERE))


def sent_names(node: fx.Node) -> tuple[str, ...]:
    """Returns the names of the parameters or buffers that a collective is for."""
    return tuple(node.meta.get(SENT, ()))


def set_sent_names(node: fx.Node, names: Sequence[str]) -> None:
    """Sets the names of the parameters or buffers that a collective is for."""
    node.meta.pop(SENT, None)
    if names:
        node.meta[SENT] = tuple(names)


def is_launch_kept(node: fx.Node) -> bool:
    """True if a collective must be launched alone and in the program's order within its group,
    since other ranks may run another graph."""
    return bool(node.meta.get(KEPT))


def keep_launch(node: fx.Node) -> None:
    """Marks a collective as one whose launch must stay as in the program."""
    node.meta[KEPT] = True


def set_provenance(node: fx.Node, names: tuple[str, ...]) -> None:
    node.meta[PROVENANCE] = names


def written_arguments(call: fx.Node) -> Sequence[int]:
    """Returns the positions of the arguments that an outlined part of a graph writes."""
    return tuple(call.meta.get(WRITES, ()))


def set_written_arguments(call: fx.Node, positions: Sequence[int]) -> None:
    """Sets the positions of the arguments that an outlined part of a graph writes."""
    call.meta[WRITES] = list(positions)


def late_group(node: fx.Node) -> int | None:
    """Returns the group of late work to which a node of a derived graph belongs, or None."""
    group: int | None = node.meta.get(LATE_GROUP)
    return group


def set_late_group(node: fx.Node, group: int | None) -> None:
    """Sets the group of late work to which a node belongs."""
    node.meta[LATE_GROUP] = group


def has_late_work(graph: fx.Graph) -> bool:
    """True if a derived graph contains work of the last iteration, or takes values of it."""
    return any(LATE_GROUP in node.meta or CARRIED_INDEX in node.meta for node in graph.nodes)


def carried_index(node: fx.Node) -> int | None:
    """Returns the index of a placeholder among the values carried from the last iteration, or
    None."""
    index: int | None = node.meta.get(CARRIED_INDEX)
    return index


def describe_carried(placeholder: fx.Node, value: fx.Node, index: int) -> None:
    """Marks a placeholder as carrying the last iteration's `value`."""
    placeholder.meta = some_of(value, VALUE, SOURCE, PHASE) | {CARRIED_INDEX: index, KIND: CARRIED}


def some_of(node: fx.Node, *keys: str) -> dict[str, Any]:
    """Returns those of the named metadata keys that a node has, with their values."""
    return {key: node.meta[key] for key in keys if key in node.meta}
