"""Arrays of numpy's that a step makes, and changes by what only the graph knows, or by draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphopt.errors import CaptureError
from tests.test_in_graph import shown_as, trained

Use = Callable[[Any, Tensor, Tensor, Tensor], Any]


def to_categorical(y: Any, count: int) -> Tensor:
    """As InfoGAN has it."""
    y_cat = np.zeros((y.shape[0], count))
    y_cat[range(y.shape[0]), y] = 1.0
    return torch.FloatTensor(y_cat)


def categories(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    target = to_categorical(y.cpu().numpy(), 3)
    return F.binary_cross_entropy_with_logits(scores, target), target


def advantages(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    values, rewards = scores.detach().numpy()[:, 0], x[:, 0].numpy()
    advantage, last = np.zeros_like(values), 0
    for t in reversed(range(7)):
        delta = rewards[t] + 0.99 * values[t + 1] - values[t]
        advantage[t] = last = delta + 0.95 * 0.99 * last
    returns = torch.as_tensor(advantage + values)
    loss = (scores[:, 1] * torch.from_numpy(advantage)).sum() + F.mse_loss(scores[:, 0], returns)
    return loss, advantage


def discounted(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    rewards, running = x[:, 0].numpy(), 0
    found = np.zeros_like(rewards)
    for t in reversed(range(len(rewards))):
        running = running * 0.99 + rewards[t]
        found[t] = running
    found -= np.mean(found)
    found /= np.std(found)
    return (scores[:, 0] * torch.from_numpy(found)).sum(), found


def masked(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    array = scores.detach().numpy().copy()
    other = array
    array[array < 0] = 0
    array[:, 1] *= 2
    array += 1
    array[0] = np.sort(array[0])
    return (scores * torch.from_numpy(array)).sum(), other, array.sum()


def sorted_and_filled(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    array = scores.detach().numpy()[:, 0].copy()
    numbers, filled = array.tolist(), array.copy()
    array.sort()
    numbers.sort()
    numbers[0] += 2.0
    filled.fill(array[0])
    return scores.sum(), array, numbers, filled


def by_a_choice(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    rows = []
    for row in scores.detach().numpy():
        one = np.zeros(3)
        one[np.argmax(row)] = 1
        rows.append(one)
    return (scores * torch.tensor(np.stack(rows)).float()).sum(), rows


def counted(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    table, chosen = np.zeros((3, 3), dtype=int), scores.detach().numpy().argmax(1)
    for i in range(8):
        table[y[i], chosen[i]] += 1
    return scores.sum(), table, table.trace()


def numbers_of_it(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    array, values = np.zeros(8), scores.detach().numpy()
    array[3] = values.max()
    before = array[3]
    array[3] += 1
    array[2], array[4] = before, array[3]
    return (scores[:, 0] * torch.from_numpy(array).float()).sum(), array, before


def copies_on_the_way(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    array, kept, values = np.zeros(3), [], scores.detach().numpy()
    for i in range(3):
        array[i] = values[i, 0]
        kept += [array.copy(), torch.tensor(array), array.sum(), array]
    return scores.sum(), kept


def of_other_types(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    whole, values = np.zeros(3, dtype=int), scores.detach().numpy()
    whole[0], whole[2] = values.max() * 10, int(values[0, 0] * 100)
    single = np.zeros(3, np.float32)
    for row in values.astype(np.float64):
        single += row
    return scores.sum(), whole, single


def cut_out(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    mask = np.ones((8, 4), np.float32)
    for _ in range(2):
        row, column = np.random.randint(8), np.random.randint(4)
        low, high = np.clip(row - 1, 0, 8), np.clip(row + 1, 0, 8)
        mask[low:high, np.clip(column - 1, 0, 4) : column + 1] = 0.0
    return model(x * torch.from_numpy(mask).expand_as(x)).sum(), mask


def chosen_anew(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    mask = np.zeros((8, 3), dtype=bool)
    for row in range(8):
        mask[row, np.random.choice(3, 2, replace=False)] = True
    return (scores * torch.from_numpy(mask).float()).sum(), mask


ALL: tuple[Use, ...] = (
    *(categories, advantages, discounted, masked, sorted_and_filled, by_a_choice, counted),
    *(numbers_of_it, copies_on_the_way, of_other_types, cut_out, chosen_anew),
)


@pytest.mark.parametrize("use", ALL, ids=lambda use: use.__name__)
def test_it_is_as_in_eager_code(use: Use) -> None:
    np.random.seed(0)
    eager, _ = trained(use, compiled=False)
    np.random.seed(0)
    found, step = trained(use, compiled=True)
    assert shown_as(found) == shown_as(eager)
    assert len(step.captures) == 1


def a_view_from_before(highest: Any) -> Any:
    array = np.zeros((2, 3))
    row = array[0]
    array[0, 0] = highest
    return row


def a_view_from_between(highest: Any) -> Any:
    array = np.zeros((2, 3))
    array[0, 0] = highest
    row = array[0]
    array[0, 1] = 5.0
    return row


def another_name(highest: Any) -> Any:
    array = other = np.zeros(3)
    array[0] = highest
    return other


def in_a_list(highest: Any) -> Any:
    arrays = [np.zeros(3)]
    arrays[0][1] = highest
    return arrays[0]


def of_another_array(highest: Any) -> Any:
    flat = np.zeros(6)
    array = flat.reshape(2, 3)
    array[0, 0] = highest
    return flat


def by_another_function(highest: Any) -> Any:
    array = np.zeros(3)

    def put(there: Any) -> None:
        there[0] = highest

    put(array)
    return array


def behind_its_tensor(highest: Any) -> Any:
    array = np.zeros(3)
    array[0] = highest
    tensor = torch.from_numpy(array)
    total = tensor.square() + torch.ones(3)
    array[1] = 5.0
    return total + tensor


def into_another(highest: Any) -> Any:
    array = np.zeros(3)
    np.add(array, highest, out=array)
    return array


REFUSED = (
    *(a_view_from_before, a_view_from_between, another_name, in_a_list, of_another_array),
    *(by_another_function, behind_its_tensor, into_another),
)


@pytest.mark.parametrize("use", REFUSED, ids=lambda use: use.__name__)
def test_what_has_the_array_elsewhere_is_refused(use: Callable[[Any], Any]) -> None:
    def step(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
        return scores.sum(), use(scores.detach().numpy().max())

    with pytest.raises(CaptureError, match=r"array|in place") as refused:
        trained(step, compiled=True)
    assert refused.value.hint
