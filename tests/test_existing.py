"""Which objects there are before a trace, and Python's collector while a step is captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt._compat.late import holders_of
from graphopt.errors import CaptureError
from graphopt.tracing.outside.existing import existing_kept, existing_now, note_existing
from zoo import train_step


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("collecting", [False, True])
def test_the_second_trace_finds_what_was_made_since_the_first(collecting: bool) -> None:
    gc.disable()
    before = [object]
    with existing_kept():
        note_existing()
        between = [object]
        if collecting:
            gc.collect()  # what is new is old from now on
        first = existing_now()
        after = [object]
        assert before in first
        assert between in first
        assert after not in first
        first.let_go()
        second = existing_now()
        assert before in second
        assert after in second
        assert [object] not in second


def test_storages_that_are_noted_have_no_more_holders() -> None:
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    expected = holders_of(tensor)
    with existing_kept():
        note_existing()
        assert holders_of(tensor) == expected
        assert storage in existing_now()


@pytest.mark.parametrize("enabled", [False, True])
def test_the_collector_is_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    model = nn.Sequential(nn.Linear(3, 2))
    step = graphopt.compile(train_step)
    step(
        model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 3), torch.tensor([0, 1] * 2)
    )
    assert gc.isenabled() is enabled
    with pytest.raises(CaptureError):
        graphopt.compile(_shown)(model, torch.randn(4, 3))
    assert gc.isenabled() is enabled


def _shown(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    repr(loss)
    return loss
