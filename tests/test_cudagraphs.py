"""CUDA graphs, played on the CPU: a step computes the same, whatever is overwritten when."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import graphopt
from cudagraphs_emulation import EmulatedRecorder, Training, pieces_of
from graphopt.executable import finalize
from graphopt.lowering.boxed import box_calls
from graphopt.lowering.compiler import Options
from graphopt.lowering.cudagraphs import CudaGraphs
from graphopt.lowering.cudagraphs.pieces import InputTransfer
from graphopt.lowering.cudagraphs.replay import CudaGraphPiece, PieceInput, Pools
from graphopt.lowering.subgraph import LoweredSubgraph
from graphopt.stages import default_pipeline
from sketch import Sketch, one_rank
from steps import step_with_own_averages
from zoo import MLP, MODELS, train_step

aten = torch.ops.aten


def assert_same_training(reference: Training, recorded: Training, steps: int = 5) -> None:
    """Bit for bit, random numbers included."""
    for training in (reference, recorded):
        torch.manual_seed(1)
        training.run(steps)
    pairs = zip(recorded.state(), reference.state(), strict=True)
    assert all(torch.equal(actual, expected) for actual, expected in pairs)


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "graphopt"]


# ---------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize(
    "model",
    [
        "mlp",
        "gpt",
        "convnet",
        "checkpointed",
        "shared-storage",
        "reused",
        "partial",
        "parametrized",
        "running-mean",
    ],
)
def test_every_model_trains_the_same(model: str) -> None:
    recorder = EmulatedRecorder()
    recorded = Training(model, "adamw-fused", lambda: recorder)
    assert_same_training(Training(model, "adamw-fused", None), recorded)
    assert recorded.pieces and all(piece.is_recorded for piece in recorded.pieces)
    assert {recording.replays for recording in recorder.recordings} == {4}
    assert recorder.pools == 1, "the pieces of a graph share their memory"


@pytest.mark.parametrize(
    "optimizer", ["sgd-momentum-fused", "adamw-amsgrad-foreach", "rmsprop-loop"]
)
def test_every_kind_of_optimizer_trains_the_same(optimizer: str) -> None:
    recorded = Training("gpt", optimizer, EmulatedRecorder)
    assert_same_training(Training("gpt", optimizer, None), recorded)
    assert recorded.pieces and all(piece.is_recorded for piece in recorded.pieces)


def test_forward_backward_and_fused_optimizer_are_two_pieces() -> None:
    """The optimizer takes numbers, which may change, so that it is recorded by itself."""
    recorded = Training("gpt", "adamw-fused", EmulatedRecorder)
    recorded.run(1)
    (graph,) = recorded.graphs
    left = [n for n in graph.graph.nodes if n.op == "call_function" and "getitem" not in str(n)]
    assert {str(node.target) for node in left} == {"aten._local_scalar_dense.default"}
    assert len(recorded.pieces) == 2


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("records_groups", [False, True], ids=["gloo", "recordable"])
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach"])
def test_late_work_and_what_is_carried(optimizer: str, records_groups: bool) -> None:
    """A reduced bucket outlives the next replay of the piece that filled it."""

    def training(record: bool) -> Training:
        return Training(
            "mlp",
            optimizer,
            (lambda: EmulatedRecorder(records_groups=records_groups)) if record else None,
            pipeline=default_pipeline(),
            step=step_with_own_averages,
        )

    reference, recorded = training(False), training(True)
    for each in (reference, recorded):
        torch.manual_seed(1)
        each.run(5)
        each.flush()
        each.run(3)
    pairs = zip(recorded.state(), reference.state(), strict=True)
    assert all(torch.equal(actual, expected) for actual, expected in pairs)
    assert recorded.module.graph.late
    assert recorded.pieces and all(piece.is_recorded for piece in recorded.pieces)


def test_a_compiled_region_is_recorded_with_what_stands_around_it() -> None:
    """No compiler is needed to see it: the region runs operator by operator."""

    class Eager(LoweredSubgraph):
        def _for_kinds(self, kinds: Any) -> Any:
            return self._run_eagerly

    inner = Sketch()
    x = inner.input("x", 4, 4)
    inner.graph.output([inner.call(aten.exp.default, inner.call(aten.neg.default, x))])
    region = Eager(fx.GraphModule({}, inner.graph), "region")

    s = Sketch()
    w, x = s.input("w", 4, 4, kind="parameter"), s.input("x", 4, 4, kind="user_input")
    product = s.call(aten.mm.default, x, w)
    call = s.graph.call_module("region", (product,))
    call.meta |= {"val": (product.meta["val"],), "writes": []}
    result = s.call(aten.tanh.default, s.call(operator.getitem, call, 0))
    s.graph.output(([s.call(aten.neg.default, result)], [], []))
    gm = fx.GraphModule({"region": region}, s.graph)
    values = [torch.randn(4, 4), torch.randn(4, 4)]
    ((expected,), _, _) = gm(*values)
    recorder = EmulatedRecorder()
    box_calls(CudaGraphs(recorder).apply(gm))
    assert len(pieces_of(gm)) == 1
    for _ in range(3):
        ((actual,), _, _) = gm(*values)
        assert torch.equal(actual, expected)
    assert [recording.replays for recording in recorder.recordings] == [2]


# ---------------------------------------------------------------------------- without a device


def test_without_cuda_one_message_and_the_graph_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = MODELS["mlp"].batch(0)
    train_step(model, optimizer, *batch)
    gm = finalize(graphopt.capture(train_step, model, optimizer, *batch).graph_module)
    before = str(gm.graph)
    graphs = CudaGraphs()
    with caplog.at_level(logging.INFO, "graphopt"):
        assert graphs.apply(gm) is gm and graphs.apply(gm) is gm
    (record,) = said(caplog)
    assert record.levelno == logging.WARNING and "no CUDA device" in record.message
    assert str(gm.graph) == before


# ---------------------------------------------------------------------------- one piece


def body(program: Callable[..., list[Any]], *examples: Any) -> fx.GraphModule:
    from graphopt._compat import make_fx

    return make_fx(program)(*examples)


def piece_of(
    program: Callable[..., list[Any]],
    ways: dict[str, InputTransfer],
    recorder: EmulatedRecorder,
    *examples: Any,
    leaving: bool = True,
    written: tuple[str, ...] = (),
) -> CudaGraphPiece:
    """A piece that runs `program`."""
    return CudaGraphPiece(
        body(program, *examples),
        "cudagraph_0",
        [PieceInput(name, way, name in written) for name, way in ways.items()],
        [leaving],
        position=0,
        device=torch.device("cpu"),
        pools=Pools(recorder.new_pool),
        recorder=recorder,
    )


def test_the_first_call_warms_up_the_second_records_the_others_replay() -> None:
    recorder = EmulatedRecorder()
    ways = {"w": InputTransfer.STATIC, "x": InputTransfer.COPIED}
    w = torch.ones(3)
    piece = piece_of(lambda w, x: [w * x + 1], ways, recorder, w, w + 1)
    kept, expected = [], []
    for index in range(5):
        x = torch.full((3,), float(index))
        kept.append(piece(w, x)[0])
        expected.append(w * x + 1)
        assert piece.is_recorded is (index > 0)
    assert recorder.warm_ups == 1 and [r.replays for r in recorder.recordings] == [4]
    assert all(map(torch.equal, kept, expected)), "a kept result was overwritten"


def test_a_result_that_is_not_kept_is_not_copied() -> None:
    recorder = EmulatedRecorder()
    w = torch.ones(3)
    piece = piece_of(lambda w: [w * 2], {"w": InputTransfer.STATIC}, recorder, w, leaving=False)
    piece(w)
    first, second = piece(w), piece(w)
    assert first[0] is second[0]


def test_a_result_that_is_an_input_is_copied_although_nobody_keeps_it() -> None:
    """An operator may return its argument where nothing says so."""
    recorder = EmulatedRecorder()
    x = torch.ones(3)
    piece = piece_of(lambda x: [x], {"x": InputTransfer.COPIED}, recorder, x, leaving=False)
    results = [piece(torch.full((3,), float(index)))[0] for index in range(4)]
    assert [float(result[0]) for result in results] == [0.0, 1.0, 2.0, 3.0]


def test_another_parameter_tensor_is_recorded_anew_at_most_eight_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = EmulatedRecorder()
    program = lambda w, x: [w.add_(1) * x]  # noqa: E731
    ways = {"w": InputTransfer.STATIC, "x": InputTransfer.COPIED}
    examples = torch.ones(3), torch.ones(3)
    piece = piece_of(program, ways, recorder, *examples, written=("w",))
    with caplog.at_level(logging.INFO, "graphopt"):
        for number in range(12):
            w = torch.full((3,), float(number))
            for use in range(3):
                x = torch.randn(3)
                assert torch.equal(piece(w, x)[0], (number + use + 1) * x)
            assert torch.equal(w, torch.full((3,), float(number + 3)))
    assert len(recorder.recordings) == 8
    (warning,) = [r for r in said(caplog) if r.levelno == logging.WARNING]
    assert "operator by operator: it was recorded 8 times, and w changed again" in warning.message
    assert piece.failure is not None
    assert len(set(recorder.pools_used[1:])) == 7, "a new recording shares memory with nobody"


def test_an_input_whose_address_changes_again_is_copied_from_then_on() -> None:
    """As results of a piece that runs operator by operator do."""
    recorder = EmulatedRecorder()
    piece = piece_of(lambda w: [w + 1], {"w": InputTransfer.STATIC}, recorder, torch.ones(3))
    kept = [torch.full((3,), float(number)) for number in range(20)]
    for number, w in enumerate(kept):
        assert torch.equal(piece(w)[0], torch.full((3,), number + 1.0))
    assert len(recorder.recordings) == 3
    assert piece.is_recorded and piece.failure is None


def test_another_number_is_recorded_anew() -> None:
    recorder = EmulatedRecorder()
    w = torch.ones(3)
    piece = CudaGraphPiece(
        _scaled(),
        "cudagraph_0",
        [PieceInput("w", InputTransfer.STATIC), PieceInput("number", InputTransfer.NUMBER)],
        [True],
        position=0,
        device=torch.device("cpu"),
        pools=Pools(recorder.new_pool),
        recorder=recorder,
    )
    for number in (0.5, 0.5, 0.5, 0.25, 0.25, 0.25):
        assert torch.equal(piece(w, number)[0], w * number)
    assert [recording.replays for recording in recorder.recordings] == [2, 2]


def _scaled() -> fx.GraphModule:
    graph = fx.Graph()
    w, number = graph.placeholder("w"), graph.placeholder("number")
    graph.output([graph.call_function(aten.mul.Scalar, (w, number))])
    return fx.GraphModule({}, graph)


def test_a_recording_that_fails_is_said_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The update runs once in each step, also in that in which the recording failed."""
    recorder = EmulatedRecorder(refuse=lambda: True)
    state = torch.zeros(3)
    piece = piece_of(
        lambda s: [s.add_(1) * 2], {"s": InputTransfer.STATIC}, recorder, state, written=("s",)
    )
    state = torch.zeros(3)
    for step in range(1, 6):
        assert torch.equal(piece(state)[0], torch.full((3,), 2.0 * step))
    (record,) = said(caplog)
    assert "cudagraph_0 runs operator by operator" in record.message
    assert "operation not permitted when stream is capturing" in record.message
    assert recorder.recordings == []


