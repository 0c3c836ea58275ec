# ruff: noqa: UP031, UP032 - texts are made as people make them
"""What a step computes in Python of what the graph gives: windows over lists, texts, arrays."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Effect = Callable[[Any, Tensor, Tensor], Any]


def windows(kept: Any, loss: Tensor, x: Tensor) -> Any:
    kept.rows.append(loss.item())
    kept.mean = np.mean(kept.rows[-3:])
    kept.others = [sum(kept.rows[-2:]) / 2, statistics.mean(kept.rows), np.array(kept.rows).std()]
    kept.sorted = sorted(kept.rows)[len(kept.rows) // 2]
    return max(kept.rows[-3:]), np.percentile(kept.rows, 90), int(np.argmin(kept.rows))


def smoothed(kept: Any, loss: Tensor, x: Tensor) -> Any:
    kept.queue.append(loss.item())
    values = torch.tensor(list(kept.queue), dtype=torch.float32)
    kept.median, kept.mean = values.median().item(), np.mean(kept.queue)
    return kept.queue[-1], f"{values.mean().item():.4f}"


def decided(kept: Any, loss: Tensor, x: Tensor) -> Any:
    kept.rows.append(loss.item())
    if len(kept.rows) > 3 and all(row > kept.rows[-1] for row in kept.rows[-3:-1]):
        kept.count += 1
    if kept.rows[-1] > np.mean(kept.rows[-3:]) + 0.01:
        kept.best = np.mean(kept.rows[-2:])
    return len(kept.rows) > 1 and kept.rows[-1] > min(kept.rows[:-1])


def emptied(kept: Any, loss: Tensor, x: Tensor) -> None:
    kept.rows.append(loss.item())
    if len(kept.rows) == 3:
        kept.mean = sum(kept.rows) / len(kept.rows)
        kept.rows.clear()


def emptied_when_full(kept: Any, loss: Tensor, x: Tensor) -> None:
    kept.queue.append(loss.item())
    if len(kept.queue) == kept.queue.maxlen and sum(kept.queue) / len(kept.queue) > 0.2:
        kept.count += 1
        kept.queue.clear()


def texts(kept: Any, loss: Tensor, x: Tensor) -> Any:
    text = f"{loss.item():.3f}"
    kept.padded = [f"{text:>12}|", text.ljust(12), "%-9s|" % text, f"{text!r:>14}", f"{loss:.2f}"]
    kept.split = [*text.split("."), text[:3], len(text), text.startswith("0")]
    kept.joined = ", ".join(f"{name}={value:.2f}" for name, value in {"a": loss.item()}.items())
    kept.nested = str({"loss": loss.item(), "text": text}) + json.dumps({"loss": loss.item()})
    kept.table[f"step{kept.count}"] = f"{kept.count}/{len(kept.rows)} {loss.item()!r:>25}"
    kept.rows.append("loss %.3f after %d" % (loss.item(), kept.count))
    kept.count = 1 - kept.count
    return "{:.4f} {}".format(loss.item(), 3), float(text) * 2, text == "0.416"


def letters(kept: Any, loss: Tensor, x: Tensor) -> Any:
    """What goes through a text sees the letters of this call, and not what stands for it."""
    text = f"{loss.item():.2f}"
    kept.listed = [*text, *enumerate(text), *(letter for letter in text), *list(text), *tuple(text)]
    kept.reversed = "".join(reversed(text))
    kept.largest = max(*text)
    kept.rows.extend(text)
    first, *others = text
    return first, others, [text] == ["0.42"], (text, 1) < ("0.3", 2), {"a": text} == {"a": "0.42"}


def added_up(kept: Any, loss: Tensor, x: Tensor) -> None:
    """What the step finds in a place where it leaves such a value is not a constant."""
    kept.rows.append(loss.item())
    kept.count += len(str(loss.item()))
    kept.best = 0.9 * kept.best + 0.1 * statistics.mean(kept.rows)


def kept_in_numpys(kept: Any, loss: Tensor, x: Tensor) -> Any:
    """A place in which one of numpy's floats is left becomes an input, which is one as well."""
    kept.rows.append(loss.item())
    mean = np.mean(kept.rows[-3:])
    kept.best = max(kept.best, mean)
    kept.table["sum"] = 0.5 * kept.table.get("sum", 1.0) + 0.5 * mean
    if kept.first is None or mean < kept.first:
        kept.first = mean
    scaled = x * kept.scale
    kept.scale = np.tanh(mean) + kept.scale
    graphopt.callback(kept.others.append, [mean, kept.best, f"{mean:.2f}"])
    return kept.best, f"{kept.best} {kept.first!r}", scaled, 1 / kept.best


