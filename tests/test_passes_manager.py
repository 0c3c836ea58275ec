"""Running pipelines: what a pass leaves, what is recorded, and in which order passes may come."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt.errors import PassDefinitionError, PassOrderError
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_operator
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import (
    PassArgumentError,
    PassManager,
    PassRegistry,
    applied_passes,
    graph_optimization_pass,
    records_of,
)
from graphopt.saved import load_graph, save_graph
from graphopt.stages.pipelines import manager_for
from graphs import inputs_of, training_step
from toy_passes import declare, double_negation

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("without_settings")


@pytest.fixture
def registry() -> PassRegistry:
    return PassRegistry()


@pytest.fixture
def gm() -> fx.GraphModule:
    return training_step(1, ranks=None)


def test_a_pass_edits_the_graph_and_is_recorded(registry: PassRegistry, gm: fx.GraphModule) -> None:
    negate = double_negation(registry)
    inputs = inputs_of(gm)
    expected = gm(*copy.deepcopy(inputs))[0]
    nodes = len(gm.graph.nodes)
    (record,) = PassManager("negate_twice", registry=registry).run(gm)
    assert applied_passes(gm) == ["negate_twice"] and records_of(gm) == [record]
    assert (record.name, record.changes, record.changed) == ("negate_twice", 1, True)
    assert record.arguments == {"target": "aten::gelu"}
    assert (record.nodes_before, record.nodes_after) == (nodes, nodes + 2)
    assert record.copies_before == record.copies_after > 0
    assert record.collectives_before == record.collectives_after == 0
    assert record.seconds > 0
    assert str(record).startswith("negate_twice(target='aten::gelu'): 1 change in ")
    assert f"nodes {nodes} -> {nodes + 2}, collectives 0, copies" in str(record)
    made = find_nodes(gm.graph, lambda node: node.target is aten.neg.default)
    assert [node.meta["provenance"][-1] for node in made] == ["negate_twice"] * 2
    assert torch.equal(gm(*copy.deepcopy(inputs))[0][0], expected[0]), "it was recompiled"
    assert negate.options["target"].default == "aten::gelu"


def test_nodes_that_stay_keep_their_provenance(registry: PassRegistry, gm: fx.GraphModule) -> None:
    before = {node: dict(node.meta) for node in gm.graph.nodes}
    double_negation(registry)(gm)
    assert {node: node.meta for node in gm.graph.nodes if node in before} == before


def test_a_pass_called_directly_is_the_same(registry: PassRegistry, gm: fx.GraphModule) -> None:
    negate = double_negation(registry)
    twin = copy.deepcopy(gm)
    record = negate(gm, target="aten::mm")
    (other,) = PassManager([(negate, {"target": "aten::mm"})]).run(twin)
    assert str(gm.graph) == str(twin.graph)
    assert record.arguments == other.arguments and record.changes == other.changes
    assert applied_passes(gm) == applied_passes(twin)


def test_options_by_position(registry: PassRegistry, gm: fx.GraphModule) -> None:
    one = declare(registry, "one", repeatable=True)
    assert one(gm, 3).arguments == one(gm, size=3).arguments == {"size": 3}
    with pytest.raises(PassArgumentError, match="takes 1 options, not 2"):
        one(gm, 3, 4)
    with pytest.raises(PassArgumentError, match="'size' of pass 'one' is given twice"):
        one(gm, 3, size=4)
    with pytest.raises(PassArgumentError, match="no option 'siz'; did you mean 'size'"):
        one(gm, siz=4)
    with pytest.raises(TypeError, match=r"takes int, not 2\.5"):
        one(gm, size=2.5)
    assert len(applied_passes(gm)) == 2


def test_an_option_without_a_default(registry: PassRegistry, gm: fx.GraphModule) -> None:
    @graph_optimization_pass(registry=registry)
    def sized(gm: fx.GraphModule, size: int) -> None: ...

    with pytest.raises(PassArgumentError, match="pass 'sized' needs a value for 'size'"):
        sized(gm)
    with pytest.raises(PassArgumentError, match="pass 'sized' needs a value for 'size'"):
        PassManager([sized])
    assert sized(gm, 3).arguments == {"size": 3}


def test_what_was_applied_survives_copies(
    registry: PassRegistry, gm: fx.GraphModule, tmp_path: Path
) -> None:
    one, two = declare(registry, "one"), declare(registry, "two", ["one"])
    one(gm)
    twin = copy.deepcopy(gm)
    two(twin)
    assert (applied_passes(gm), applied_passes(twin)) == (["one"], ["one", "two"])
    module = IterGraphModule(gm)
    two(copy.deepcopy(module))
    assert applied_passes(module) == ["one"]
    save_graph(twin, tmp_path / "saved.pt")
    loaded = load_graph(tmp_path / "saved.pt")
    assert records_of(loaded) == records_of(twin)
    with pytest.raises(PassOrderError, match="applied to this graph already"):
        one(loaded)


def test_prerequisites(registry: PassRegistry, gm: fx.GraphModule) -> None:
    ran = []

    @graph_optimization_pass(registry=registry)
    def first(gm: fx.GraphModule) -> None:
        ran.append("first")

    declare(registry, "one")
    declare(registry, "two", ["one"])
    for pipeline, hint in (
        ("first -> two", "run one -> two"),
        ("first -> two -> one", "put 'one' before 'two' in the pipeline"),
    ):
        with pytest.raises(PassOrderError) as caught:
            PassManager(pipeline, registry=registry).run(gm)
        assert str(caught.value) == (
            "pass 'two' needs 'one' to have been applied before\n"
            f"  applied:  first\n  hint:     {hint}"
        )
    assert ran == [] and applied_passes(gm) == [], "nothing may run if the order is wrong"
    PassManager("one -> first -> two", registry=registry).run(gm)
    assert applied_passes(gm) == ["one", "first", "two"]


def test_prerequisites_may_be_on_the_graph_already(
    registry: PassRegistry, gm: fx.GraphModule
) -> None:
    one = declare(registry, "one")
    two = declare(registry, "two", [one])
    one(gm)
    assert two(gm).name == "two"


def test_apply_after(registry: PassRegistry, gm: fx.GraphModule) -> None:
    one = declare(registry, "one")
    two = declare(registry, "two", apply_after=[one])
    twin = copy.deepcopy(gm)
    PassManager([one, two], registry=registry).run(twin)
    two(gm)
    with pytest.raises(PassOrderError) as caught:
        one(gm)
    assert str(caught.value) == (
        "pass 'one' comes too late: 'two', which has to come after it, was applied before\n"
        "  applied:  two\n  hint:     put 'one' before 'two'"
    )
    with pytest.raises(PassOrderError, match="'one' comes too late"):
        PassManager([two, one], registry=registry).run(training_step(1, ranks=None))


def test_twice(registry: PassRegistry, gm: fx.GraphModule) -> None:
    one, again = declare(registry, "one"), declare(registry, "again", repeatable=True)
    PassManager([one, again, again], registry=registry).run(gm)
    again(gm)
    with pytest.raises(PassOrderError, match="'one' was applied to this graph already"):
        one(gm)
    with pytest.raises(PassOrderError, match="applied:  again -> one"):
        PassManager("again -> one -> one", registry=registry).run(training_step(1, ranks=None))


def test_a_repeatable_pass_may_follow_what_it_precedes(
    registry: PassRegistry, gm: fx.GraphModule
) -> None:
    clean = declare(registry, "clean", repeatable=True)
    two = declare(registry, "two", apply_after=[clean])
    PassManager([clean, two, clean], registry=registry).run(gm)


def test_unknown_prerequisites_are_not_ignored(registry: PassRegistry, gm: fx.GraphModule) -> None:
    one = declare(registry, "one", ["othr"])
    declare(registry, "other")
    with pytest.raises(PassDefinitionError, match=r"names 'othr', .* did you mean 'other'"):
        one(gm)


def test_passes_that_are_not_installed_constrain_nothing(
    registry: PassRegistry, gm: fx.GraphModule
) -> None:
    one = declare(registry, "one", apply_after=["elsewhere"], apply_before=["nowhere"])
    two = declare(registry, "two", apply_after=[one])
    assert registry.order(["two", "one"]) == ["one", "two"]
    PassManager("one -> two", registry=registry).run(gm)
    assert applied_passes(gm) == ["one", "two"]
    assert two.apply_after == ("one",)


def test_apply_before(registry: PassRegistry, gm: fx.GraphModule) -> None:
    two = declare(registry, "two")
    one = declare(registry, "one", apply_before=[two])
    assert registry.order(["two", "one"]) == ["one", "two"]
    assert registry.graph.edges["one", "two"] == {"kind": "apply_before"}
    PassManager([one, two], registry=registry).run(copy.deepcopy(gm))
    two(gm)
    with pytest.raises(PassOrderError) as caught:
        one(gm)
    assert str(caught.value) == (
        "pass 'one' comes too late: 'two', which has to come after it, was applied before\n"
        "  applied:  two\n  hint:     put 'one' before 'two'"
    )
    with pytest.raises(PassDefinitionError, match="closes a circle"):
        declare(registry, "two", apply_before=["one"])


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (nn.Linear(1, 1), "not on a Linear\n  hint:     graphopt.capture"),
        (fx.Graph(), "not on a Graph\n  hint:     give the fx.GraphModule"),
        (None, "not on a NoneType"),
    ],
)
def test_what_is_not_a_graph_module(registry: PassRegistry, value: Any, hint: str) -> None:
    one = declare(registry, "one")
    for run in (one, PassManager([one], registry=registry).run, PassManager([]).run):
        with pytest.raises(PassArgumentError, match=hint):
            run(value)  # type: ignore[operator]


def test_a_final_graph(registry: PassRegistry, gm: fx.GraphModule) -> None:
    one = declare(registry, "one")
    module = IterGraphModule(gm)
    module.finalize_setup()
    with pytest.raises(PassOrderError, match=r"apply passes before finalize_setup\(\)"):
        one(module)
    assert applied_passes(module) == []


def test_a_graph_without_metadata(registry: PassRegistry) -> None:
    """Made by hand: the pass is not to blame for what was missing before."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    @graph_optimization_pass(registry=registry)
    def to_abs(gm: fx.GraphModule) -> int:
        for node in find_nodes(gm.graph, lambda node: node.target is torch.relu):
            node.target = torch.abs
        return 1

    gm = fx.symbolic_trace(function)
    to_abs(gm)
    assert gm(torch.tensor(-3.0)) == 4


