"""`split_module`: splits one graph into a graph that calls submodules."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx, nn

from graphopt import _compat
from graphopt._compat.partition import is_persistent
from graphopt.errors import PartitionError
from graphopt.partition.assignment import Partition, SplitCallback, unique_name
from graphopt.partition.boundaries import VALUE_KEYS
from graphopt.partition.module_attributes import Attributes
from graphopt.partition.planning import PartitionPlan, make_plan
from graphopt.runtime.memory import collector_paused

_TAKEN = frozenset(dir(fx.GraphModule)) | {"training"}
"""Attributes of every graph module, which a submodule must not hide."""


def split_module(
    m: fx.GraphModule,
    root_m: nn.Module | None,
    split_callback: SplitCallback,
    qualname_map: dict[str, str] | None = None,
    keep_original_order: bool = False,
    keep_original_node_name: bool = False,
    keep_original_input_name: bool = True,
    *,
    partition_affix: str | None = None,
    tuple_return: bool = False,
    on_cycle: Literal["error", "merge"] = "error",
    verify: str | None = None,
) -> fx.GraphModule:
    """Splits a graph into submodules, called from a parent graph.

    Placeholders and attributes stay in the new graph; each partition `id` becomes the child
    `submod_<id>`, which takes what it reads and returns what is read elsewhere: one value as it is,
    several as a tuple. Modules, parameters and buffers are shared with `m`, which stays as it is.
    `meta["partition_names"]` of the result is the set of the names of these children.

    Args:
        m: the graph to split.
        root_m: where to look for what `m` itself does not have, or None.
        split_callback: the partition of a call node, any value with a text; asked once for each, in
            graph order.
        qualname_map: filled with the new qualified name → the old one, for each module that moves.
        keep_original_order: call partitions in the order of their first nodes, and read attributes
            just before. Otherwise each partition is called after those that it depends on, and in
            that order wherever there is a choice.
        keep_original_node_name: nodes keep their names; otherwise they get names after what they
            call, in each submodule anew.
        keep_original_input_name: inputs of submodules have the names of the values that they stand
            for; otherwise they are `arg_0`, `arg_1`, …
        partition_affix: children are called `submod_<affix>_<id>`.
        tuple_return: submodules return a tuple, also of one value.
        on_cycle: "merge" makes partitions that depend on each other one, named as the first.
        verify: "off": that the submodules do together what `m` does is not checked; None: what
            `GRAPHOPT_VERIFY` says, or else it is.

    Raises:
        PartitionError: partitions depend on each other, `keep_original_order` would call one before
            what it reads, or partition numbers decrease in a graph with autocast or grad mode.
        VerificationError: the submodules do something else than `m`.

    >>> model = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
    >>> split = graphopt.partition.split_module(model, None, lambda node: node.name)
    >>> [name for name, _ in split.named_children()]
    ['submod__0', 'submod__1']
    """
    if on_cycle not in ("error", "merge"):
        raise PartitionError(f'on_cycle is "error" or "merge", not {on_cycle!r}')
    from graphopt.manager.settings import level_of
    from graphopt.partition.proof import check_split

    attributes = Attributes(m, root_m)
    plan = make_plan(
        m.graph,
        attributes,
        split_callback,
        partition_affix,
        keep_original_order=keep_original_order,
        merge_cycles=on_cycle == "merge",
    )
    style = _Style(keep_original_node_name, keep_original_input_name, tuple_return)
    # building makes millions of objects and no garbage; to walk through them takes a quarter of
    # the time
    with collector_paused():
        split, names = _build(m, attributes, plan, style)
        if level_of(verify) != "off":
            check_split(m, split, attributes)
    if qualname_map is not None:
        qualname_map.update(names)
    return split


@dataclass(frozen=True)
class _Style:
    """The naming options of `split_module`."""

    keep_node_names: bool
    keep_input_names: bool
    tuple_return: bool


def _build(
    m: fx.GraphModule, attributes: Attributes, plan: PartitionPlan, style: _Style
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Builds the new module. Returns it with a map from new to old qualified names."""
    names: dict[str, str] = {}
    parent = _Parent(m, attributes, style)
    parent.add_inputs()
    if not plan.in_original_order:
        moved = {node for partition in plan.order for node in partition.constants}
        parent.add_attributes(n for n in m.graph.find_nodes(op="get_attr") if n not in moved)
    for partition in plan.order:
        child = _Child(m, attributes, partition, style)
        child.add_nodes(plan.regions.nodes_of(partition))
        parent.add_attributes(n for n in partition.inputs if n.op == "get_attr")
        parent.add_partition(partition, child.end())
        names.update(child.renamed())
    parent.add_output()
    return parent.end(), names


def _copy(
    node: fx.Node,
    graph: fx.Graph,
    values: dict[fx.Node, fx.Node],
    *,
    name: str | None,
    target: Any = None,
) -> None:
    """Appends a copy of `node` that reads `values`. A `name` of None names it after its target."""
    held = (name, node.target if target is None else target, node.args, node.kwargs, node.meta)
    values[node] = _compat.copy_node(graph, node, values.__getitem__, held)


