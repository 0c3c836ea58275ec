"""Reads of a tensor before and after an operator writes to it, operators that write to what they
read, views whose elements are read as others, and optimizers that step twice in one step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Write = Callable[[Tensor, Tensor], object]
Read = Callable[[Tensor], Any]


def by_fused_optimizer(kept: Tensor, other: Tensor) -> None:
    rest = ([torch.zeros_like(kept)] for _ in range(2))
    torch._fused_adam_(
        *([kept], [other], *rest, [], [torch.ones(())]),
        lr=0.5,
        beta1=0.9,
        beta2=0.9,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


def by_unscaling(kept: Tensor, other: Tensor) -> None:
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([kept], found, torch.full((1,), 3.0))


WRITES: dict[str, Write] = {
    "add_": lambda kept, other: kept.add_(other),
    "copy_": lambda kept, other: kept.copy_(other),
    "out": lambda kept, other: torch.mul(kept, other, out=kept),
    "item": lambda kept, other: kept.__setitem__(0, other[1]),
    "view": lambda kept, other: kept[:1].sub_(other[:1]),
    "masked": lambda kept, other: kept.masked_fill_(other > 0, 0.0),
    "list": lambda kept, other: torch._foreach_add_([kept], [other]),
    "list and number": lambda kept, other: torch._foreach_mul_([kept], -1.5),
    "list and tensor": lambda kept, other: torch._foreach_add_([kept], torch.tensor(1.5)),
    "copied list": lambda kept, other: torch._foreach_copy_([kept], [other]),
    "list of views": lambda kept, other: torch._foreach_zero_([kept[:1], kept[2:]]),
    "out of a list": lambda kept, other: torch.ops.aten._foreach_add.Scalar_out(
        [other], 1.0, out=[kept]
    ),
    "fused optimizer": by_fused_optimizer,
    "unscaling": by_unscaling,
}
READS: dict[str, Read] = {
    "number": lambda kept: kept.sum().item(),
    "element": lambda kept: kept[0].item(),
    "whole number": lambda kept: int(kept[0] * 4),
    "sum of both": lambda kept: kept.mean().item() + kept.amax().item(),
    "sizes": lambda kept: kept[kept > 0].sum(),
    "where": lambda kept: kept.nonzero().sum(),
    "distinct": lambda kept: torch.unique(kept).numel(),
    "decision": lambda kept: kept * 2 if kept.sum() > 0 else kept - 1,
    "scalar": lambda kept: kept.view(3)[0].view(()).item(),
}


def left(step: Callable[..., Any], kept: Tensor) -> list[Any]:
    return [(step(kept, other), kept.clone()) for other in _OTHERS]


_OTHERS = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([-3.0, 0.0, 2.0]), torch.ones(3)]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_read_behind_a_write_is_what_was_written(write: str, read: str) -> None:
    def step(kept: Tensor, other: Tensor) -> Any:
        before = READS[read](kept)
        WRITES[write](kept, other)
        between = READS[read](kept)
        WRITES[write](kept, other)
        return before, between, READS[read](kept)

    start = torch.tensor([0.25, -1.0, 3.0])
    expected = left(step, start.clone())
    found = left(graphopt.compile(step), start.clone())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("write", WRITES)
def test_one_tensor_of_one_element(write: str) -> None:
    """Of which torch keeps the number itself."""

    def step(kept: Tensor, other: Tensor) -> Any:
        numbers = [kept.item()]
        for _ in range(2):
            WRITES[write](kept.view(1), other[:1])
            numbers += [kept.item(), kept.item()]
        return numbers

    if write in ("item", "list of views"):
        pytest.skip("it needs more elements")
    expected = left(step, torch.tensor(0.25))
    found = left(graphopt.compile(step), torch.tensor(0.25))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "Rprop")
FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "RMSprop", "SGD"])
def test_an_optimizer_that_is_stepped_twice(name: str, form: str) -> None:
    if form == "fused" and name not in ("Adagrad", "Adam", "AdamW", "SGD"):
        pytest.skip("there is no such kernel")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    kind = getattr(torch.optim, name)

    def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> list[Tensor]:
        losses = []
        for shift in (0.0, 1.0):
            loss = (model(x) - shift).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    step = graphopt.compile(train_step)
    optimizers = [kind(each.parameters(), **FORMS[form]) for each in (model, twin)]
    for _ in range(4):
        x = torch.randn(5, 4)
        found, expected = step(model, optimizers[0], x), train_step(twin, optimizers[1], x)
        assert all(map(torch.equal, found, expected))
    step.flush()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def left_by_statement(statement: str, compiled: bool) -> Any:
    """What three calls leave in a tensor outside, and one that is viewed; or the error's class."""
    torch.manual_seed(0)
    a = torch.randn(6, 6)
    held = {"a": a, "t": a.t(), "torch": torch}
    space: dict[str, Any] = {}
    exec(f"def change(a, t, torch):\n    {statement}", space)  # the statements are those below

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            space["change"](**held)
        return x * a.sum()

    called = graphopt.compile(step, pipeline="none") if compiled else step
    try:
        results = [called(torch.ones(2)).tolist() for _ in range(3)]
    except (RuntimeError, graphopt.CaptureError) as error:
        return error
    return results, a.tolist()


