"""Containers of parameters and state that finish work in flight before they answer."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from graphopt.watching import Watch, unwatched


class Scene:
    """A model and its optimizer, watched; `finished` counts how often somebody looked."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2), nn.BatchNorm1d(2))
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        self.model[1](self.model[0](torch.ones(1, 2)))[0].sum().backward()
        self.scheduler = ExponentialLR(self.optimizer, 0.5)
        self.optimizer.step()
        self.finished = 0
        self.watch = Watch(self.model.modules(), [self.optimizer], self._finish)

    def _finish(self) -> bool:
        self.finished += 1
        return True

    @property
    def layer(self) -> nn.Linear:
        layer = vars(self.model)["_modules"]["0"]
        assert isinstance(layer, nn.Linear)
        return layer


READERS: dict[str, Callable[[Scene], object]] = {
    "parameters": lambda s: list(s.model.parameters()),
    "named_parameters": lambda s: dict(s.model.named_parameters()),
    "state_dict": lambda s: s.model.state_dict(),
    "load_state_dict": lambda s: s.model[0].load_state_dict(s.model[0].state_dict()),
    "attribute": lambda s: s.layer.weight,
    "assigned attribute": lambda s: setattr(s.layer, "bias", None),
    "registration": lambda s: s.layer.register_parameter("more", nn.Parameter(torch.ones(1))),
    "layer called": lambda s: s.layer(torch.ones(1, 2)),
    "recurrent layer called": lambda s: s.model[1](torch.ones(1, 2)),
    "buffers": lambda s: list(s.model.buffers()),
    "dict of the table": lambda s: dict(s.layer._parameters),
    "unpacked table": lambda s: {**s.layer._parameters},
    "comparison": lambda s: s.layer._parameters == {},
    "deepcopy": lambda s: copy.deepcopy(s.model),
    "pickle": lambda s: pickle.dumps(s.model),
    "save": lambda s: torch.save(s.model, io.BytesIO()),
    "conversion": lambda s: s.model.double(),
    "requires_grad_": lambda s: s.model.requires_grad_(True),
    "averaged": lambda s: torch.optim.swa_utils.AveragedModel(s.model),
    "optimizer.state_dict": lambda s: s.optimizer.state_dict(),
    "optimizer.load_state_dict": lambda s: s.optimizer.load_state_dict(s.optimizer.state_dict()),
    "optimizer.step": lambda s: s.optimizer.step(),
    "optimizer.zero_grad": lambda s: s.optimizer.zero_grad(),
    "optimizer.state": lambda s: list(s.optimizer.state),
    "group members": lambda s: s.optimizer.param_groups[0]["params"][0],
    "concatenated members": lambda s: [1] + s.optimizer.param_groups[0]["params"],
    "add_param_group": lambda s: s.optimizer.add_param_group({"params": [torch.ones(1)]}),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_are_noticed(reader: str) -> None:
    scene, twin = Scene(), Scene()
    scene.watch.start()
    seen, expected = READERS[reader](scene), READERS[reader](twin)
    assert scene.finished >= 1
    assert type(seen) is type(expected)
    assert type(scene.layer._parameters) is dict, "the container was not put back"
    assert type(scene.optimizer.state) is type(twin.optimizer.state)


def test_learning_rates_are_read_and_set_unnoticed() -> None:
    scene = Scene()
    scene.watch.start()
    scene.scheduler.step()
    scene.optimizer.param_groups[0]["lr"] *= 2
    assert scene.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    scene.model.train()
    assert len(scene.layer._parameters) == 2
    assert scene.finished == 0


def test_what_is_saved_needs_no_stand_in() -> None:
    scene = Scene()
    scene.watch.start()
    loaded = pickle.loads(pickle.dumps(scene.model))
    assert type(vars(loaded[0])["_parameters"]) is dict
    scene.watch.start()
    copied: Optimizer = copy.deepcopy(scene.optimizer)
    assert type(copied.param_groups[0]["params"]) is list


def test_stopping_puts_the_same_containers_back() -> None:
    scene = Scene()
    before = [scene.layer._parameters, scene.optimizer.state, scene.optimizer.param_groups[0]]
    members = before[2]["params"]
    scene.watch.start()
    scene.watch.start()
    assert unwatched(vars(scene.layer)["_parameters"]) is before[0]
    scene.watch.stop()
    after: list[Any] = [scene.layer._parameters, scene.optimizer.state]
    assert all(a is b for a, b in zip(after, before, strict=False))
    assert scene.optimizer.param_groups[0]["params"] is members
    assert scene.finished == 0


def test_a_failing_finish_is_raised_at_every_reader() -> None:
    scene = Scene()

    def fail() -> bool:
        raise RuntimeError("half an update")

    watch = Watch(scene.model.modules(), [scene.optimizer], fail)
    watch.start()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half an update"):
            scene.model.state_dict()
    watch.stop()
    scene.model.state_dict()


def test_two_watches_do_not_overlap() -> None:
    scene = Scene()
    log: list[str] = []

    def finishing(name: str) -> Callable[[], bool]:
        def finish() -> bool:
            log.append(name)
            return True

        return finish

    first = Watch(scene.model.modules(), [scene.optimizer], finishing("first"))
    second = Watch(scene.model.modules(), [], finishing("second"))
    first.start()
    second.settle_others()
    second.start()
    scene.model.state_dict()
    assert log[0] == "first" and set(log[1:]) == {"second"}


def test_steps_over_other_modules_with_the_same_parameter_are_finished() -> None:
    scene, other = Scene(), nn.Linear(2, 2)
    other.weight = scene.layer.weight
    scene.watch.start()
    Watch([nn.Linear(2, 2)], [], lambda: True).settle_others()
    assert scene.finished == 0
    Watch([other], [], lambda: True).settle_others()
    assert scene.finished == 1


def test_tables_of_other_classes() -> None:
    scene = Scene()
    vars(scene.layer)["_parameters"] = OrderedDict(scene.layer._parameters)
    assert scene.watch.start()
    assert scene.layer.weight is not None and scene.finished
    vars(scene.layer)["_parameters"] = type("Table", (dict,), {})(scene.layer._parameters)
    assert not scene.watch.start()
    assert type(scene.optimizer.param_groups[0]["params"]) is list


def test_what_cannot_be_finished_now_stays_watched() -> None:
    scene = Scene()
    watch = Watch(scene.model.modules(), [scene.optimizer], lambda: False)
    watch.start()
    scene.model.state_dict()
    assert unwatched(vars(scene.layer)["_parameters"]) is not vars(scene.layer)["_parameters"]
    watch.stop()
