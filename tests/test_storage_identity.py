"""Questions for the identity of a storage, which another one stands for while a step is traced."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from operator import attrgetter, methodcaller
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import graphopt

Asked = Callable[[list[torch.Tensor]], int]

ADDRESS = torch.UntypedStorage.data_ptr
OF_STORAGE = {
    "data_ptr": methodcaller("data_ptr"),
    "a bound method": lambda storage: storage.data_ptr(),
    "a function of the class": ADDRESS,
    "a partial function": lambda storage: functools.partial(ADDRESS, storage)(),
    "getattr": lambda storage: getattr(storage, "data_" + "ptr")(),
    "_cdata": attrgetter("_cdata"),
    "id": lambda storage: id(storage),
    "hash": lambda storage: hash(storage),
    "_weak_ref": methodcaller("_weak_ref"),
    "a weak reference": lambda storage: StorageWeakRef(storage),
}
"""Ways to ask for the identity of one storage."""

TO_STORAGE = {
    "untyped_storage": methodcaller("untyped_storage"),
    "a function of the class": torch.Tensor.untyped_storage,
    "typed": methodcaller("_typed_storage"),
}
"""Ways to come to the storage of a tensor."""

WAYS: dict[str, Callable[[Callable[..., Any], Iterable[Any]], int]] = {
    "map": lambda ask, storages: len(set(map(ask, storages))),
    "comprehension": lambda ask, storages: len({ask(storage) for storage in storages}),
    "key": lambda ask, storages: len(list(itertools.groupby(storages, key=ask))),
    "container": lambda ask, storages: len(dict.fromkeys(map(ask, storages), 1)),
}
"""Ways to ask for that of several."""


class Tied(nn.Module):
    """Two layers with one weight, and two parameters that are parts of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight
        both = torch.randn(8)
        self.scale, self.shift = nn.Parameter(both[:4]), nn.Parameter(both[4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x)) * self.scale + self.shift


def trained(asked: Asked, captured: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OUTSIDE.clear()
    OUTSIDE.update(dict.fromkeys(map(id, model.parameters()), 3))
    OUTSIDE.update({hash(model.scale): 5})

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        number = asked([*model.parameters(), model.other.weight, x, x[1:], hidden, hidden[0]])
        loss = hidden.square().mean() * number
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = graphopt.compile(step) if captured else step
    losses = [run(x).detach() for _ in range(2)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


OUTSIDE: dict[int, int] = {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to_storage", TO_STORAGE)
@pytest.mark.parametrize("ask", OF_STORAGE)
@pytest.mark.filterwarnings("ignore")
def test_the_identity_of_a_storage_is_refused(ask: str, to_storage: str, way: str) -> None:
    def asked(tensors: list[torch.Tensor]) -> int:
        return WAYS[way](OF_STORAGE[ask], map(TO_STORAGE[to_storage], tensors))

    if to_storage == "typed" and ask in ("a function of the class", "a partial function"):
        pytest.skip("of another class")
    with pytest.raises(graphopt.CaptureError, match="where the memory of a tensor is") as refusal:
        trained(asked, captured=True)
    assert "test_storage_identity.py" in str(refusal.value.location)
    assert "or by id(tensor)" in str(refusal.value.hint)


REFUSED: dict[str, tuple[Asked, str]] = {
    "storages as keys": (lambda ts: len({t.untyped_storage() for t in ts}), "where the memory"),
    "in C++": (lambda ts: len(set(map(attrgetter("_cdata"), ts))), "where the memory"),
    "a version": (lambda ts: ts[0]._version + 1, "how often a tensor has been written"),
    "versions": (lambda ts: sum(map(attrgetter("_version"), ts)), "how often a tensor has been"),
    "shared memory": (lambda ts: int(ts[-1].share_memory_().ndim), "memory that processes share"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_what_it_is(name: str) -> None:
    asked, reason = REFUSED[name]
    with pytest.raises(graphopt.CaptureError, match=reason):
        trained(asked, captured=True)


EQUAL: dict[str, Asked] = {
    "is": lambda ts: sum(a.untyped_storage() is b.untyped_storage() for a in ts for b in ts),
    "nbytes": lambda ts: sum(t.untyped_storage().nbytes() for t in ts),
    "nbytes by map": lambda ts: sum(map(methodcaller("nbytes"), map(TO_STORAGE["typed"], ts))),
    "size": lambda ts: sum(map(len, map(methodcaller("untyped_storage"), ts))),
    "ids of tensors": lambda ts: sum(OUTSIDE.get(each, 7) for each in map(id, ts)),
    "an id of a tensor": lambda ts: OUTSIDE.get(id(ts[0]), 7),
    "hashes of tensors": lambda ts: sum(OUTSIDE.get(each, 7) for each in map(hash, ts)),
    "a hash of a tensor": lambda ts: OUTSIDE.get(hash(ts[1]), 7),
    "partial id": lambda ts: sum(OUTSIDE.get(functools.partial(id, t)(), 7) for t in ts),
    "keys": lambda ts: len(OUTSIDE.keys() & set(map(id, ts))),
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.filterwarnings("ignore")
def test_what_a_step_may_ask(name: str) -> None:
    found, expected = (trained(EQUAL[name], captured) for captured in (True, False))
    assert all(map(torch.equal, found, expected))
