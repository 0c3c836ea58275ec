"""Pages whose examples need something that their text takes for granted: each block runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


class Summed(nn.Linear):
    """Returns a loss."""

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch).sum()


def test_iterations() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    names: dict[str, Any] = {"torch": torch, "model": model, "loader": [(torch.ones(4, 3), 0)] * 3}
    step, reading = blocks("iterations.md")
    exec(step, names)
    summed = graphopt.compile(names["train_step"])
    other = Summed(3, 2)
    loss = summed(other, torch.optim.SGD(other.parameters(), lr=0.1), torch.ones(4, 3))
    assert loss.shape == ()

    @graphopt.compile
    def train_step(model: nn.Module, optimizer: Any, inputs: Tensor, targets: int) -> None:
        (model(inputs).sum() - targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    exec(reading, {**names, "optimizer": optimizer, "train_step": train_step})
    assert all(bool((p.abs() <= 1).all()) for p in model.parameters())


def test_verification(capsys: pytest.CaptureFixture[str]) -> None:
    (listing,) = blocks("verification.md")
    exec(listing, {})
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_the_tests_that_pages_name_are_there() -> None:
    for page in sorted(DOCS.glob("*.md")):
        for name in re.findall(r"\btest_\w+\b(?=`|\.py)", page.read_text()):
            own = name == "test_my_passes"  # The file that a reader writes.
            assert own or (Path(__file__).parent / f"{name}.py").exists(), (page.name, name)
