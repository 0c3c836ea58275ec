"""Tensors whose first use is seen, and the modes in which late work runs."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import graphopt
from graphopt import _compat
from graphopt.graph_utils import find_nodes
from graphopt.iter_graph import IterGraphModule
from graphopt.runtime.late.tensors import LateTensors, held_elsewhere, settle


class Scene:
    """A model and its optimizer; what is in flight adds one to each tensor of theirs."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2), nn.BatchNorm1d(2))
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        self.model[1](self.model[0](torch.ones(1, 2)))[0].sum().backward()
        self.scheduler = ExponentialLR(self.optimizer, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.finished = 0
        self.late = LateTensors(self._finish)
        states = [t for entries in self.optimizer.state.values() for t in entries.values()]
        self.tensors = [*self.model.parameters(), *states]
        self.kinds = list(map(type, self.tensors))

    def _finish(self) -> bool:
        self.finished += 1
        with torch.no_grad(), _compat.without_modes():
            for tensor in self.late.own(self.tensors):
                tensor.add_(1)
        return True

    def arm(self) -> Scene:
        assert self.late.arm(self.tensors) is None
        return self


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made.arm()
    made.late.disarm()


USES: dict[str, Callable[[Scene], object]] = {
    "state_dict": lambda s: s.model.state_dict(),
    "forward": lambda s: s.model[0](torch.ones(1, 2)),
    "recurrent forward": lambda s: s.model[1](torch.ones(1, 2)),
    "deepcopy": lambda s: copy.deepcopy(s.model),
    "pickle": lambda s: pickle.dumps(s.model),
    "conversion": lambda s: s.model.double(),
    "requires_grad_": lambda s: s.model.requires_grad_(True),
    "averaged": lambda s: torch.optim.swa_utils.AveragedModel(s.model),
    "load_state_dict": lambda s: s.optimizer.load_state_dict(s.optimizer.state_dict()),
    "new group": lambda s: s.optimizer.add_param_group({"params": [nn.Parameter(s.tensors[0])]}),
    "isinstance": lambda s: isinstance(s.tensors[0], Tensor),
    "isinstance of state": lambda s: isinstance(s.tensors[-1], Tensor),
    "set gradient": lambda s: setattr(s.tensors[0], "grad", torch.ones(2, 2)),
    "set data": lambda s: setattr(s.tensors[0], "data", torch.ones(2, 2)),
    "set class": lambda s: setattr(s.tensors[0], "__class__", nn.Parameter),
    "attribute of the user's": lambda s: setattr(s.tensors[0], "mine", 1),
    "missing attribute": lambda s: getattr(s.tensors[0], "mine", None),
    "swapped": lambda s: torch.utils.swap_tensors(s.tensors[-1], torch.ones(2)),
}


METADATA: dict[str, Callable[[Tensor], object]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: p.size(0),
    "stride": lambda p: p.stride(),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "ndim": lambda p: (p.ndim, p.dim()),
    "numel": lambda p: p.numel(),
    "length": len,
    "requires_grad": lambda p: p.requires_grad,
    "leaf": lambda p: (p.is_leaf, p.grad_fn),
    "contiguous": lambda p: p.is_contiguous(),
    "gradient": lambda p: p.grad,
    "key": lambda p: {p: 1}[p],
    "identity": lambda p: p in [p],
    "reference": lambda p: weakref.ref(p)() is p,
    "name": lambda p: type(p).__name__,
}


@pytest.mark.parametrize("use", USES)
def test_a_use_finishes_first_and_restores_the_classes(scene: Scene, use: str) -> None:
    USES[use](scene)
    assert scene.finished == 1
    assert all(a is b for a, b in zip(map(type, scene.tensors), scene.kinds, strict=True))


@pytest.mark.parametrize("asked", METADATA)
def test_metadata_finishes_nothing(scene: Scene, asked: str) -> None:
    parameter = scene.tensors[0]
    found = METADATA[asked](parameter)
    assert scene.finished == 0
    scene.late.disarm()
    assert found == METADATA[asked](parameter)


def test_loops_over_modules_and_schedulers_finish_nothing(scene: Scene) -> None:
    scene.scheduler.step()
    scene.optimizer.zero_grad()
    scene.model.train()
    assert sum(p.numel() for p in scene.model.parameters()) > 0
    assert list(scene.optimizer.state) and scene.optimizer.param_groups[0]["lr"] < 0.1
    assert scene.finished == 0


def test_a_failing_finish_is_raised_at_every_use() -> None:
    def fail() -> bool:
        raise RuntimeError("half an update")

    tensor = torch.ones(2)
    late = LateTensors(fail)
    late.arm([tensor])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half an update"):
            tensor + 1
        with pytest.raises(RuntimeError, match="half an update"):
            isinstance(tensor, Tensor)
    assert tensor.shape == (2,)
    late.disarm()
    assert torch.equal(tensor, torch.ones(2))


def test_what_cannot_be_finished_now_is_as_it_is() -> None:
    """In a hook in the middle of the step."""
    parameter = nn.Parameter(torch.ones(2))
    late = LateTensors(lambda: False)
    late.arm([parameter])
    assert torch.equal(parameter + 1, torch.full((2,), 2.0))
    assert isinstance(parameter, nn.Parameter) and parameter.__class__.__name__ == "Parameter"
    assert repr(parameter.detach()) == repr(torch.ones(2))
    parameter.grad = torch.ones(2)
    with torch.no_grad():
        parameter.add_(1)
        parameter *= 2
    assert late.armed
    late.disarm()
    assert parameter.tolist() == [4.0, 4.0] and parameter.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("index", [0, -1])
def test_a_parameter_made_of_a_late_tensor(scene: Scene, index: int) -> None:
    tensor = scene.tensors[index]
    made = nn.Parameter(tensor, requires_grad=False)
    assert isinstance(made, nn.Parameter) and not made.requires_grad
    assert made.data_ptr() == tensor.data_ptr() and scene.finished == 1
    assert type(scene.tensors[index]) is scene.kinds[index]


def test_two_steps_over_one_tensor() -> None:
    shared, log = torch.ones(2), []

    def finishing(name: str) -> Callable[[], bool]:
        def finish() -> bool:
            log.append(name)
            return True

        return finish

    first, second = LateTensors(finishing("first")), LateTensors(finishing("second"))
    first.arm([shared])
    second.arm([torch.zeros(2)])
    settle([shared], besides=first)
    assert log == []
    second.arm([shared])
    assert log == ["first"] and not first.armed
    second.disarm()


class Own(nn.Parameter):
    """A subclass of the user's own."""

    def doubled(self) -> Tensor:
        return self * 2


class Looking(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses() -> None:
    own = Own(torch.ones(2))
    late = LateTensors(lambda: bool(torch.Tensor.add_(late.own([own])[0], 1) is not None))
    assert late.arm([own]) is None
    assert own.doubled().tolist() == [4.0, 4.0] and type(own) is Own
    assert late.arm([torch.ones(2).as_subclass(Looking)]) == 0 and not late.armed


def views(p: Any) -> dict[str, Callable[[], object]]:
    return {
        "data": lambda: p.data,
        "row": lambda: p.detach()[0],
        "history": lambda: p * 2,
        "numpy": lambda: p.detach().numpy(),
        "dlpack": lambda: torch.utils.dlpack.to_dlpack(p.detach()),
        "storage": p.untyped_storage,
    }


@pytest.mark.parametrize("kind", views(torch.ones(1)))
def test_other_holders_of_the_memory_are_counted(kind: str) -> None:
    other, parameter = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    late = LateTensors(lambda: True)
    held = views(parameter)[kind]()
    assert list(held_elsewhere([other, parameter])) == [False, True]
    assert late.arm([other, parameter]) == 1
    assert not late.armed and type(other) is nn.Parameter
    del held
    assert late.arm([other, parameter]) is None
    late.disarm()


def test_tensors_over_one_storage_may_be_late_together() -> None:
    flat = torch.ones(4)
    parts = [nn.Parameter(flat[:2]), nn.Parameter(flat[2:])]
    assert list(held_elsewhere(parts)) == [True, True]
    del flat
    assert list(held_elsewhere(parts)) == [False, False]
    assert list(held_elsewhere(parts[:1])) == [True]


def test_a_queue_shares_memory_as_before() -> None:
    from multiprocessing.reduction import ForkingPickler

    tensor = torch.ones(2).share_memory_()
    late = LateTensors(lambda: bool(late.own([tensor])[0].add_(1) is not None))
    assert late.arm([tensor]) is None
    received = pickle.loads(bytes(ForkingPickler.dumps(tensor)))
    assert received.tolist() == [2.0, 2.0] and type(tensor) is Tensor
    tensor.fill_(5)
    assert received.tolist() == [5.0, 5.0]


MODES: list[tuple[bool, ...]] = []


@torch.library.custom_op("graphopt_tests::seen_modes", mutates_args=())
def seen_modes(value: Tensor) -> Tensor:
    """A copy; notes in which modes it is made."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    MODES.append((*modes, torch.is_autocast_enabled("cpu")))
    return value.clone()


@seen_modes.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


class Noting(Optimizer):
    """Gradient descent whose updates note in which modes they run."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * seen_modes(parameter.grad))


@graphopt.graph_optimization_pass()
def run_what_notes_modes_late(gm: IterGraphModule) -> None:
    """Run what notes its modes, and what depends on it, in the next iteration."""
    noting = find_nodes(gm.graph, lambda n: n.target is torch.ops.graphopt_tests.seen_modes.default)
    late = list(noting)
    for node in late:
        late += [user for user in node.users if user.op != "output" and user not in late]
    gm.graph.move_to_next_iter_before(late, None)


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def inside_an_operator_on_fake_tensors() -> AbstractContextManager[None]:
    """Where garbage may be collected, and a step in flight with it."""
    return in_kernel_invocation_manager(FakeTensorMode())


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", torch.bfloat16),
        FakeTensorMode,
        inside_an_operator_on_fake_tensors,
    ],
)
def test_late_work_is_done_in_the_modes_of_a_step(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    model = nn.Linear(3, 2)
    start = copy.deepcopy(model.state_dict())
    optimizer = Noting(model.parameters())
    step = graphopt.compile(train_step, pipeline=[run_what_notes_modes_late])
    step(model, optimizer, torch.ones(4, 3))
    assert step.graph_module.in_flight
    MODES.clear()
    with mode():
        step.flush()
    assert MODES == [(False, False, False)] * 2
    eager = nn.Linear(3, 2)
    eager.load_state_dict(start)
    train_step(eager, Noting(eager.parameters()), torch.ones(4, 3))
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