def kept_in_a_module(kept: Any, loss: Tensor, x: Tensor) -> Any:
    kept.rows.append(loss.item())
    mean, model = np.mean(kept.rows[-3:]), kept.model
    model.best = 0.5 * model.best + mean
    if model.first is None or mean < model.first:
        model.first = mean
    risen = model.best > model.first
    return math.exp(mean), math.floor(model.best), math.isnan(mean), risen, model.best == model.best


def in_dictionaries(kept: Any, loss: Tensor, x: Tensor) -> Any:
    kept.rows.append(loss.item())
    values = {"mean": np.mean(kept.rows), "value": f"{loss.item():.3f}"}
    kept.others += [*values, [f"{name}={value}" for name, value in values.items()]]
    text = "{mean:.3f} {value}".format(**values) + "{value}".format_map(values)
    mean, other = [np.mean(kept.rows[-2:]), loss.item()]
    return {**values, "text": text}, dict(values, more=1), mean, other


def arrays(kept: Any, loss: Tensor, x: Tensor) -> Any:
    found, wanted = x.argmax(1).numpy(), x.argmin(1).cpu().numpy()
    for one, other in zip(wanted, found, strict=True):
        kept.confusion[one, other] += 1
    kept.confusion += np.bincount(wanted * 4 + found, minlength=16).reshape(4, 4)
    np.add.at(kept.confusion, (wanted, found), 1)
    kept.numbers[0] += loss.item()
    kept.numbers[1:4] += x.numpy().mean(0)[:3]
    kept.rows.extend(found.tolist())
    kept.rows.append(x.square().numpy())
    kept.double = (x * 2).numpy()
    torch.from_numpy(kept.double).add_(1)
    kept.accuracy = np.diag(kept.confusion).sum() / kept.confusion.sum()
    return (found == wanted).mean(), found


def reads_before(kept: Any, loss: Tensor, x: Tensor) -> None:
    kept.before = kept.numbers.sum()
    kept.numbers[0] = loss.item()


