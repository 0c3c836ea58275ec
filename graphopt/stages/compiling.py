"""`Stages`: the list of compile stages, and the one function that runs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx

from graphopt.errors import PipelineSyntaxError
from graphopt.host.decisions.assumptions import assumptions
from graphopt.ir.metadata import KIND, NAME
from graphopt.ir.placement import placement_of
from graphopt.iter_graph import IterGraphModule, copy_graph
from graphopt.iter_graph.module import DERIVED
from graphopt.manager.names import suggestion
from graphopt.manager.records import PassRecord, count
from graphopt.manager.stages import DerivedGraph, GraphStage, StageRunner, crashes_explained
from graphopt.parallel import DataParallel, Parallel
from graphopt.parallel.parallelize import communicates, parallelize
from graphopt.ranks.independent_ranks import keep_launches
from graphopt.runtime.agreement.agreed import CallCapture, NotAsAgreedError, RankAgreement
from graphopt.stages.auto import AutoPipeline
from graphopt.stages.entries import Finalize, Vote
from graphopt.stages.pipelines import manager_for, options_for, pipeline_with
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capturing
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.entries import InputSpec
from graphopt.tracing.optimizers.optimizer_state import has
from graphopt.verify import Problem, SpecReport, check_graph
from graphopt.verify.equivalence import Proof
from graphopt.verify.sharding.marker_meaning import sharing_problems
from graphopt.verify.stage_checks import StageProof

if TYPE_CHECKING:
    from graphopt.host.votes import Agreement
    from graphopt.lowering.compiler import Options
    from graphopt.lowering.subgraph import LoweredSubgraph
    from graphopt.manager import PassManager


logger = logging.getLogger("graphopt")


def stages_for(
    pipeline: str | Sequence[Any] | PassManager | AutoPipeline = "default",
    lower: str | Options | None = None,
    verify: str | None = None,
) -> Stages:
    """The list of stages for the arguments of `graphopt.compile`.

    Raises:
        PipelineSyntaxError: no such pipeline or pass.
        LoweringError: no such way to lower.
    """
    if pipeline == "auto":
        pipeline = AutoPipeline()
    if isinstance(pipeline, AutoPipeline):
        return Stages(manager_for("default", verify), options_for(lower), pipeline)
    given = pipeline != "default"
    return Stages(manager_for(pipeline, verify), options_for(lower), given=given)


class Stages:
    """All stages between a call of a step and the graphs that run.

    All graphs of one step share it, and with it the regions that are compiled.

    Args:
        manager: the passes, and how every stage is checked and dumped.
        options: how to lower; None: not at all.
        auto: chooses the options of the default passes; None: they are the manager's.
        given: the passes are of the user's choice, for ranks that run the same graph.
    """

    def __init__(
        self,
        manager: PassManager,
        options: Options | None,
        auto: AutoPipeline | None = None,
        *,
        given: bool = False,
    ) -> None:
        self._given = given
        self.manager, self.options, self._auto = manager, options, auto
        self.behind: list[GraphStage] = [Finalize(), Vote()]
        if options is not None:
            from graphopt.lowering.lowering_stages import Box, Lower, RecordCudaGraphs

            self._lower = Lower(options)
            self.behind = [self._lower, *self.behind, RecordCudaGraphs(options), Box()]
        self._runner = StageRunner(manager.settings, self.names)

    @classmethod
    def named(cls, manager: PassManager, names: Sequence[str]) -> Stages:
        """The list with the named stages in it.

        Raises:
            PipelineSyntaxError: there is no stage of such a name.
        """
        from graphopt.lowering.compiler import Options

        found = cls(manager, Options(cudagraphs="record" in names))
        for name in names:
            if name not in found.names or name == "passes":
                raise PipelineSyntaxError(
                    f"there is no stage {name!r}" + suggestion(name, found.names)
                )
        return found

    def anew(self) -> Stages:
        """A copy of the list in which nothing is compiled yet."""
        return Stages(self.manager, self.options, self._auto, given=self._given)

    @property
    def names(self) -> list[str]:
        """The names of all stages, in order."""
        return [
            "capture",
            "parallelize",
            "passes",
            "derive",
            *(stage.name for stage in self.behind),
        ]

    @property
    def regions(self) -> list[LoweredSubgraph]:
        """The compiled regions; one that several graphs share is listed once."""
        return [] if self.options is None else list(self._lower.lowering.subgraphs.values())

    def compile(
        self, call: Call, ways: Iterable[CallCapture]
    ) -> tuple[CapturedStep, RankAgreement | None]:
        """Compiles a call of a step to graphs that run: every stage, in order.

        Args:
            ways: how this rank goes along with the others, in order of preference: as they agreed
                before, or by agreeing anew.

        Returns:
            What was captured, with an `IterGraphModule` that is ready to run, and what the ranks
            have agreed on for it.
        """
        for ranks in ways:
            with suppress(NotAsAgreedError), capturing(), ranks:
                captured = self.capture(call, ranks)
                proof = self.parallelize(captured)
                call = call.using(captured.besides) or call
                self._choose(captured, call)
                step = self.apply_passes(captured, proof)
                step.once = creates_state(call, captured)
                self.derive(step)
                ranks.agree(captured, step.graphs)  # before anything is compiled: that takes long
                step.agreement = ranks.agreement
                self.make_executable(step)  # lower, finalize, vote, record, box
                ranks.ready(captured)
                return captured, ranks.agreed
        raise AssertionError("ranks can always agree anew")

    def capture(self, call: Call, ranks: CallCapture) -> CapturedStep:
        """Captures a call, with markers where communication belongs.

        Raises:
            CaptureError: it cannot be captured.
            VerificationError: what was captured is not in the captured dialect.
        """
        start = time.perf_counter()
        with capturing():
            captured = ranks.capture(call)
        record = PassRecord("capture", stage=True, seconds=time.perf_counter() - start)
        report = check_graph(captured.graph_module.graph, captured.inputs, marked=True)
        self._check_capture(captured.graph_module, report, record)
        return captured

    def _check_capture(self, gm: fx.GraphModule, report: SpecReport, record: PassRecord) -> None:
        attempt = self._runner.attempt(gm, gm.graph, [record.name])
        self._runner.settle(gm, record, attempt, None, gm, map(Problem, report.problems))

    def parallelize(self, captured: CapturedStep) -> Proof:
        """Expands the communication markers for the kind of parallelism, if there are ranks.

        Returns:
            What was found out about the graph on the way.

        Raises:
            VerificationError: what it leaves is not in the captured dialect, or not what the
                markers mean.
            PassError: it raised something else than an error of graphopt.
        """
        proof = Proof()
        self._parallelize(captured.graph_module, captured.parallel, captured.inputs, proof)
        return proof

    def _parallelize(
        self, gm: fx.GraphModule, parallel: Parallel, inputs: Sequence[InputSpec], proof: Proof
    ) -> None:
        if not communicates(gm.graph):
            return
        given, _ = copy_graph(gm.graph)
        attempt = self._runner.attempt(gm, given, ["parallelize"])
        record = PassRecord("parallelize", {"kind": type(parallel).__name__}, stage=True)
        record.before, start = count(given), time.perf_counter()
        with crashes_explained(attempt):
            record.changes = parallelize(gm, parallel)
        record.seconds = time.perf_counter() - start
        problems = [Problem(each) for each in check_graph(gm.graph, inputs).problems]
        if not problems and self.manager.settings.verify != "off":
            sharded = parallel.meaning == "sharded"
            axes = [axis.group_name for axis in parallel.axes] if sharded else []
            problems = list(sharing_problems(parallel.meaning, given, gm, proof, axes))
        self._runner.settle(gm, record, attempt, given, gm, problems)

    def apply_passes(self, captured: CapturedStep, proof: Proof | None = None) -> StepInMaking:
        """Makes an `IterGraphModule` of a captured graph, and applies the passes.

        Args:
            proof: what is known of the calls of the graph.
        """
        module = captured.graph_module = IterGraphModule(captured.graph_module)
        step, manager = StepInMaking(module, proof), self.manager
        apart = captured.apart
        if apart and assumptions(module.graph):
            logger.info("no passes: ranks of other groups may take other branches")
            manager = manager.with_pipeline([])
        elif not self._given:
            keep_launches(module.graph, apart)
        manager.run(module, step.passes)
        return step

    def _choose(self, captured: CapturedStep, call: Call) -> None:
        """Decides open options of the passes by measurement, once."""
        if self._auto is None:
            return
        inputs = captured.values(call)
        chosen = self._auto.decide(captured.graph_module, inputs, captured.apart)
        if chosen is not None:
            self.manager, self._auto = self.manager.with_pipeline(pipeline_with(**chosen)), None

    def derive(self, step: StepInMaking) -> None:
        """Makes the graphs that run, with regions for compilation marked.

        Raises:
            VerificationError: they do not compute what the step does.
        """
        start, module = time.perf_counter(), step.module
        if self.options is not None and not step.once:
            self._lower.outline(module.graph)
            step.graphs = module.derive()
        else:
            step.graphs = step.passes.derived or module.derive()
        record = PassRecord("derive", {"graphs": list(step.graphs)}, stage=True)
        record.before, record.seconds = count(module.graph), time.perf_counter() - start
        attempt = self._runner.attempt(module, module.graph, [record.name])
        off = self.manager.settings.verify == "off"
        problems = () if off else step.proof.derived(module, step.graphs)
        self._runner.settle(module, record, attempt, module.graph, module, problems)

    def run_named(self, gm: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
        """Runs some of the stages on a graph of the dialect that the first of them takes:
        captured, `IterGraphModule` or derived."""
        if "capture" in names:
            report = check_graph(gm.graph, _inputs_of(gm.graph), marked=True)
            self._check_capture(gm, report, PassRecord("capture", stage=True))
        if "parallelize" in names:
            self._parallelize(gm, DataParallel(), _inputs_of(gm.graph), Proof())
        if "derive" in names:
            self.derive(
                StepInMaking(gm if isinstance(gm, IterGraphModule) else IterGraphModule(gm))
            )
        behind = [stage for stage in self.behind if stage.name in names]
        proof = StageProof(Proof())
        return self._runner.run(behind, gm, DerivedGraph("setup"), gm, proof)

    @property
    def hands_out(self) -> bool:
        """True if a failing graph may hand values to another; CUDA graphs overwrite theirs."""
        return self.options is None or not self.options.cudagraphs

    def make_ready(self, module: IterGraphModule, agreement: Agreement | None = None) -> None:
        """Runs the stages behind the passes on a part of the captured graph.

        Args:
            agreement: when all ranks agree that no function of the program's has raised.
        """
        step = StepInMaking(module)
        step.agreement = agreement
        self.derive(step)
        self.make_executable(step)

    def make_executable(self, step: StepInMaking) -> None:
        """Runs the remaining stages on each derived graph."""
        step.module.finalize_setup(partial(self._run_behind, step), step.graphs)
        step.module.prepare(once=step.once)
        step.forget()

    def _run_behind(self, step: StepInMaking, derived: fx.GraphModule) -> fx.GraphModule:
        """Runs the remaining stages on one derived graph, when the step is compiled or when the
        graph is first needed."""
        name = derived.meta[DERIVED]
        steady = name == ("main" if step.module.graph.late else "setup")
        which = DerivedGraph(name, steady, step.once, step.agreement)
        return self._runner.run(self.behind, derived, which, step.module, step.proof)


class StepInMaking:
    """A step after its passes and before its first run.

    Attributes:
        module: the step.
        passes: what is shown of it after its passes.
        proof: what is known of the graphs that are derived from it.
        graphs: these, by name.
        once: it runs a single time.
        agreement: when all ranks agree that no function of the program's has raised.
    """

    def __init__(self, module: IterGraphModule, passes: Proof | None = None) -> None:
        self.module = module
        self.once = False
        self.agreement: Agreement | None = None
        self.forget()
        if passes is not None:
            self.passes, self.proof = passes, StageProof(passes)

    def forget(self) -> None:
        """Frees the large analyses of the graphs; later graphs compute them again."""
        self.passes = Proof()
        self.proof = StageProof(self.passes)
        self.graphs: dict[str, fx.GraphModule] = {}


def _inputs_of(graph: fx.Graph) -> list[InputSpec]:
    """The kinds of the placeholders of a graph loaded from a file."""
    return [
        InputSpec(node.meta[KIND], node.meta[NAME], str(node.target), placement_of(node))
        for node in graph.find_nodes(op="placeholder")
    ]


def creates_state(call: Call, captured: CapturedStep) -> bool:
    """True if a step creates optimizer state, so that the next one is captured again."""
    optimizers, tensors = call.optimizer_objects(), captured.live.module_tensors
    return any(
        not has(optimizers[state.optimizer].state, state.stands_at(tensors), state.key)
        for state in captured.signature.states
    )
