"""Tensors that a step makes of what Python computes of values of the graph."""

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
from graphopt.host.computed import ComputedTensor

Use = Callable[[Any, Tensor, Tensor, Tensor], Any]
"""A loss of the model, a batch, its classes and the scores of the model; and what it shows."""


def weighted(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    weights = scores.detach().numpy() ** 2
    return (scores * torch.from_numpy(weights / weights.sum())).sum()


def labels(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    return F.cross_entropy(scores, torch.LongTensor(scores.detach().numpy().argmax(1)))


def of_one_row_each(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    chosen = [np.argmax(row) for row in F.softmax(scores, -1).detach().numpy()]
    return F.nll_loss(F.log_softmax(scores, -1), torch.tensor(np.array(chosen)))


def numbers(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    array = scores.detach().numpy()
    spread, mean, above = np.std(array), float(np.mean(array)), int((array > 0).sum())
    return spread * F.cross_entropy(scores, y) + mean * scores.sum() * above / 24, above


def tensors_of_numbers(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    array = scores.detach().numpy()
    high, low = torch.tensor(array.max()), torch.as_tensor(float(array.min()))
    return (scores * high + low * torch.Tensor([float(array.mean())])).sum(), high, low


def taken_by_an_array(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    order = np.argsort(scores.detach().numpy()[:, 0])[:4]
    return F.cross_entropy(scores[order], y[order])


def set_by_an_array(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    array, mask = scores.detach().numpy(), torch.zeros(8)
    mask[np.argsort(array[:, 0])[:4]] = 1.0
    mask[array[:, 1].argmax()] = float(array.max())
    return (F.cross_entropy(scores, y, reduction="none") * mask).sum()


def advantages(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    values, rewards, found, last = scores.detach().numpy()[:, 0], x[:, 0].numpy(), [], 0.0
    for t in reversed(range(7)):
        delta = rewards[t] + 0.99 * values[t + 1] - values[t]
        found.insert(0, last := delta + 0.95 * 0.99 * last)
    advantage = torch.tensor(np.array(found, dtype=np.float32))
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return (scores[:7, 1] * advantage).mean()


def clusters(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    features = model[0](x).detach().numpy()
    centres = features[:2]
    for _ in range(3):
        nearest = ((features[:, None] - centres[None]) ** 2).sum(-1).argmin(1)
        rows = [features[nearest == k] for k in range(2)]
        centres = np.stack([rows[k].mean(0) if len(rows[k]) else centres[k] for k in range(2)])
    return F.cross_entropy(scores[:, :2], torch.from_numpy(nearest))


def given_to_a_model(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    noisy = x.numpy() * 2 + 1
    return F.cross_entropy(model(torch.from_numpy(noisy)), y), noisy


def asked_for_its_shape(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    made = torch.from_numpy(np.abs(scores.detach().numpy()))
    zeros = torch.zeros(made.shape[0], made.size(1)) + torch.zeros_like(made)
    known = isinstance(made, Tensor) and torch.is_tensor(made)
    return (scores * made + zeros).sum() * (2.0 if known else 3.0), made


def computed_on(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    made = torch.from_numpy(scores.detach().numpy() + 1)
    other = made.clone()
    other.zero_()
    return (scores * (made + other)).sum(), made, made.double(), {"sum": made.sum().item()}


def view_beside_its_array(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    array = scores.detach().numpy() * 2
    return (scores[0] * torch.from_numpy(array[0])).sum(), array.sum(), array


def decided_by(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    made = torch.from_numpy(np.abs(scores.detach().numpy()))
    return (scores * made).sum() if (made > 1.0).any() else scores.sum()


def of_another_length(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    kept = torch.from_numpy(np.nonzero(scores.detach().numpy()[:, 0] > 0.2)[0])
    return scores[kept].sum() / 8, len(kept)


def lengths_of_a_packed_sequence(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    """As Tacotron 2 packs its texts."""
    lengths = torch.tensor([4, 4, 3, 3, 2, 2, 1, 1]).cpu().numpy()
    packed = nn.utils.rnn.pack_padded_sequence(scores[:, None] * x[..., None], lengths, True)
    return packed.data.square().sum() * torch.from_numpy(np.abs(scores.detach().numpy())).sum()


def of_tensors_of_one_element(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    """As rewards are put together in lists."""
    targets = [x[i, 0] + 0.9 * scores.detach()[i].max(0, keepdim=True)[0] for i in range(8)]
    made = torch.tensor(targets).view(8, 1)
    return F.mse_loss(scores[:, :1], made) * float(scores.detach().numpy().std()), made


def behind_draws(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
    dropped = F.dropout(scores, 0.5)
    made = torch.from_numpy(np.abs(dropped.detach().numpy()))
    return (F.dropout(scores, 0.3) * made).sum()


ALL: tuple[Use, ...] = (
    *(weighted, labels, of_one_row_each, numbers, tensors_of_numbers, taken_by_an_array),
    *(set_by_an_array, advantages, clusters, given_to_a_model, asked_for_its_shape, computed_on),
    *(view_beside_its_array, decided_by, of_another_length, behind_draws),
    *(lengths_of_a_packed_sequence, of_tensors_of_one_element),
)


def trained(use: Use, compiled: bool) -> tuple[list[Any], Any]:
    """What five calls give and leave, and the compiled step."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Any:
        found = use(model, x, y, model(x))
        loss = found[0] if isinstance(found, tuple) else found
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return found

    used: Any = graphopt.compile(step) if compiled else step
    seen = []
    for _ in range(5):
        seen.append(used(torch.randn(8, 4), torch.randint(0, 3, (8,))))
        seen.append([p.detach().clone() for p in model.parameters()])
    return [*seen, torch.get_rng_state()], used


def shown_as(value: Any) -> Any:
    """All bits of a nest, and of which classes it is."""
    if isinstance(value, (list, tuple)):
        return [type(value), *map(shown_as, value)]
    if isinstance(value, dict):
        return {key: shown_as(each) for key, each in value.items()}
    if isinstance(value, Tensor):
        return shown_as(value.detach().numpy())
    of_numpy = isinstance(value, (np.ndarray, np.generic))
    return (value.dtype, value.shape, value.tobytes()) if of_numpy else repr(value)


@pytest.mark.parametrize("use", ALL, ids=lambda use: use.__name__)
def test_it_is_as_in_eager_code(use: Use) -> None:
    eager, _ = trained(use, compiled=False)
    found, step = trained(use, compiled=True)
    assert shown_as(found) == shown_as(eager)
    assert len(step.captures) == 1 or use in (decided_by, of_another_length)
    targets = [node.target for node in step.graph_module.graph.nodes]
    assert use is decided_by or any(isinstance(target, ComputedTensor) for target in targets)


def test_what_is_only_shown_is_no_node() -> None:
    def shown(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
        made = torch.tensor(np.unique(scores.detach().numpy().round(1)))
        return scores.square().mean(), made.mean().item(), made

    eager, _ = trained(shown, compiled=False)
    found, step = trained(shown, compiled=True)
    assert shown_as(found) == shown_as(eager)
    assert len(step.captures) == 1  # of whatever length
    targets = [node.target for node in step.graph_module.graph.nodes]
    assert not any(isinstance(target, ComputedTensor) for target in targets)


def written(made: Tensor) -> Tensor:
    row = made.view(-1)
    made.add_(1.0)
    return row.sum()


def asked_for_a_gradient(made: Tensor) -> Tensor:
    return made.requires_grad_()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "written": (written, "tensor.clone()"),
    "a gradient": (asked_for_a_gradient, "tensor.clone()"),
    "made with one": (lambda made: torch.tensor(made.numpy(), requires_grad=True) * 1, "Python"),
}


@pytest.mark.parametrize(("use", "hint"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_exact_is_refused(use: Callable[[Any], Any], hint: str) -> None:
    def step(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
        made = torch.from_numpy(scores.detach().numpy() * 2)
        return scores.sum() + use(made).sum()

    with pytest.raises(CaptureError, match=r"test_in_graph.py") as refused:
        trained(step, compiled=True)
    assert hint in str(refused.value)


def test_a_memory_that_is_written_behind_is_refused() -> None:
    def step(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
        shared = scores.detach().clone()
        made = torch.from_numpy(shared.numpy()[1:])
        shared.mul_(2.0)
        return (scores[1:] * made).sum()

    with pytest.raises(CaptureError, match="in whose memory an array lies"):
        trained(step, compiled=True)


def test_a_list_that_the_step_keeps_does_not_come_back() -> None:
    kept: list[float] = []

    def step(model: Any, x: Tensor, y: Tensor, scores: Tensor) -> Any:
        kept.append(scores.mean().item())
        return (scores * torch.tensor(kept[-5:]).mean()).sum()

    with pytest.raises(CaptureError, match="of a list that it changes"):
        trained(step, compiled=True)
