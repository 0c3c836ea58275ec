"""`pipeline="auto"`: the default passes, with the options that measured costs favour.

    rank 0   measures operators and collectives ─┐ simulates candidates, chooses ─┐ the same
    rank 1   measures with it                    ┴ waits                          ┴ pipeline

The first capture that averages gradients over several ranks decides, for all graphs of the step:
bits on three ranks or more depend on the buckets. So do they from run to run, unless a file keeps
what was chosen.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import tempfile
from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.comm import get_all_comm_blocks
from graphopt.errors import FileError, MissingFileError
from graphopt.ir.user_files import place, read_text, write
from graphopt.iter_graph import IterGraphModule
from graphopt.ranks.meeting import Channel, Meeting
from graphopt.ranks.spmd import launches_digest
from graphopt.stages.pipelines import pipeline_with

if TYPE_CHECKING:
    from graphopt.cost import CostModel

logger = logging.getLogger("graphopt")

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48)
HELD_BACK = (0.4, 0.0, 0.2, 0.6)
"""What is tried: first how many buckets, with the first share held back, then the other shares."""

_FORMAT = "graphopt plans"


class Plan(NamedTuple):
    """The options of the default passes that were decided."""

    min_buckets: int
    held_back: float


class AutoPipeline:
    """The default passes with measured options; `pipeline="auto"` makes one that is not saved to a
    file.

    Args:
        plans: file of choices made before, by collectives and number of ranks; rank 0 reads it, and
            writes what it has chosen. None: measured in every run.

    >>> import graphopt
    >>> step = graphopt.compile(lambda m, x: m(x), pipeline=graphopt.AutoPipeline("plans.json"))
    """

    def __init__(self, plans: str | PathLike[str] | None = None) -> None:
        self._plans = None if plans is None else place(plans)

    def decide(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], apart: Collection[str] = ()
    ) -> dict[str, Any] | None:
        """Decides the options of the passes for this captured step and later ones; None if it
        averages nothing. All ranks capture this step together.

        Args:
            inputs: what the graph is about to be called with; they are not changed.
            apart: names of groups whose ranks do not (`graphopt.ranks.independent_ranks`).

        Raises:
            SpmdMismatchError: a rank did not come.
            FileError: the file of plans cannot be written.
        """
        group = _group_of(graph_module, apart)
        if group is None:
            return None
        channel = Channel(group, "auto", 60.0)
        key = f"{launches_digest(graph_module.graph)} on {group.size()}"
        first = group.rank() == 0
        known = self._kept().get(key) if first else None
        said = channel.exchange({"plan": known})[0]["plan"]
        if said is not None:
            return dict(said)
        costs = _measured(graph_module, inputs, group)
        found = fastest(graph_module, costs) if first else None
        if first:
            self._keep(key, found)
        with Meeting(channel) as meeting:
            said = meeting.exchange({"plan": found}, patient=True)[0]["plan"]
        logger.info("auto: %s", said)
        return dict(said)

    def _kept(self) -> dict[str, Any]:
        if self._plans is None:
            return {}
        try:
            content = json.loads(read_text(self._plans))
            if content["format"] != _FORMAT:
                raise ValueError("another format")
            return {str(key): _checked(plan) for key, plan in content["plans"].items()}
        except MissingFileError:
            return {}
        except (FileError, ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("plans in %s are not used: %s", self._plans, error)
            return {}

    def _keep(self, key: str, plan: Any) -> None:
        if self._plans is None:
            return
        plans = self._kept() | {key: plan}
        text = json.dumps({"format": _FORMAT, "plans": plans}, indent=1) + "\n"
        write(self._plans, text)


def fastest(graph_module: fx.GraphModule, costs: CostModel) -> dict[str, Any]:
    """The options of the default pipeline with the shortest simulated step.

    Args:
        graph_module: the captured graph, which is not changed.
        costs: the costs of its operators and collectives.
    """
    seconds = functools.cache(functools.partial(_seconds, graph_module, costs))
    best = min((Plan(count, HELD_BACK[0]) for count in BUCKETS), key=seconds)
    return min((Plan(best.min_buckets, share) for share in HELD_BACK), key=seconds)._asdict()


def _seconds(gm: fx.GraphModule, costs: CostModel, plan: Plan) -> float:
    from graphopt.manager.discovery import PassManager
    from graphopt.schedule import simulate

    module = IterGraphModule(copy.deepcopy(gm))
    PassManager(pipeline_with(*plan), verify="off").run(module)
    return simulate(module, costs).step_seconds


def _measured(gm: fx.GraphModule, inputs: Sequence[Any], group: dist.ProcessGroup) -> CostModel:
    """Calibrates the cost model now, since links change from day to day."""
    from graphopt.cost import calibrate

    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        return calibrate(gm, inputs, group, table=Path(folder) / "costs.json")


def _group_of(gm: fx.GraphModule, apart: Collection[str]) -> dist.ProcessGroup | None:
    """The process group of the gradients, if its ranks can measure together."""
    for block in get_all_comm_blocks(gm, "all_reduce"):
        group = None if block.group in apart else _compat.group_named(block.group)
        if group is not None and group.size() > 1 and dist.get_backend(group) != "fake":
            return group
    return None


def _checked(plan: Any) -> dict[str, Any]:
    count, share = found = Plan(**plan)
    known = isinstance(count, int) and isinstance(share, float)
    if not (known and count >= 1 and 0 <= share < 1):
        raise ValueError(f"{plan} is no plan")
    return found._asdict()
