"""CUDA graphs on a CUDA device. The other tests of them need none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import graphopt
from cudagraphs_emulation import Training
from graphopt._compat import make_fx
from graphopt.lowering.cudagraphs.pieces import InputTransfer
from graphopt.lowering.cudagraphs.recorder import CudaRecorder
from graphopt.lowering.cudagraphs.replay import CudaGraphPiece, PieceInput, Pools
from graphopt.stages import default_pipeline
from steps import step_with_own_averages
from zoo import MODELS, OPTIMIZERS, train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    """A learning rate goes to fused kernels in float32, so that last bits may differ."""
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def piece_of(
    program: Callable[..., list[Any]], ways: list[InputTransfer], *examples: Tensor
) -> CudaGraphPiece:
    recorder = CudaRecorder()
    inputs = [
        PieceInput(f"input_{index}", way, way is InputTransfer.STATIC)
        for index, way in enumerate(ways)
    ]
    module = make_fx(program)(*examples)
    returned = next(iter(reversed(module.graph.nodes))).args[0]
    return CudaGraphPiece(
        module,
        "cudagraph_0",
        inputs,
        [True] * len(returned),
        position=0,
        device=DEVICE,
        pools=Pools(recorder.new_pool),
        recorder=recorder,
    )


@pytest.mark.parametrize("model", ["mlp", "gpt", "convnet", "checkpointed"])
@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-momentum-fused", "adamw-foreach"])
def test_a_step_trains_the_same(model: str, optimizer: str) -> None:
    """Kept losses, dropout, a schedule, and a new seed between two steps."""
    trainings = [
        Training(model, optimizer, recorder, device="cuda") for recorder in (None, CudaRecorder)
    ]
    for training in trainings:
        for seed in (1, 2):
            torch.manual_seed(seed)
            training.run(5)
    reference, recorded = trainings
    assert_close(recorded.state(), reference.state())
    assert recorded.pieces and all(piece.is_recorded for piece in recorded.pieces)


def test_dropout_draws_what_it_would_have_drawn() -> None:
    x = torch.ones(1000, device=DEVICE)
    piece = piece_of(
        lambda x: [F.dropout(x, 0.5), F.dropout(x + 1, 0.3)], [InputTransfer.COPIED], x
    )
    torch.manual_seed(3)
    kept = [result for _ in range(5) for result in piece(x)]
    torch.manual_seed(3)
    eager = [result for _ in range(5) for result in piece.graph_module(x)]
    assert piece.is_recorded
    assert all(map(torch.equal, kept, eager))
    torch.manual_seed(4)
    (first, _), after = piece(x), torch.rand(3, device=DEVICE)
    torch.manual_seed(4)
    assert torch.equal(first, piece.graph_module(x)[0])
    assert torch.equal(after, torch.rand(3, device=DEVICE)), "a replay moves the generator on"


def test_a_recording_that_fails_leaves_the_device_usable(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(8, device=DEVICE)
    waiting = piece_of(lambda x: [x.exp() * x.sum()], [InputTransfer.COPIED], x)
    graph = waiting.graph_module.graph
    total = next(node for node in graph.nodes if node.target is torch.ops.aten.sum.default)
    with graph.inserting_after(total):
        read = graph.call_function(torch.ops.aten._local_scalar_dense.default, (total,))
    total.replace_all_uses_with(read, delete_user_cb=lambda user: user is not read)
    waiting.graph_module.recompile()
    expected = x.exp() * 8
    assert all(torch.equal(waiting(x)[0], expected) for _ in range(4))
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "%_local_scalar_dense" in record.message and "operator by operator" in record.message
    torch.manual_seed(5)
    drawn = torch.rand(4, device=DEVICE)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(4, device=DEVICE))
    other = piece_of(lambda x: [F.dropout(x, 0.5) * 2], [InputTransfer.COPIED], x)
    for _ in range(4):
        other(x)
    assert other.is_recorded


def test_a_parameter_whose_data_is_replaced_is_read_where_it_is() -> None:
    w = torch.ones(4, device=DEVICE)
    piece = piece_of(lambda w: [w.add_(1) * 2], [InputTransfer.STATIC], w)
    for start in (0.0, 10.0, 20.0):
        w = torch.full((4,), start, device=DEVICE)
        for use in range(4):
            assert torch.equal(piece(w)[0], torch.full_like(w, 2 * (start + use + 1)))


def test_a_learning_rate_may_change_right_after_the_call() -> None:
    lr = torch.tensor(1.0, dtype=torch.float64)
    x = torch.ones(4, device=DEVICE)
    recorder = CudaRecorder()
    piece = CudaGraphPiece(
        make_fx(lambda x, lr: [x * lr])(x, lr.to(DEVICE)),
        "cudagraph_0",
        [PieceInput("x", InputTransfer.STATIC), PieceInput("lr", InputTransfer.SCALAR)],
        [True],
        position=0,
        device=DEVICE,
        pools=Pools(recorder.new_pool),
        recorder=recorder,
    )
    results = []
    for number in range(50):
        lr.fill_(number)
        results.append(piece(x, lr)[0])
        lr.fill_(-1)
    torch.cuda.synchronize()
    assert [float(result[0]) for result in results] == list(map(float, range(50)))


@pytest.fixture
def nccl(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("late", [False, True], ids=["recorded", "in flight"])
def test_nccl_collectives(late: bool) -> None:
    trainings = [
        Training(
            "gpt",
            "adamw-fused",
            recorder,
            pipeline=default_pipeline() if late else (),
            step=step_with_own_averages,
            device="cuda",
        )
        for recorder in (None, CudaRecorder)
    ]
    for training in trainings:
        torch.manual_seed(1)
        training.run(6)
        training.flush()
        training.run(4)
    reference, recorded = trainings
    assert_close(recorded.state(), reference.state())
    assert recorded.pieces and all(piece.is_recorded for piece in recorded.pieces)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach"])
def test_compiled_regions_in_cuda_graphs(optimizer: str) -> None:
    def losses(step: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model = MODELS["gpt"].make().to(DEVICE)
        trained = OPTIMIZERS[optimizer](model.parameters())
        found = []
        torch.manual_seed(1)
        for index in range(8):
            batch = (tensor.to(DEVICE) for tensor in MODELS["gpt"].batch(index))
            found.append(step(model, trained, *batch))
            trained.param_groups[0]["lr"] *= 0.9
        return [loss.detach() for loss in found]

    compiled = graphopt.compile(train_step, pipeline="none", lower="inductor+cudagraphs")
    assert_close(losses(compiled), losses(train_step))


def trained(
    step: Callable[..., Tensor], dtype: torch.dtype = torch.float32, *, dropout: bool = False
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Parameters after five steps of a GPT at falling learning rates, its losses, and their values
    when they were returned."""
    torch.manual_seed(0)
    model = MODELS["gpt"].make().to(DEVICE, dtype).train(dropout)
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    kept, read = [], []
    for index in range(5):
        if index in (0, 3):
            torch.manual_seed(index)
        batch = (tensor.to(DEVICE) for tensor in MODELS["gpt"].batch(index))
        kept.append(step(model, optimizer, *batch).detach())
        read.append(float(kept[-1]))
        schedule.step()
    if isinstance(step, graphopt.TrainStep):
        step.flush()
    return [parameter.detach() for parameter in model.parameters()], kept, read


def relative_error(actual: list[Tensor], exact: list[Tensor]) -> float:
    found, wanted = (torch.cat([t.double().flatten() for t in each]) for each in (actual, exact))
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dropout", [False, True], ids=["exact", "dropout"])
@pytest.mark.parametrize(
    "options",
    [{"pipeline": n} for n in ("none", "default")]
    + [{"lower": n} for n in ("inductor", "inductor+cudagraphs")],
    ids=str,
)
def test_a_training_is_as_exact_as_in_eager_code(
    options: dict[str, str], dropout: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled code errs at most three times as much as eager code against float64, and what is not
    compiled has eager's bits; losses stay, and nothing falls back."""
    plain, plain_losses, _ = trained(train_step, dropout=dropout)
    found, kept, read = trained(graphopt.compile(train_step, **options), dropout=dropout)
    assert [float(loss) for loss in kept] == read
    assert "operator by operator" not in caplog.text
    if "lower" not in options:
        assert all(map(torch.equal, found + kept, plain + plain_losses))
    elif dropout:
        assert relative_error(found, plain) <= 1e-3
    else:
        exact, _, _ = trained(train_step, torch.float64)
        assert relative_error(found, exact) <= 3 * relative_error(plain, exact)