def test_dead_code_goes_and_counts_as_a_change(registry: PassRegistry, gm: fx.GraphModule) -> None:
    one = declare(registry, "one", repeatable=True)
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_after(first):
        call_function_with_meta(gm.graph, aten.neg.default, (first,), like=first)
    record = one(gm)
    assert record.changed and record.nodes_before == record.nodes_after + 1
    assert not one(gm).changed


def test_late_marks_are_changes(registry: PassRegistry, gm: fx.GraphModule) -> None:
    @graph_optimization_pass(registry=registry)
    def move(gm: IterGraphModule) -> int:
        copies = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::copy_"))
        gm.graph.move_to_next_iter_before(copies[-1:], next(iter(copies[-1].args[0].users)))
        return 1

    module = IterGraphModule(gm)
    record = move(module)
    assert record.changed and record.nodes_before == record.nodes_after
    assert len(module.graph.late) == 1


def test_options_that_are_nodes(registry: PassRegistry, gm: fx.GraphModule) -> None:
    """Only Python can give them; a record holds their names."""

    @graph_optimization_pass(registry=registry)
    def look(gm: fx.GraphModule, nodes: list[fx.Node], again: fx.Node | None = None) -> int:
        assert all(node.graph is gm.graph for node in nodes)
        return 0

    nodes = list(gm.graph.nodes)[:2]
    record = look(gm, nodes, again=nodes[0])
    assert record.arguments == {"nodes": [n.name for n in nodes], "again": nodes[0].name}


@pytest.mark.parametrize("name", ["default", "none"])
def test_named_pipelines_are_those_of_steps(name: str) -> None:
    """`PassManager(name)` has the passes that `graphopt.compile(pipeline=name)` applies."""
    manager = graphopt.PassManager(name)
    assert str(manager) == str(manager_for(name, None))
    assert bool(str(manager)) == (name == "default")
    step = graphopt.compile(lambda x: x * 2, pipeline=manager)
    assert step(torch.ones(2)).tolist() == [2, 2]
    assert not graphopt.PassManager("none", registry=graphopt.PassRegistry()).pipeline
