"""Parameters that several stages use: replicated in each, or transmitted by one owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import fx

from graphopt.errors import PartitionError
from graphopt.pipelining.pipe.model_tensors import ModelTensors
from graphopt.pipelining.pipe.mutation import Mutations, Regions


class MultiUseParameterConfig(Enum):
    """The treatment of a parameter that several stages use.

    REPLICATE: each of the stages holds it; their gradients have to be added, which
    `reduce_replicated_gradients` does. TRANSMIT: the first of the stages holds it and sends it
    along with its outputs; its gradient comes back with theirs.

    >>> from graphopt.pipelining import MultiUseParameterConfig
    >>> [config.name for config in MultiUseParameterConfig]
    ['TRANSMIT', 'REPLICATE']
    """

    TRANSMIT = auto()
    REPLICATE = auto()


MultiUseSpec = MultiUseParameterConfig | Mapping[str, MultiUseParameterConfig] | None


@dataclass(frozen=True)
class ParameterReplica:
    """One parameter that several stages hold, with its name in each.

    Attributes:
        holders: stage and the parameter's qualified name there, by stage.
    """

    holders: tuple[tuple[int, str], ...]


def transmit_shared(
    graph: fx.Graph,
    stage_of: dict[fx.Node, int],
    state: ModelTensors,
    spec: MultiUseSpec,
    regions: Regions,
) -> None:
    """Lets each transmitted parameter be read on its owner's stage and sent from there.

    Raises:
        PartitionError: `spec` names what is no parameter, or a buffer is updated by another stage
            than the first that uses it.
    """
    configs = _by_name(spec, state)
    mutations = Mutations(graph, regions)
    for node in [n for n in graph.nodes if n.op == "get_attr" and n not in regions]:
        _return_through_last_stage(node, stage_of)
        stages = sorted({stage_of[user] for user in node.users})
        if len(stages) < 2:
            continue
        name = str(node.target)
        is_updated = _check_updates(name, stages[0], {stage_of[n] for n in mutations.writers(node)})
        chosen = _config_of(state.aliases(name), configs, spec)
        if is_updated:
            _transmit(node, stages[0], stage_of, torch.ops.aten.clone.default)
        elif chosen is MultiUseParameterConfig.TRANSMIT:
            _transmit(node, stages[0], stage_of, torch.ops.aten.alias.default)


def _by_name(spec: MultiUseSpec, state: ModelTensors) -> Mapping[str, MultiUseParameterConfig]:
    if spec is None or isinstance(spec, MultiUseParameterConfig):
        return {}
    if not isinstance(spec, Mapping):
        raise PartitionError(
            "multi_use_param_spec is a MultiUseParameterConfig, or a mapping from names of"
            f" parameters to them, not {spec!r}"
        )
    known = set(state.names())
    for name, config in spec.items():
        if name not in known:
            raise PartitionError(f"multi_use_param_spec: the model has no parameter '{name}'")
        if not isinstance(config, MultiUseParameterConfig):
            raise PartitionError(
                f"multi_use_param_spec: '{name}' has {config!r}, not a MultiUseParameterConfig"
            )
    return spec


def _config_of(
    names: list[str], configs: Mapping[str, MultiUseParameterConfig], spec: MultiUseSpec
) -> MultiUseParameterConfig:
    if isinstance(spec, MultiUseParameterConfig):
        return spec
    chosen = [configs[name] for name in names if name in configs]
    return chosen[0] if chosen else MultiUseParameterConfig.REPLICATE


def _check_updates(name: str, owner: int, stages: set[int]) -> bool:
    """True if the owner's stage updates the buffer; an update by another stage is refused."""
    for stage in sorted(stages - {owner}):
        raise PartitionError(
            f"buffer '{name}' is updated by stage {stage} and used by stage {owner} before it; a"
            " buffer may only be updated by the first stage that uses it. Move the boundary so that"
            " its users are in one stage"
        )
    return bool(stages)


def _return_through_last_stage(node: fx.Node, stage_of: dict[fx.Node, int]) -> None:
    """Makes a parameter that the model returns an output of a stage."""
    output = next(iter(reversed(node.graph.nodes)))
    if output not in node.users:
        return
    last = max(stage_of.values(), default=0)
    with node.graph.inserting_before(output):
        returned = node.graph.call_function(torch.ops.aten.alias.default, (node,))
    returned.meta = dict(node.meta)
    stage_of[returned] = last
    output.replace_input_with(node, returned)


def _transmit(node: fx.Node, owner: int, stage_of: dict[fx.Node, int], operation: Any) -> None:
    later = [user for user in node.users if stage_of.get(user, owner) > owner]
    last = [n for n in node.graph.nodes if stage_of.get(n) == owner][-1]
    with node.graph.inserting_after(last):
        sent = node.graph.call_function(operation, (node,))
    sent.meta = dict(node.meta)
    stage_of[sent] = owner
    for user in later:
        user.replace_input_with(node, sent)
