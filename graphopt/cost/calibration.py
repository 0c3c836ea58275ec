"""Calibration: measures operators and collectives on this machine once, and saves the costs.

    rank 0    reads its table ─┐ measures with all others ─┐ what it found counts ─┐
    rank 1    (waits)          ┴ measures                  ┴ takes it over         ┴ ...

All ranks measure at the same time, as they compute at the same time in training: they share cores
and links then. What rank 0 found is the answer on every rank, so that all decide alike.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.cost.collectives import Collective, CollectiveTable, Network, Point, fitted
from graphopt.cost.errors import CostTableError
from graphopt.cost.model import CostModel
from graphopt.cost.operators import Measurement, OperatorTable, machine_name
from graphopt.cost.roofline import DEVICES
from graphopt.errors import FileError, MissingFileError
from graphopt.graph_utils import tensors_in
from graphopt.ir.metadata import known_value
from graphopt.ir.user_files import cache_folder, place
from graphopt.ranks.meeting import Channel

logger = logging.getLogger("graphopt")

Said = TypeVar("Said")

SIZES = (2**12, 2**16, 2**18, 2**20, 2**22)
"""The sizes of the measured all-reduces in bytes."""
_RUNS = 5
_TURNS = 5
_MESSAGE_BYTES = 2**20
_LONGER = 1.5
_MOST_TENSORS = 16


def calibrate(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any] | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    table: str | PathLike[str] | None = None,
    timeout: float = 60.0,
) -> CostModel:
    """Measures the seconds of a graph's operators and collectives on this machine.

    Takes seconds. Every rank of the group has to call it; all get what rank 0 found.

    Args:
        graph_module: in the captured dialect, such as ``graphopt.capture(…).graph_module``.
        inputs: one for each placeholder, as the graph is called with; they are not changed. None:
            zeros of the shapes that it was captured with (`example_inputs`), whose times are those
            of other values almost everywhere.
        group: whose collectives are measured; None: the default group, if there is one.
        table: file of costs measured before. What is there for the same machine is not measured
            again; it is written anew where something was. None: ``graphopt/costs.json`` in the
            user's cache folder.
        timeout: seconds to wait for the other ranks.

    Raises:
        SpmdMismatchError: not all ranks of the group called it.
        CostTableError: `inputs` are not what the graph is called with.
        FileError: `table` is given and cannot be written.

    >>> model = torch.nn.Linear(4, 4)
    >>> captured = graphopt.capture(lambda m, x: m(x).tanh(), model, torch.ones(2, 4))
    >>> costs = graphopt.cost.calibrate(captured.graph_module, table="costs.json")
    >>> graphopt.simulate(captured.graph_module, costs).step_seconds > 0
    True
    """
    inputs = example_inputs(graph_module) if inputs is None else inputs
    _check_inputs(graph_module, inputs)
    path = cache_folder() / "costs.json" if table is None else place(table)
    channel = _channel(group, timeout)
    device = _device(inputs)
    decides = channel is None or channel.group.rank() == 0
    kept = _kept(path, machine_name(device)) if decides else None
    missing = kept is None or _operators(kept).lacks(graph_module.graph)
    if _of_rank_0(channel, missing):
        kept = _measured(graph_module, inputs, device, channel, kept)
        if decides:
            _write(kept, path, required=table is not None)
    if channel is None:
        assert kept is not None, "what is missing has been measured"
        return kept
    text = kept.to_text() if decides and kept is not None else ""
    return CostModel.from_text(_of_rank_0(channel, text))


def costs_in(path: str | PathLike[str], graph: fx.Graph) -> CostModel:
    """Loads costs that `calibrate` or `CostModel.save` has written, for a graph on this machine.
    Those of another machine are accepted with a warning, since a run may be prepared elsewhere.

    Raises:
        FileError: the file cannot be read.
        CostTableError: it does not hold costs.

    >>> from graphopt.cost import CostModel, costs_in
    >>> CostModel.preset().save("costs.json")
    >>> graphopt.simulate(gm, costs_in("costs.json", gm.graph), world_size=2).step_seconds > 0
    True
    """
    model = CostModel.load(path)
    here = machine_name(_device([known_value(n) for n in graph.find_nodes(op="placeholder")]))
    if isinstance(model.compute, OperatorTable) and model.compute.machine != here:
        logger.warning(
            "costs in %s are of another machine (%s), and this is %s: the plan may not suit it"
            " (graphopt.cost.calibrate measures here)",
            path,
            model.compute.machine,
            here,
        )
    return model


def example_inputs(graph_module: fx.GraphModule) -> list[Any]:
    """Returns zeros with the shapes of a graph's inputs, and numbers as captured. Zero-dimensional
    floats are 0.5, because some operators refuse a momentum of 0 and others divide by it.

    Raises:
        CostTableError: a shape is symbolic.
    """
    values = [known_value(n) for n in graph_module.graph.find_nodes(op="placeholder")]
    if any(_compat.has_symbolic_shape(tensor) for tensor in tensors_in(values)):
        raise CostTableError("the graph has inputs of symbolic shapes: give `inputs` to measure")
    return [_zeros(value) if isinstance(value, torch.Tensor) else value for value in values]


def _zeros(like: torch.Tensor) -> torch.Tensor:
    size, stride = tuple(like.shape), tuple(like.stride())
    made = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
    return made.zero_() if size or not made.is_floating_point() else made.fill_(0.5)


def _check_inputs(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    wanted = graph_module.graph.find_nodes(op="placeholder")
    given = list(inputs)
    kinds = [isinstance(known_value(n), torch.Tensor) for n in wanted]
    fits = [isinstance(value, torch.Tensor) for value in given]
    if kinds != fits:
        raise CostTableError(
            f"the graph takes {len(kinds)} inputs, {sum(kinds)} of them tensors; given are"
            f" {len(given)}, {sum(fits)} of them tensors\n"
            "  hint:  leave `inputs` out to measure with zeros of the shapes that it was captured"
            " with; `captured.inputs` names the inputs, and has no values"
        )


def _channel(group: dist.ProcessGroup | None, timeout: float) -> Channel | None:
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    found = _compat.group_or_default(group)
    return Channel(found, "calibrate", timeout) if found.size() > 1 else None


def _of_rank_0(channel: Channel | None, mine: Said) -> Said:
    """Returns what rank 0 gives, on every rank."""
    return mine if channel is None else channel.exchange({"said": mine})[0]["said"]


def _kept(path: Path, machine: str) -> CostModel | None:
    """Returns the saved calibration of this machine, or None."""
    try:
        model = CostModel.load(path)
    except MissingFileError:
        return None
    except (CostTableError, FileError) as error:
        logger.warning("costs are measured anew: %s", error)
        return None
    if not isinstance(model.compute, OperatorTable):
        return None
    if model.compute.machine != machine:
        logger.warning(
            "costs are measured anew: those in %s are of another machine (%s), and this is %s",
            path,
            model.compute.machine,
            machine,
        )
        return None
    return model


def _operators(model: CostModel) -> OperatorTable:
    assert isinstance(model.compute, OperatorTable)
    return model.compute


def _measured(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    device: torch.device,
    channel: Channel | None,
    kept: CostModel | None,
) -> CostModel:
    table = CollectiveTable({}) if kept is None else kept.communication
    assert isinstance(table, CollectiveTable)
    shared = channel if channel is not None and _shares_cores(channel, device) else None
    if channel is not None:
        table = _with_group(table, channel.group, device, shared is not None)
    measurement = Measurement(graph_module, inputs)
    for _ in range(_RUNS):
        measurement.run()
    slowdown = 0.0 if shared is None else _slowdown(measurement.run, shared, table)
    fallback = DEVICES["cpu" if device.type == "cpu" else "h100"]
    operators = OperatorTable({}, machine_name(device), fallback)
    if kept is not None:
        operators.seconds |= _operators(kept).seconds
        operators.scales |= _operators(kept).scales
    operators.seconds |= measurement.medians()
    operators.scales |= measurement.scales(fallback)
    return CostModel(operators, table, slowdown)


def _slowdown(run: Callable[[], float], channel: Channel, table: CollectiveTable) -> float:
    """Returns the share by which communication slows compute down, beyond a fixed cost per
    collective: alternating runs with and without it, averaged over ranks."""
    messages = _messages(channel, table, run())
    ratios = []
    for _ in range(_TURNS):
        before = run()
        beside, done = _run_with_all_reduces(messages, channel.group, run)
        ratios.append((beside - done * table.overhead) / statistics.fmean([before, run()]))
    everyone = channel.exchange({"ratio": statistics.median(ratios)})
    return max(0.0, statistics.fmean(said["ratio"] for said in everyone) - 1)


def _messages(channel: Channel, table: CollectiveTable, compute: float) -> int:
    """Returns the number of all-reduces that keep the link busy longer than the compute of any
    rank."""
    group = channel.group
    each = table(Collective("all_reduce", _MESSAGE_BYTES, group.size(), group.group_name)).seconds
    wanted = math.ceil(_LONGER * compute / max(each, 1e-6))
    return max(int(said["messages"]) for said in channel.exchange({"messages": wanted}))


def _run_with_all_reduces(
    messages: int, group: dist.ProcessGroup, run: Callable[[], float]
) -> tuple[float, int]:
    """Returns the seconds of `run` during asynchronous all-reduces, and how many of these ended
    meanwhile."""
    # Several may be under way in one tensor: these are zeros, whose sums nobody reads.
    tensors = [torch.zeros(_MESSAGE_BYTES // 4) for _ in range(min(messages, _MOST_TENSORS))]
    dist.barrier(group)
    works = [
        dist.all_reduce(tensors[number % len(tensors)], group=group, async_op=True)
        for number in range(messages)
    ]
    taken = run()
    done = sum(work.is_completed() for work in works)
    for work in works:
        work.wait()
    return taken, done


def _with_group(
    table: CollectiveTable, group: dist.ProcessGroup, device: torch.device, shares: bool
) -> CollectiveTable:
    """Adds the measured all-reduces of a group to a table, and estimates other collectives from
    them.

    Args:
        shares: the threads of a backend share cores with compute.
    """
    points, computed = measure_all_reduces(group, device)
    ranks = group.size()
    alpha, beta = fitted(points)
    # A ring sends 2 (p - 1) / p of the bytes over each link.
    rate = 2 * (ranks - 1) / ranks / max(beta, 1e-15)
    each = fitted(computed)[0] if shares else 0.0
    singly = device.type == "cpu"  # by gloo
    fallback = Network("measured", 0.0, rate, start=alpha, overhead=each, scatters_singly=singly)
    found = {**table.points, ("all_reduce", ranks): tuple(points)}
    return CollectiveTable(found, fallback, each)


def _shares_cores(channel: Channel, device: torch.device) -> bool:
    """True if compute threads occupy all cores on some rank, so that a backend's threads must share
    them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    mine = {"host": platform.node(), "threads": torch.get_num_threads(), "cores": cores}
    everyone = channel.exchange(mine)
    here = sum(said["threads"] for said in everyone if said["host"] == mine["host"])
    full = device.type == "cpu" and here >= (cores or 1)
    return any(said["full"] for said in channel.exchange({"full": full}))


