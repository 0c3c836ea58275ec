"""Arrays of numpy's that a step makes, and changes by what only the graph knows, or by draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
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


def by_functions(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    """Of numpy's, that change their first argument, as spinningup's averages over processes do."""
    array = np.zeros_like(scores.detach().numpy())
    np.copyto(array, scores.detach().numpy())
    np.putmask(array, array < 0, -array)
    np.add.at(array, (y.numpy(), 0), 1)
    noise = np.random.rand(3, 3)
    drawn = np.zeros_like(noise)
    np.copyto(drawn, noise)
    np.fill_diagonal(drawn, 0)
    return (scores * torch.from_numpy(array)).sum(), array, drawn


ALL: tuple[Use, ...] = (
    *(categories, advantages, discounted, masked, sorted_and_filled, by_a_choice, counted),
    *(numbers_of_it, copies_on_the_way, of_other_types, cut_out, chosen_anew, by_functions),
)


@pytest.mark.parametrize("use", ALL, ids=lambda use: use.__name__)
def test_it_is_as_in_eager_code(use: Use) -> None:
    np.random.seed(0)
    eager, _ = trained(use, compiled=False)
    np.random.seed(0)
    found, step = trained(use, compiled=True)
    assert shown_as(found) == shown_as(eager)
    assert len(step.captures) == 1


def returns(model: Any, x: Any) -> Any:
    rewards, running = x[:, 0], 0
    found = np.zeros_like(rewards)
    for t in reversed(range(8)):
        running = running * 0.99 + rewards[t]
        found[t] = running
    found -= found.mean()
    found /= found.std()
    return (model(torch.from_numpy(x))[:, 0] * torch.from_numpy(found)).sum(), found


def advantages_of_arrays(model: Any, x: Any) -> Any:
    scores, rewards = model(torch.from_numpy(x)), x[:, 0]
    values, last = scores.detach().numpy()[:, 0], 0
    found = np.zeros_like(rewards)
    for t in reversed(range(7)):
        found[t] = last = rewards[t] + 0.99 * values[t + 1] - values[t] + 0.9 * last
    return (scores[:, 1] * torch.from_numpy((found - found.mean()) / found.std())).sum(), found


def noise(model: Any, x: Any) -> Any:
    drawn = np.random.randn(8, 4).astype(np.float32)
    row = drawn[1]
    drawn[0] = 0
    drawn *= 0.1
    drawn[np.random.rand(8) < 0.5] = 1
    drawn += x
    return model(torch.from_numpy(drawn)).sum(), row.sum()


def read_before_and_behind(model: Any, x: Any) -> Any:
    column = x[:, 0].copy()
    first, second, part = column[0], float(column[1]), column[:2]
    column[0], column[1] = 7, 8
    return (model(torch.from_numpy(x)) * first * second).sum(), first, second, part.sum()


def a_tensor_of_a_copy(model: Any, x: Any) -> Any:
    own = x.copy()
    tensor = torch.tensor(own)
    own[0] = 1
    return model(tensor).sum() + torch.from_numpy(own).sum()


def windows_drawn(model: Any, x: Any) -> Any:
    """As the decision transformer draws batches."""
    begin = np.random.randint(0, 9)
    steps = np.arange(begin, begin + 4).reshape(1, -1)
    steps[steps >= 10] = 9
    padded = np.concatenate([np.zeros((1, 2)), steps], axis=1)
    return (model(torch.from_numpy(x)).sum() * torch.from_numpy(padded)).sum(), padded


GIVEN: tuple[Callable[[Any, Any], Any], ...] = (
    *(returns, advantages_of_arrays, noise, read_before_and_behind, a_tensor_of_a_copy),
    *(windows_drawn,),
)


def trained_on_arrays(use: Callable[[Any, Any], Any], compiled: bool) -> tuple[list[Any], Any]:
    """The same with arrays among the arguments."""
    numbers = np.random.RandomState(3)
    np.random.seed(0)

    def step(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
        return use(model, numbers.randn(8, 4).astype(np.float32))

    if not compiled:
        return trained(step, compiled=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    @graphopt.compile
    def captured(x: Any) -> Any:
        found = use(model, x)
        loss = found[0] if isinstance(found, tuple) else found
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return found

    seen: list[Any] = []
    for _ in range(5):
        torch.randn(8, 4), torch.randint(0, 3, (8,))
        given = numbers.randn(8, 4).astype(np.float32)
        before = given.copy()
        seen.append(captured(given))
        seen.append([p.detach().clone() for p in model.parameters()])
        assert (given == before).all()
    return [*seen, torch.get_rng_state()], captured


@pytest.mark.parametrize("use", GIVEN, ids=lambda use: use.__name__)
def test_arrays_that_are_known_before_are_changed_as_by_numpy(use: Callable[..., Any]) -> None:
    eager, _ = trained_on_arrays(use, compiled=False)
    found, step = trained_on_arrays(use, compiled=True)
    assert shown_as(found) == shown_as(eager)
    assert len(step.captures) == 1


def a_tensor_in_its_memory(model: Any, x: Any) -> Any:
    own = np.random.randn(8, 4).astype(np.float32)
    tensor = torch.from_numpy(own)
    scores = model(tensor)
    own[0] = 1
    return scores.sum() + tensor.sum()


def by_the_graph_with_a_view(model: Any, x: Any) -> Any:
    own = np.random.randn(8, 4).astype(np.float32)
    row, scores = own[0], model(torch.from_numpy(x))
    own[0, 0] = scores.detach().numpy().max()
    return scores.sum(), row


@pytest.mark.parametrize("use", [a_tensor_in_its_memory, by_the_graph_with_a_view])
def test_what_lies_in_a_known_array_is_refused(use: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match="writes into it"):
        trained_on_arrays(use, compiled=True)


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
