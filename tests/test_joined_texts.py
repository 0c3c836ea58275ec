"""Texts joined of what only Python computes, and of lists outside that the step changes: everything
compared with eager calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

WORDS = ["one", "two-2", " three", "Four"]
NAMES = {0: "a", 1: "b ", 2: "C", 3: " d"}
Say = Callable[[list[int], Any, int], Any]


def decoded(labels: list[int], s: Any, i: int) -> Any:
    chars = []
    for label in labels:
        chars.append(NAMES[label])
    return "".join(chars), len("".join(chars)), "|".join(tuple(chars))


def methods(labels: list[int], s: Any, i: int) -> Any:
    word = WORDS[labels[0]].strip().lower()
    return word.title(), word.startswith("t"), word.count("o"), word + "!", word.center(9, "*")


def joins_with_others(labels: list[int], s: Any, i: int) -> Any:
    parts: list[str] = []
    for label in labels:
        parts += [WORDS[label], f"{label:03d}", " "]
    return "".join(parts[:-1]), ", ".join(f"{WORDS[k]}={NAMES[k]}" for k in labels)


def appends_what_it_finds(labels: list[int], s: Any, i: int) -> Any:
    s.texts.append(NAMES[labels[0]])
    return "|".join(s.texts), "|".join(s.texts[-2:]), "|".join(tuple(s.texts))


def appends_a_constant(labels: list[int], s: Any, i: int) -> Any:
    s.texts.append("q")
    return "|".join(s.texts)


def prints(labels: list[int], s: Any, i: int) -> Any:
    s.texts.append(f"{labels[0]}")
    print(" ".join(s.texts), "-".join([WORDS[k] for k in labels]))


def another_name_and_parts(labels: list[int], s: Any, i: int) -> Any:
    s.name = s.name + str(i)
    found = list(s.texts)
    s.texts.extend(s.name.split("n"))
    return found


def run(say: Say, kept: str, compiled: bool, calls: int = 4) -> list[Any]:
    torch.manual_seed(0)
    model, s = nn.Linear(3, 4), SimpleNamespace(texts=["a"], name="n")
    s.state = torch.zeros(1) if kept == "object with tensors" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, i: int, given: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, say(model(x).argmax(1).tolist(), s if given is None else given, i)

    taken = graphopt.compile(step, pipeline="none") if compiled else step
    found = []
    for i in range(calls):
        returned = taken(torch.randn(4, 3), i, None if kept == "closure" else s)
        found.append((returned[0].item(), returned[1:], s.name, list(s.texts)))
        if i == 1:
            s.texts.append("between")
    return found


KEPT = ["closure", "object", "object with tensors"]
SAYING = [
    *(decoded, methods, joins_with_others, appends_what_it_finds, appends_a_constant, prints),
    another_name_and_parts,
]


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("say", SAYING, ids=lambda say: say.__name__)
def test_joined_as_in_eager(say: Say, kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = run(say, kept, False), capsys.readouterr().out
    assert (run(say, kept, True), capsys.readouterr().out) == expected


def test_a_number_is_not_joined() -> None:
    numbers = [1, 2, 3, 4]
    with pytest.raises(TypeError, match="expected str instance, int found"):
        run(lambda labels, s, i: "".join([numbers[labels[0]], "a"]), "closure", True)


COMPUTING: dict[str, Callable[[Any], Any]] = {
    "sorted": sorted,
    "text": str,
    "copy": list,
    "joined": "|".join,
    "part": lambda texts: texts[-2:],
    "count": lambda texts: texts.count("x"),
}


@pytest.mark.parametrize("compute", COMPUTING.values(), ids=COMPUTING)
@pytest.mark.parametrize("kept", KEPT)
def test_a_list_whose_texts_are_read_changed_and_computed_of_is_refused(
    compute: Callable[[Any], Any], kept: str
) -> None:
    def say(labels: list[int], s: Any, i: int) -> Any:
        last = s.texts[-1]
        s.texts.append("x")
        return last, compute(s.texts)

    with pytest.raises(CaptureError, match=r"changes and computes of .*texts, and reads"):
        run(say, kept, True)