def accuracy_in_numpy(kept: Any, loss: Tensor, x: Tensor) -> Any:
    """As the tutorial on BERT by McCormick has it."""
    scores, wanted = x.detach().cpu().numpy(), x[:, 0].abs().long().numpy()
    found = np.argmax(scores, axis=1).flatten()
    kept.best += np.sum(found == wanted.flatten()) / len(wanted)
    heat = scores.reshape((scores.shape[0], scores.shape[1] // 2, -1))
    return heat.max(2), kept.best


def adds_to_an_array_with_two_names(kept: Any, loss: Tensor, x: Tensor) -> None:
    one = other = np.array([loss.item(), 1.0])
    one += 1
    kept.rows.append(other)


def is_a_key(kept: Any, loss: Tensor, x: Tensor) -> None:
    kept.table[f"{loss.item():.1f}"] = 1


def run(effect: Effect, compiled: bool) -> tuple[list[str], int]:
    """What each call gives and leaves, as text, and how many graphs there are."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = SimpleNamespace(rows=[], queue=deque(maxlen=3), count=0, table={}, best=0.0)
    kept.confusion, kept.numbers = np.zeros((4, 4), dtype=np.int64), np.zeros(5)
    kept.model = nn.Identity()
    kept.model.best, kept.model.first = 0.0, None
    kept.hist, kept.others, kept.first, kept.scale = defaultdict(list), [], None, np.float64(0.5)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), effect(kept, loss, x)

    used: Any = graphopt.compile(step) if compiled else step
    found = [f"{used(x)!r} {kept!r} {vars(kept.model)}" for x in torch.randn(7, 5, 4)]
    return [*found, repr(model.weight)], len(used.captures) if compiled else 0


def rows_in_numpy(kept: Any, loss: Tensor, x: Tensor) -> Any:
    """Those of a plot, as a learning loss for active learning has it."""
    row = [loss.item(), 2]
    kept.others.append(row)
    whole = np.array(kept.others)
    row[1] = 3
    if len(kept.others) > 3:
        kept.others.pop(0)
    kept.rows.append(np.mean(kept.others, axis=0))
    return whole, np.std(kept.others)


CAPTURES = {
    rows_in_numpy: 2,
    windows: 2,
    smoothed: 2,
    decided: 7,
    emptied: 2,
    emptied_when_full: 4,
    texts: 4,
    letters: 4,
    added_up: 2,
    kept_in_numpys: 4,
    kept_in_a_module: 4,
    in_dictionaries: 2,
    arrays: 1,
    reads_before: 2,
    accuracy_in_numpy: 2,
    adds_to_an_array_with_two_names: 2,
    is_a_key: 1,
}


@pytest.mark.parametrize("effect", CAPTURES)
def test_it_is_what_eager_code_computes(effect: Effect) -> None:
    expected, _ = run(effect, False)
    found, captures = run(effect, True)
    assert found == expected
    assert captures <= CAPTURES[effect]


def writes_to_its_tensor(kept: Any, loss: Tensor, x: Tensor) -> None:
    double = x * 2
    array = double.numpy()
    double.add_(1)
    kept.rows.append(array.sum())


def is_a_key_of_a_new_table(kept: Any, loss: Tensor, x: Tensor) -> None:
    kept.table["last"] = {f"{loss.item():.1f}": 1}


def is_called_in_c(kept: Any, loss: Tensor, x: Tensor) -> None:
    kept.rows.append(sorted([f"{loss.item():.1e}"], key=str.upper))


def asks_for_letters_in_c(kept: Any, loss: Tensor, x: Tensor) -> None:
    kept.rows.append(max(f"{loss.item():.1f}", key=str.isdigit))


def adds_to_a_text(kept: Any, loss: Tensor, x: Tensor) -> None:
    kept.table["all"] = kept.table.get("all", "") + f"{loss.item():.1f}"


def computes_with_tensors(kept: Any, loss: Tensor, x: Tensor) -> Any:
    kept.rows.append(loss.item())
    return x * np.mean(kept.rows[-2:])


def shows_a_gradient(kept: Any, loss: Tensor, x: Tensor) -> Any:
    return str(loss.detach().requires_grad_())


REFUSED = {
    writes_to_its_tensor: "in whose memory an array lies",
    is_a_key_of_a_new_table: "is a key",
    is_called_in_c: "computes it of a method",
    asks_for_letters_in_c: "computes it of a method",
    adds_to_a_text: "and then puts a text",
    computes_with_tensors: "tensors of the graph",
    shows_a_gradient: "autograd knows",
}


@pytest.mark.parametrize("effect", REFUSED)
def test_what_is_not_exact_is_refused(effect: Effect) -> None:
    with pytest.raises(CaptureError, match=REFUSED[effect]):
        run(effect, True)


def test_a_failed_step_keeps_nothing() -> None:
    def fails(kept: Any, loss: Tensor, x: Tensor) -> None:
        kept.rows.append(loss.item())
        kept.mean = statistics.mean(kept.rows)
        if kept.fails:
            raise ValueError(f"no {loss.item():.2f}")

    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    kept = SimpleNamespace(rows=[1.0], mean=0.0, fails=True)

    @graphopt.compile
    def step(x: Tensor) -> None:
        loss = (weight * x).sum()
        loss.backward()
        fails(kept, loss, x)
        optimizer.step()

    with pytest.raises((ValueError, CaptureError)):
        step(torch.ones(2))
    assert kept.rows == [1.0] and kept.mean == 0.0 and weight.tolist() == [1.0, 1.0]