@pytest.mark.parametrize(
    "statement",
    [
        "a[:, :-1] = a[:, 1:]",
        "a[:, :-2].add_(a[:, 2:])",
        "a[:3].copy_(a[3:])",
        "a.add_(a)",
        "a[::2].mul_(a[1::2])",
        "a.masked_fill_(t > 0, a[0, 0])",
        "a.fill_(a[1, 1])",
        "a.copy_(a.flip(0))",
        "torch._foreach_add_([a[0], a[1]], [a[2], a[3]])",
        "t[1:].zero_()",
    ],
)
def test_eager_code_reads_all_before_it_writes(statement: str) -> None:
    expected = left_by_statement(statement, compiled=False)
    assert isinstance(expected, tuple)
    assert left_by_statement(statement, compiled=True) == expected


@pytest.mark.parametrize(
    "statement",
    [
        "a.add_(t)",
        "a.copy_(t)",
        "a[1:] = a[:-1]",
        "a.div_(a[0, 0])",
        "torch.mul(a, t, out=a)",
        "torch._foreach_copy_([a], [t])",
        "a.index_copy_(0, torch.tensor([0, 1]), a[1:3])",
        "a[:1].expand(3, 6)[:] = torch.ones(3, 6)",
        "a[0].expand(3, 6).fill_(a[1, 1])",
    ],
)
def test_what_eager_code_refuses_is_refused(statement: str) -> None:
    assert isinstance(left_by_statement(statement, compiled=False), RuntimeError)
    refused = left_by_statement(statement, compiled=True)
    assert isinstance(refused, graphopt.CaptureError)
    assert "of which it reads another part" in str(refused) or "expanded" in str(refused)


@pytest.mark.parametrize(
    "statement",
    [
        "a[:, 1:].copy_(a[:, :-1])",  # eager writes the first column into all others
        "a[0].expand(3, 6)[1] = 0.1",  # a graph would add to what is there
        "a[:1].expand(3, 6).zero_()",
        "a[:, :1].expand(6, 3).fill_(2.0)",
    ],
)
def test_what_a_graph_cannot_do_exactly_is_refused(statement: str) -> None:
    assert isinstance(left_by_statement(statement, compiled=False), tuple)
    assert isinstance(left_by_statement(statement, compiled=True), graphopt.CaptureError)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": lambda t: torch.view_as_complex(t.view(-1, 2)),
    "real": lambda t: torch.view_as_real(torch.view_as_complex(t.view(-1, 2))),
    "conjugated": lambda t: torch.view_as_complex(t.view(-1, 2)).conj(),
    "imaginary": lambda t: torch.view_as_complex(t.view(-1, 2)).imag,
    "negated": lambda t: torch.view_as_complex(t.view(-1, 2)).conj().imag,
    "integers": lambda t: t.view(torch.int32),
    "shorter": lambda t: t.view(torch.int16),
    "longer": lambda t: t.view(torch.float64)[1:],
    "bytes": lambda t: t.view(torch.uint8)[3:9],
    "of a part": lambda t: t[1:].view(torch.int32)[1:],
}


def returned(view: Callable[[Tensor], Tensor], s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return view(x), x


def kept(view: Callable[[Tensor], Tensor], s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    s.kept = view(x)
    return s.kept, x


def of_weight(view: Callable[[Tensor], Tensor], s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return view(s.model.weight.detach().view(-1)), s.model.weight


def left_by(step: Any, name: str, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    s = SimpleNamespace(model=nn.Linear(4, 4), kept=None)
    run = graphopt.compile(step, pipeline="none") if compiled else step
    left = []
    for _ in range(2):
        view, base = run(VIEWS[name], s, torch.randn(16))
        shares = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        flags = view.is_conj(), view.is_neg(), shares
        values = view.resolve_conj().resolve_neg().contiguous().view(torch.uint8).tolist()
        left.append((view.dtype, view.shape, view.stride(), view.storage_offset(), flags, values))
    return left


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("step", [returned, kept, of_weight])
def test_overlapping_writes(step: Any, name: str) -> None:
    assert left_by(step, name, True) == left_by(step, name, False)