def _graph_module(
    graph: fx.Graph,
    attributes: Mapping[str, Any],
    children: Mapping[str, nn.Module],
    training: bool,
) -> fx.GraphModule:
    # Children come after, for a graph module compiles those that are graph modules once more.
    module = fx.GraphModule({**attributes, **{name: nn.Module() for name in children}}, graph)
    for name, child in children.items():
        setattr(module, name, child)
    module.training = training
    return module


class _Child:
    """The submodule of one partition, under construction."""

    def __init__(
        self, m: fx.GraphModule, attributes: Attributes, partition: Partition, style: _Style
    ) -> None:
        self._m, self._attributes, self._partition = m, attributes, partition
        self._style = style
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._modules: dict[str, nn.Module] = {}
        self._names: dict[str, str] = {}
        self._taken = set(_TAKEN)
        for index, node in enumerate(partition.inputs):
            name = node.name if style.keep_input_names else f"arg_{index}"
            new = self._graph.create_node("placeholder", name, (), {}, name, node.type)
            new.meta.update(node.meta)
            self._values[node] = new
        for node in partition.constants:
            _copy(node, self._graph, self._values, name=node.name, target=self._adopt(node))

    def _adopt(self, node: fx.Node) -> str:
        """Adds the module that `node` names, and returns its name here."""
        target = str(node.target)
        if target not in self._names:
            self._names[target] = unique_name(target, self._taken)
            self._modules[self._names[target]] = self._attributes.find(node)
        return self._names[target]

    def add_nodes(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            target = self._adopt(node) if node.op == "call_module" else None
            name = node.name if self._style.keep_node_names else None
            _copy(node, self._graph, self._values, name=name, target=target)

    def end(self) -> fx.GraphModule:
        outputs = [self._values[node] for node in self._partition.outputs]
        single = len(outputs) == 1 and not self._style.tuple_return
        self._graph.output(outputs[0] if single else tuple(outputs))
        return _graph_module(self._graph, {}, self._modules, self._m.training)

    def renamed(self) -> dict[str, str]:
        """Returns the old qualified names of modules by their new ones."""
        prefix = self._partition.submod_name
        return {f"{prefix}.{new}": old for old, new in self._names.items()}


class _Parent:
    """The graph that calls the submodules, under construction."""

    def __init__(self, m: fx.GraphModule, attributes: Attributes, style: _Style) -> None:
        self._m, self._attributes, self._style = m, attributes, style
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._read: dict[str, Any] = {}
        self._children: dict[str, fx.GraphModule] = {}

    def add_inputs(self) -> None:
        for node in self._m.graph.find_nodes(op="placeholder"):
            _copy(node, self._graph, self._values, name=node.name)

    def add_attributes(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node not in self._values:
                _copy(node, self._graph, self._values, name=node.name)
                self._read[str(node.target)] = self._attributes.find(node)

    def add_partition(self, partition: Partition, child: fx.GraphModule) -> None:
        name = partition.submod_name
        if any(target.split(".")[0] == name for target in self._read):
            raise PartitionError(
                f"partition {partition.name} would be called {name}, as is something in the"
                " module that stays outside of partitions; name the partition differently"
            )
        self._children[name] = child
        inputs = tuple(self._values[node] for node in partition.inputs)
        call = self._graph.create_node("call_module", name, inputs)
        outputs = partition.outputs
        single = len(outputs) == 1 and not self._style.tuple_return
        for key in VALUE_KEYS:
            if outputs and all(key in node.meta for node in outputs):
                values = tuple(node.meta[key] for node in outputs)
                call.meta[key] = values[0] if single else values
        if single:
            self._values[outputs[0]] = call
            return
        for index, node in enumerate(outputs):
            item = self._graph.create_node("call_function", operator.getitem, (call, index))
            item.meta.update(node.meta)
            self._values[node] = item

    def add_output(self) -> None:
        for node in self._m.graph.find_nodes(op="output"):
            self.add_attributes(n for n in node.all_input_nodes if n.op == "get_attr")
            _copy(node, self._graph, self._values, name=node.name)

    def end(self) -> fx.GraphModule:
        _compat.copy_codegen(self._m.graph, self._graph)
        result = _graph_module(self._graph, self._read, self._children, self._m.training)
        result.meta.update(self._m.meta)
        # Which children are partitions: an attribute may be a module as well.
        result.meta["partition_names"] = set(self._children)
        for target in self._read:
            self._restore_owners(target, result)
        return result

    def _restore_owners(self, target: str, result: fx.GraphModule) -> None:
        """Makes the modules that hold an attribute like those in `m`."""
        value, path = self._read[target], target
        while path:
            path, _, name = path.rpartition(".")
            source, owner = self._attributes.owner(path), result.get_submodule(path)
            if source is None:
                continue
            owner.training = source.training
            if path == target.rpartition(".")[0] and not is_persistent(source, name):
                owner.register_buffer(name, value, persistent=False)