def measure_all_reduces(
    group: dist.ProcessGroup, device: torch.device, rounds: int = 7
) -> tuple[list[Point], list[Point]]:
    """Returns the median seconds of all-reduces of `SIZES` bytes, made monotonic in size. They run
    back to back, so that links save nothing up. All ranks of the group must call it.

    Returns:
        Seconds on the clock, and seconds that all threads of this process compute.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for nbytes in reversed(SIZES):  # the largest take what a link has saved
        tensor = torch.zeros(nbytes // 4, device=device)
        _all_reduce_seconds(tensor, group, from_idle=True)
        found[nbytes] = [_all_reduce_seconds(tensor, group) for _ in range(rounds)]
    points: list[Point] = []
    computed: list[Point] = []
    for nbytes in SIZES:
        seconds, cores = (statistics.median(times) for times in zip(*found[nbytes], strict=True))
        points.append((nbytes, max(seconds, points[-1][1] if points else 0.0)))
        computed.append((nbytes, max(cores, computed[-1][1] if computed else 0.0)))
    return points, computed


def _all_reduce_seconds(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, from_idle: bool = False
) -> tuple[float, float]:
    if from_idle:
        dist.barrier(group)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    start, computed = time.perf_counter(), time.process_time()
    dist.all_reduce(tensor, group=group)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start, time.process_time() - computed


def _device(inputs: Sequence[Any]) -> torch.device:
    """Returns the device of the inputs: a GPU if one of them is on it."""
    devices = {tensor.device for tensor in tensors_in(list(inputs))}
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _write(model: CostModel, path: Path, required: bool) -> None:
    try:
        model.save(path)
    except FileError as error:
        if required:
            raise
        logger.warning("costs are not kept for the next time: %s", error)