def test_the_message_of_a_failure_names_the_node(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(EmulatedRecorder):
        def record(self, device: Any, run: Any, pool: Any) -> Any:
            def fails(*args: Any) -> Any:
                raise RuntimeError("not while capturing\nmore")

            exp = next(node for node in piece.graph_module.graph.nodes if "exp" in node.name)
            before, exp.target = exp.target, fails
            try:
                return super().record(device, run, pool)
            finally:
                exp.target = before

    recorder = Failing()
    w = torch.ones(3)
    piece = piece_of(lambda w: [w.neg().exp()], {"w": InputTransfer.STATIC}, recorder, w)
    assert all(torch.equal(piece(w)[0], w.neg().exp()) for _ in range(3))
    (record,) = said(caplog)
    assert "%exp" in record.message and "RuntimeError: not while capturing" in record.message
    assert "more" not in record.message


def test_a_value_from_another_device_ends_recording(caplog: pytest.LogCaptureFixture) -> None:
    """Metadata may say CUDA of a tensor that an operator leaves on the CPU."""
    recorder = EmulatedRecorder()
    examples = torch.ones(3), torch.ones(3)
    ways = {"w": InputTransfer.STATIC, "x": InputTransfer.COPIED}
    piece = piece_of(lambda w, x: [w], ways, recorder, *examples)
    piece(torch.ones(3), torch.ones(3, device="meta"))
    assert piece.failure == "%x is on meta, not on cpu"
    assert "%x is on meta" in caplog.text


def test_a_piece_that_is_recorded_before_an_earlier_one_leaves_it_its_memory() -> None:
    pools = Pools(EmulatedRecorder().new_pool)
    in_order = [pools.of(position) for position in (0, 1, 3)]
    again, next_one = pools.of(1), pools.of(4)
    assert in_order == [1, 1, 1] and again == 2 and next_one == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_compile_without_cuda_says_so_once_and_trains_as_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regions are turned off here, so that every bit is eager's."""
    options = Options(cudagraphs=True, min_ops=10**6)
    step = graphopt.compile(train_step, lower=options)

    def train(step: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model = MLP()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        losses = [step(model, optimizer, *MODELS["mlp"].batch(index)) for index in range(4)]
        return [loss.detach() for loss in losses] + list(model.parameters())

    pairs = zip(train(step), train(train_step), strict=True)
    assert all(torch.equal(actual, expected) for actual, expected in pairs)
    (record,) = [r for r in said(caplog) if r.levelno == logging.WARNING]
    assert "no CUDA device" in record.message
