"""CUDA graphs for a step that runs again and again: `CudaGraphs`.

The CPU then launches one recording where it launched hundreds of kernels. In the steady state of a
step on one device, all between the first operator and the last update is one recording, or two:

    before                                     after
    mm         = mm(x, weight)                 cudagraph_0 = cudagraph_0(x, weight, exp_avg, …)
    …                                          loss        = getitem(cudagraph_0, 0)
    fused_adam = _fused_adam_([weight], …)     output(([loss], [], []))
    output(([loss], [], []))

A recording finds its inputs at fixed addresses. Parameters, buffers and optimizer state have them,
and so have results of recordings before it; others are copied. What the user gets, or what the
next iteration needs, is copied out. What cannot be recorded runs between the recordings as before:

- work of the CPU, Python numbers that are computed in the graph, and what waits for the device;
- collectives other than NCCL's, and those whose launch and wait are not in one recording;
- operators of other libraries, and those that draw from a generator of their own.

Random operators draw what they would have drawn: a replay goes on where the default generator is.
A learning rate goes to fused optimizers in float32, as their kernels take it on the device.
"""

from __future__ import annotations

import logging

from torch import fx

from graphopt.graph_utils import tensors_in
from graphopt.ir.metadata import known_value
from graphopt.lowering.cudagraphs.pieces import (
    PieceBody,
    Pieces,
    find_pieces,
    gather_items,
    with_calls,
)
from graphopt.lowering.cudagraphs.recorder import CudaRecorder, Recordable
from graphopt.lowering.cudagraphs.replay import CudaGraphPiece, PieceInput, Pools
from graphopt.lowering.log import log_left_out

logger = logging.getLogger("graphopt")


class CudaGraphs:
    """Records parts of a step's graphs as CUDA graphs; one object for all graphs of a step.

    Args:
        recorder: does the recording; by default that of CUDA.
        min_ops: parts with fewer operators stay as they are; with inputs that have to be copied, so
            do parts with some more.
    """

    def __init__(self, recorder: CudaRecorder | None = None, min_ops: int = 4) -> None:
        self._recorder = CudaRecorder() if recorder is None else recorder
        self._min_ops = min_ops
        self._said = False

    def apply(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Replaces the parts of a graph that can be recorded by CUDA graph calls, in place.

        Each becomes a call of a `CudaGraphPiece`, ``cudagraph_0`` and so on. What stays outside is
        logged with its reason (logger ``graphopt``, INFO). Where there is no CUDA device, one
        warning says so, and graphs stay as they are.

        Args:
            gm: a graph in the executable dialect, with static shapes, that is called many times.
                Its regions are `LoweredSubgraph` modules that are not boxed yet.

        Returns:
            `gm`.
        """
        recorder = self._recorder
        if not _uses(gm.graph, recorder.device_type):
            self._say_that_there_is_no_device()
            return gm
        gather_items(gm.graph)
        recordable = Recordable(recorder.device_type, recorder.records_group)
        found = find_pieces(gm, recordable, self._min_ops)
        _log(found)
        pools = Pools(recorder.new_pool)
        bodies = [PieceBody(each, f"cudagraph_{i}") for i, each in enumerate(found.pieces)]
        for position, body in enumerate(bodies):
            gm.add_submodule(body.name, _module(gm, body, position, pools, recorder))
        gm.graph = with_calls(gm.graph, bodies)
        gm.graph.lint()
        gm.recompile()
        return gm

    def _say_that_there_is_no_device(self) -> None:
        if not self._said:
            logger.warning(
                "CUDA graphs were asked for, but the step runs on no CUDA device: it runs without"
                " them"
            )
        self._said = True


def _module(
    gm: fx.GraphModule, body: PieceBody, position: int, pools: Pools, recorder: CudaRecorder
) -> CudaGraphPiece:
    piece = body.piece
    return CudaGraphPiece(
        body.module(gm),
        body.name,
        [PieceInput(node.name, way, node in piece.written) for node, way in piece.inputs.items()],
        [output in piece.leaving for output in body.outputs],
        position=position,
        device=piece.device,
        pools=pools,
        recorder=recorder,
    )


def _uses(graph: fx.Graph, device_type: str) -> bool:
    return any(
        tensor.device.type == device_type
        for node in graph.nodes
        for tensor in tensors_in(known_value(node))
    )


def _log(found: Pieces) -> None:
    """Logs the nodes that are not recorded, one line for each operator and reason."""
    sizes = [len(piece.nodes) for piece in found.pieces]
    logger.info("CUDA graphs: %d pieces, of %s nodes", len(sizes), sizes)
    left_out = ((str(node.target), node.name, reason) for node, reason in found.reasons.items())
    log_left_out("not recorded", left_out)
