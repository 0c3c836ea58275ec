"""The list of stages: what each leaves is recorded, written, proven, or refused by its name."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import fx, nn

import graphopt
from gloo import Pool
from graphopt.commands.optimize import run_stages
from graphopt.executable import finalize
from graphopt.graph_utils import find_nodes, get_outputs, is_collective, is_operator, set_outputs
from graphopt.host.votes import Agreement
from graphopt.iter_graph import IterGraphModule
from graphopt.lowering import lowering_stages
from graphopt.lowering.boxed import boxed
from graphopt.lowering.lowering_stages import Lower
from graphopt.lowering.partial import Lowering
from graphopt.ranks.meeting import Meeting
from graphopt.saved import load_graph
from graphopt.stages import entries, stages_for
from graphopt.stages.compiling import Stages, StepInMaking
from graphopt.verify import check_divided, check_finalized
from sketch import one_rank
from stage_cases import problem
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten


SMALL_BUCKETS = [
    "remove_copy_from_optimizer",
    ("comm_fusion_with_concat", {"bucket_size_mb": 0.002}),
    "schedule_comm_wait",
]


LATE = [*SMALL_BUCKETS, ("iter_move_grads_and_optimizers", {"held_back": 0.33})]


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(model: str = "mlp", optimizer: str = "adamw-fused") -> tuple[nn.Module, Any]:
    """A model and an optimizer that has its state."""
    made = MODELS[model].make()
    optim = OPTIMIZERS[optimizer](made.parameters())
    train_step(made, optim, *MODELS[model].batch(0))
    return made, optim


def compiled(pipeline: Any = LATE, **options: Any) -> graphopt.TrainStep:
    return graphopt.compile(
        train_step, pipeline=pipeline, parallel=graphopt.DataParallel(), **options
    )


def in_making(
    model: str, optimizer: str = "adamw-fused", pipeline: Any = LATE, lower: str | None = None
) -> tuple[Stages, StepInMaking]:
    """A step with passes applied and graphs derived."""
    args = (*trained(model, optimizer), *MODELS[model].batch(1))
    captured = graphopt.capture(train_step, *args, parallel=graphopt.DataParallel())
    stages = stages_for(pipeline, lower)
    step = stages.apply_passes(captured)
    stages.derive(step)
    return stages, step


# ------------------------------------------------------------------------------- records, dumps


def test_every_stage_is_recorded_and_written(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("GRAPHOPT_DUMP", "dump")
    step = compiled()
    model, optimizer = trained()
    expected = copy.deepcopy(model)
    twin = OPTIMIZERS["adamw-fused"](expected.parameters())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for index in range(3):
        batch = MODELS["mlp"].batch(index)
        assert torch.equal(step(model, optimizer, *batch), train_step(expected, twin, *batch))
    names = [record.name for record in step.report]
    passes = graphopt.applied_passes(step.graph_module)
    assert names[: len(passes) + 3] == ["capture", "parallelize", *passes, "derive"]
    behind = [(r.name, r.arguments["graph"]) for r in step.report[len(passes) + 3 :]]
    assert sorted(behind) == [("finalize", name) for name in ("drain", "main", "setup")]
    finalized = next(r for r in step.report if r.arguments == {"graph": "main"})
    assert finalized.changed and finalized.nodes_after < finalized.nodes_before
    assert finalized.collectives_after == finalized.collectives_before >= 1
    written = {path.name for path in (folder / "dump").iterdir()}
    assert {"after_capture.txt", "after_derive.txt", "after_derive_main.txt"} <= written
    assert {"after_parallelize.txt", "after_parallelize.diff"} <= written
    assert {f"after_finalize_{name}.diff" for name in ("setup", "main", "drain")} <= written
    assert "_fused_adamw_" in (folder / "dump" / "after_finalize_main.txt").read_text()


def test_compiled_regions_are_stages_of_the_same_list() -> None:
    stages, step = in_making("mlp", lower="inductor")
    stages.make_executable(step)
    assert stages.names == [
        *("capture", "parallelize", "passes", "derive"),
        *("lower", "finalize", "vote", "record", "box"),
    ]
    records = graphopt.manager.records_of(step.module)
    main = [record for record in records if record.arguments == {"graph": "main"}]
    assert [record.name for record in main] == ["lower", "finalize", "box"]
    assert main[0].nodes_after < main[0].nodes_before and stages.regions


def test_a_step_that_runs_once_is_not_compiled() -> None:
    stages, step = in_making("mlp", lower="inductor")
    step.once = True
    stages.make_executable(step)
    names = [record.name for record in graphopt.manager.records_of(step.module)]
    assert "lower" not in names and not stages.regions


def test_hooks_and_pipeline_stages_go_through_the_same_list() -> None:
    stage = problem("mlp").pipe.build_stage(1, "cpu").compile(lower="inductor")
    assert stage.report[0].name == "capture"
    graphs = stage._compiled
    assert graphs is not None
    names = [r.name for r in graphopt.manager.records_of(graphs._graph("evaluation"))]
    assert names[-4:] == ["derive", "lower", "finalize", "box"]


# ------------------------------------------------------------------------------------- refusals


def refused(step: Callable[[], Any], stage: str, why: str) -> Path:
    """That a stage is refused by name. Returns the file that reproduces it."""
    with pytest.raises(graphopt.VerificationError) as caught:
        step()
    text = str(caught.value)
    assert text.startswith(f"stage {stage!r}") and "was refused" in text, text
    assert re.search(why, text), text
    assert f"[{stage}]" in text
    found = re.search(r"graphopt optimize (\S+) --stages (.*)", text)
    assert found, text
    assert found[2].strip("'").endswith(stage)
    assert isinstance(load_graph(found[1]), fx.GraphModule)
    return Path(found[1])


def swapping(gm: fx.GraphModule) -> fx.GraphModule:
    """Finalized, with one `mul` that adds."""
    final = finalize(gm)
    wrong = find_nodes(final.graph, lambda n: is_operator(n.target, "aten::gelu_backward"))[0]
    wrong.update_arg(0, wrong.args[1])
    return final


def dropping_update(gm: fx.GraphModule) -> fx.GraphModule:
    """Finalized, without the fused optimizer."""
    final = finalize(gm)
    for node in find_nodes(final.graph, lambda n: "_fused_adamw" in str(n.target)):
        final.graph.erase_node(node)
    return final


def reordering(gm: fx.GraphModule) -> fx.GraphModule:
    """Finalized, with the first two collectives of other sizes in the other order."""
    final = finalize(gm)
    launches = find_nodes(final.graph, is_collective)
    first = launches[0]
    other = next(n for n in launches if n.meta["val"].shape != first.meta["val"].shape)
    other.append(first)
    return final


def crashing(gm: fx.GraphModule) -> fx.GraphModule:
    raise ZeroDivisionError("no storage")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (swapping, "another value|not what it was"),
        (dropping_update, "is not updated any more"),
        (reordering, "other collectives than the ranks agreed on, first at number 0"),
    ],
)
def test_a_broken_finalizer_is_refused(
    broken: Any, why: str, folder: Path, monkeypatch: Any
) -> None:
    model, optimizer = trained()
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(entries, "finalize", broken)
    step = compiled("none")
    file = refused(lambda: step(model, optimizer, *MODELS["mlp"].batch(1)), "finalize", why)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(typer.Exit):
        run_stages(file, "finalize", out=None, dump=None, verify=None)
    monkeypatch.setattr(entries, "finalize", finalize)
    run_stages(file, "finalize", out=folder / "out.pt", dump=None, verify=None)
    assert "_fused_adamw_" in str(load_graph(folder / "out.pt").graph)


def test_a_finalized_graph_is_proven_at_the_level_of_dependencies(
    folder: Path, monkeypatch: Any
) -> None:
    args = (*trained(), *MODELS["mlp"].batch(1))
    monkeypatch.setattr(entries, "finalize", dropping_update)
    step = compiled("none", verify="dependencies")
    refused(lambda: step(*args), "finalize", "is not updated any more")


def test_the_order_of_collectives_is_checked_whatever_is_asked_for(
    folder: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(entries, "finalize", reordering)
    step = compiled("none", verify="off")
    args = (*trained(), *MODELS["mlp"].batch(1))
    refused(lambda: step(*args), "finalize", "other collectives")


def test_a_stage_that_raises_is_named(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(entries, "finalize", crashing)
    with pytest.raises(graphopt.PassError) as caught:
        compiled()(*trained(), *MODELS["mlp"].batch(1))
    text = str(caught.value)
    assert text.startswith("stage 'finalize' of 'setup' raised ZeroDivisionError: no storage")
    assert "reproduce:" in text and isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_lowering_that_drops_a_write_is_refused(folder: Path, monkeypatch: Any) -> None:
    lower = Lowering.lower

    def dropping(self: Lowering, gm: fx.GraphModule) -> fx.GraphModule:
        lowered = lower(self, gm)
        for region in self.subgraphs.values():
            graph = region.graph_module.graph
            for copy_ in find_nodes(graph, lambda n: is_operator(n.target, "aten::copy_"))[:1]:
                copy_.replace_all_uses_with(copy_.args[1])
                graph.erase_node(copy_)
        return lowered

    monkeypatch.setattr(Lowering, "lower", dropping)
    step = compiled(SMALL_BUCKETS, lower="inductor")
    args = (*trained(optimizer="sgd-momentum-loop"), *MODELS["mlp"].batch(1))
    refused(lambda: step(*args), "lower", "is not updated any more")


def test_a_box_with_another_input_is_refused(folder: Path, monkeypatch: Any) -> None:
    box = lowering_stages.box_calls

    def mixing(gm: fx.GraphModule) -> fx.GraphModule:
        first = find_nodes(box(gm).graph, lambda node: node.target is boxed)[0]
        alike = [n for n in first.args if n.meta["val"].shape == (16,)]  # type: ignore[union-attr]
        swapped = {alike[0]: alike[1], alike[1]: alike[0]}
        first.args = tuple(swapped.get(node, node) for node in first.args)
        gm.recompile()
        return gm

    monkeypatch.setattr(lowering_stages, "box_calls", mixing)
    args = (*trained(), *MODELS["mlp"].batch(1))
    step = compiled(SMALL_BUCKETS, lower="inductor")
    refused(lambda: step(*args), "box", "another value|not what it was")


def test_a_vote_that_loses_an_update_is_refused(folder: Path, monkeypatch: Any) -> None:
    vote = entries.with_agreement

    def losing(gm: fx.GraphModule, agreement: Agreement) -> fx.GraphModule:
        for node in find_nodes(gm.graph, lambda n: "_fused_adamw" in str(n.target)):
            gm.graph.erase_node(node)
        return vote(gm, agreement)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        graphopt.callback(str, x)
        return train_step(model, optimizer, x, y)

    monkeypatch.setattr(entries, "with_agreement", losing)
    run = graphopt.compile(step, pipeline="none", parallel=graphopt.DataParallel())
    args = (*trained(), *MODELS["mlp"].batch(1))
    with pytest.raises(graphopt.VerificationError) as caught:  # callbacks are in no file
        run(*args)
    assert re.match("stage 'vote' .* was refused: .* is not updated any more", str(caught.value))


def test_derived_graphs_that_forget_an_update_are_refused(folder: Path, monkeypatch: Any) -> None:
    derive = IterGraphModule.derive

    def forgetting(self: IterGraphModule) -> dict[str, fx.GraphModule]:
        graphs = derive(self)
        outputs = get_outputs(graphs["setup"].graph)
        dropped = outputs.updates[0]
        set_outputs(graphs["setup"].graph, outputs._replace(updates=outputs.updates[1:]))
        graphs["setup"].graph.erase_node(dropped)
        return graphs

    monkeypatch.setattr(IterGraphModule, "derive", forgetting)
    args = (*trained(), *MODELS["mlp"].batch(1))
    refused(lambda: compiled(SMALL_BUCKETS)(*args), "derive", "is not updated any more")


def test_a_stage_of_a_pipeline_is_refused_as_well(folder: Path, monkeypatch: Any) -> None:
    stage = problem("mlp").pipe.build_stage(1, "cpu").compile()
    monkeypatch.setattr(entries, "finalize", crashing)
    assert stage._compiled is not None
    with pytest.raises(graphopt.PassError, match="stage 'finalize' of 'setup' raised"):
        stage._compiled._graph("evaluation")


# -------------------------------------------------------------------- nothing right is refused


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "sgd-momentum-loop"])
@pytest.mark.parametrize("model", ["mlp", "gpt", "convnet", "running-mean", "shared-storage"])
def test_every_stage_is_decided(model: str, optimizer: str, caplog: Any) -> None:
    """Lowered or not, with late work: each graph is proven, and none is left out."""
    with caplog.at_level(logging.INFO, "graphopt"):
        for lower in (None, "inductor"):
            stages, step = in_making(model, optimizer, lower=lower)
            stages.make_executable(step)
    assert "is not compared" not in caplog.text and "not compared" not in caplog.text


def test_public_checks_of_stages() -> None:
    _, step = in_making("gpt", pipeline=LATE)
    for graph in step.graphs.values():
        assert check_finalized(graph, finalize(graph)).ok
    stages, step = in_making("gpt", pipeline=LATE, lower="inductor")
    for graph in step.graphs.values():
        before = fx.GraphModule(graph, graph.graph)
        assert check_divided(before, stages.behind[0].apply(graph, None)).ok  # type: ignore[arg-type]


TIMEOUT = 2.0


def train(rank: int, fails: bool = False) -> tuple[list[str], list[torch.Tensor]]:
    """What happens in which order while rank 1 compiles for longer than ranks wait."""
    seen: list[str] = []
    exchange, lower, finalize = Meeting.exchange, Lower.apply, entries.finalize

    def noting(self: Meeting, mine: dict[str, Any], **options: Any) -> Any:
        seen.append("/".join(mine))
        return exchange(self, mine, **options)

    def compiling(self: Lower, *args: Any) -> Any:
        seen.append("lower")
        if rank == 1:
            time.sleep(TIMEOUT * 2)
            if fails:
                raise graphopt.LoweringError("the compiler is broken")
        return lower(self, *args)

    Meeting.exchange, Lower.apply = noting, compiling  # type: ignore[method-assign]
    try:
        torch.manual_seed(0)
        model = MODELS["mlp"].make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = graphopt.DataParallel(timeout=TIMEOUT)
        step = graphopt.compile(train_step, lower="inductor", parallel=parallel)
        step(model, optimizer, *MODELS["mlp"].batch(rank))
        step.flush()
        return seen, [p.detach().clone() for p in model.parameters()]
    finally:
        Meeting.exchange, Lower.apply = exchange, lower  # type: ignore[method-assign]
        entries.finalize = finalize


@pytest.mark.full
def test_a_slow_compiler_is_waited_for(two_ranks: Pool) -> None:
    (first, parameters), (second, others) = two_ranks.run(train)
    assert first == second
    agreed = next(place for place, seen in enumerate(first) if seen.startswith("plans/"))
    assert agreed < first.index("lower") < first.index("ready")
    assert all(map(torch.equal, parameters, others))


def test_a_compiler_that_fails_is_told_to_all(two_ranks: Pool) -> None:
    with pytest.raises(Exception, match=r"stage 'lower' of 'setup' raised|could not capture"):
        two_ranks.run(train, True)
