"""What a capture leaves behind on the host: after a refusal nothing, otherwise what one eager step
leaves, once."""

from __future__ import annotations

import copy
import queue
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from graphopt import _compat
from steps import with_hidden_states
from twins import Twins, World, world
from zoo import MLP, MODELS, OPTIMIZERS

CASE = MODELS["mlp"]
TABLES = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")


class Lazy(nn.Module):
    """Installs in its first forward what `install` adds, and notes that it has."""

    def __init__(self, install: Callable[[Lazy], None], flag: str) -> None:
        super().__init__()
        self.body, self.install, self.flag = MLP(), install, flag
        self.notes = SimpleNamespace(ready=False, inner=SimpleNamespace(ready=False))
        self.ready = False
        self.table: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.queue: deque[int] = deque(maxlen=3)
        self.names: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready():
            self.install(self)
            self.set_ready()
        return self.body(x)

    def is_ready(self) -> bool:
        places = {
            "attribute": self.ready,
            "object": self.notes.ready,
            "deep": self.notes.inner.ready,
            "table": "ready" in self.table,
        }
        return bool(places[self.flag])

    def set_ready(self) -> None:
        if self.flag == "attribute":
            self.ready = True
        elif self.flag == "table":
            self.table["ready"] = True
        else:
            (self.notes if self.flag == "object" else self.notes.inner).ready = True

    def hooks(self) -> list[list[int]]:
        return [[len(vars(m)[table]) for table in TABLES] for m in self.modules()]


def hook(module: Lazy) -> None:
    module.body.register_forward_hook(lambda m, args, output: output * 2)


def hook_with_kwargs(module: Lazy) -> None:
    module.body.register_forward_hook(lambda m, args, kw, output: output + 1, with_kwargs=True)


def pre_hook(module: Lazy) -> None:
    module.body.head.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))


def containers(module: Lazy) -> None:
    module.seen.append("first")
    module.queue.extend([1, 2, 3, 4])
    module.names.add("head")
    module.table["order"] = OrderedDict(a=1)


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("flag", ["attribute", "object", "deep", "table"])
@pytest.mark.parametrize("install", [hook, hook_with_kwargs, pre_hook, containers])
def test_what_a_first_forward_installs_is_to_be_there_before(
    install: Callable[[Lazy], None], flag: str
) -> None:
    def build(warm: bool = True) -> World:
        model = Lazy(install, flag)
        if warm:
            with torch.no_grad():
                model(CASE.batch(0)[0])
        return World(step, [model], [OPTIMIZERS["sgd-foreach"](model.parameters())])

    cold = build(warm=False)
    with pytest.raises(graphopt.CaptureError, match="outside its arguments"):
        graphopt.compile(step)(cold.model, cold.optimizer, *CASE.batch(0))
    twins = Twins(build)
    for i in range(3):
        twins.step(*CASE.batch(i))
    eager, captured = twins.eager.model, twins.captured.model
    assert captured.hooks() == eager.hooks()
    assert (captured.seen, captured.queue, captured.names) == (eager.seen, eager.queue, eager.names)
    assert captured.is_ready() and captured.table == eager.table
    assert len(twins.compiled.captures) <= 2


class Slotted:
    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.count, self.items = 0, [0]


class Registry:
    seen: ClassVar[list[int]] = []
    last: ClassVar[str] = ""


names: list[str] = []
total = 0


@dataclass
class Trainer:
    """Everything in which a step may leave something on the host."""

    table: dict[str, Any] = field(default_factory=dict)
    ordered: OrderedDict[str, int] = field(default_factory=lambda: OrderedDict(a=1, b=2))
    counts: Counter[str] = field(default_factory=Counter)
    groups: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    queue: deque[int] = field(default_factory=lambda: deque([1, 2], maxlen=2))
    items: list[Any] = field(default_factory=lambda: [[1], {"a": {2}}])
    array: Any = field(default_factory=lambda: numpy.zeros(3))
    bytes: bytearray = field(default_factory=lambda: bytearray(b"ab"))
    slotted: Slotted = field(default_factory=Slotted)
    inner: Any = field(default_factory=lambda: SimpleNamespace(count=0, other=None))
    rng: Any = field(default_factory=lambda: random.Random(0))

    def touch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Change all of it."""
        global total
        total += 1
        names.append("touched")
        Registry.seen.append(1)
        Registry.last = "touched"
        self.table["new"] = self.table
        self.ordered.move_to_end("a")
        self.counts["a"] += 1
        self.groups["a"].append(1)
        self.queue.append(3)
        self.items[1]["a"].add(3)
        self.items[0].clear()
        self.array += 1
        self.bytes.extend(b"c")
        self.slotted.count += 1
        self.slotted.items.append(1)
        self.inner.count += 1
        self.inner.__dict__.pop("other", None)
        model.register_forward_hook(lambda *args: None)
        model.register_forward_pre_hook(lambda *args: None, with_kwargs=True)
        model.head.register_full_backward_hook(lambda *args: None)
        model.register_state_dict_pre_hook(lambda *args: None)
        optimizer.register_step_post_hook(lambda *args: None)
        optimizer.defaults["lr"] = 3.0

    def state(self) -> Any:
        here = (total, list(names), list(Registry.seen), Registry.last)
        others = (list(self.ordered), self.array.tolist(), self.slotted.count, self.inner.count)
        return copy.deepcopy((here, others, self.counts, self.groups, self.queue, self.items))


def touching(trainer: Trainer, ends: Callable[..., Any]) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        trainer.touch(model, optimizer)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return ends(trainer, loss)

    return step


def fails(trainer: Trainer, loss: Tensor) -> Any:
    raise LookupError("no such example")


def branches(trainer: Trainer, loss: Tensor) -> Any:
    return loss if loss > 0 else None


def draws(trainer: Trainer, loss: Tensor) -> Any:
    return loss * next(iter(trainer.rng.random, 2))


def keeps(trainer: Trainer, loss: Tensor) -> Any:
    trainer.items[1]["a"].add(loss.detach())


def keeps_text(trainer: Trainer, loss: Tensor) -> Any:
    trainer.table["all"] = trainer.table.get("all", "") + f"{loss.item()}"


def turns_gradients_off(trainer: Trainer, loss: Tensor) -> Any:
    torch.set_grad_enabled(False)


def changes_the_default_dtype(trainer: Trainer, loss: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)


REFUSED = [
    fails,
    branches,
    draws,
    keeps,
    keeps_text,
    turns_gradients_off,
    changes_the_default_dtype,
]


@pytest.mark.parametrize("ends", REFUSED, ids=lambda ends: ends.__name__)
def test_a_refused_step_leaves_nothing(ends: Callable[..., Any]) -> None:
    """The deep snapshots of conftest.py see the arguments and what the closure holds."""
    trainer, w = Trainer(), world()
    step, before = touching(trainer, ends), trainer.state()
    for run in (graphopt.compile(step), lambda *args: graphopt.capture(step, *args)):
        with pytest.raises(graphopt.CaptureError) as caught:
            run(w.model, w.optimizer, *CASE.batch(0))
        assert "test_host_state_after_capture.py" in str(caught.value)
        assert trainer.state() == before
        assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32


def test_a_first_call_that_computes_something_else() -> None:
    """It has a graph of its own."""
    notes = []

    def build() -> World:
        notes.append(SimpleNamespace(ready=False))
        note = notes[-1]

        def scaled(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
            scale, note.ready = 1.0 if note.ready else 2.0, True
            return step(model, optimizer, x * scale, y)

        return world(scaled, optimizer="sgd-foreach")

    twins = Twins(build)
    for i in range(4):
        twins.step(*CASE.batch(i))
    assert len(twins.compiled.captures) <= 2
    assert all(note.ready for note in notes)


@pytest.mark.full  # test_leftovers_ranks has one
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_hidden_states_of_a_huggingface_model(optimizer: type[Optimizer]) -> None:
    """transformers installs a hook in each layer when hidden states are asked for first, which is
    to be before the first step."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )

    def build() -> World:
        model = transformers.LlamaForCausalLM(config).train()
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long), output_hidden_states=True)
        return World(with_hidden_states, [model], [optimizer(model.parameters(), lr=1e-2)])

    twins = Twins(build, pipeline="default")
    for i in range(3):
        _, count = twins.step(torch.randint(48, (2, 8), generator=torch.Generator().manual_seed(i)))
        assert count == 3
    hooks = [
        [len(m._forward_hooks) for m in w.model.modules()] for w in (twins.eager, twins.captured)
    ]
    assert hooks[0] == hooks[1] and max(hooks[0]) == 1
    twins.finish(captures=1)


# Attributes of objects among the arguments


class Meter:
    """An object that a step is given."""

    def __init__(self) -> None:
        self.last: Any = None
        self.kind = ""


def test_tensors_that_a_step_puts_into_an_argument() -> None:
    """Every call does, as with an attribute of a module."""

    def metered(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, meter: Meter) -> None:
        meter.last = step(model, optimizer, x, y).detach()
        meter.first = model.head.weight
        meter.kind, meter.all = "loss", list(model.parameters())

    eager, captured, meters = world(), world(), (Meter(), Meter())
    captured.model.load_state_dict(eager.model.state_dict())
    compiled = graphopt.compile(metered)
    for i in range(3):
        metered(eager.model, eager.optimizer, *CASE.batch(i), meters[0])
        compiled(captured.model, captured.optimizer, *CASE.batch(i), meters[1])
        assert torch.equal(meters[0].last, meters[1].last)
        assert meters[1].first is captured.model.head.weight
    assert meters[1].kind == "loss"
    pairs = zip(meters[1].all, captured.model.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    assert len(compiled.captures) == 1


def test_a_number_is_put_into_an_argument() -> None:
    def metered(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, meter: Meter) -> None:
        meter.last = step(model, optimizer, x, y).item()

    found = []
    for run in (metered, graphopt.compile(metered)):
        torch.manual_seed(0)
        w, meter = world(), Meter()
        for number in range(3):
            run(w.model, w.optimizer, *CASE.batch(number), meter)
            found.append(meter.last)
    assert found[:3] == found[3:] and all(type(value) is float for value in found)
    assert len(run.captures) == 1


def test_a_list_that_is_put_into_an_argument() -> None:
    def metered(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, meter: Meter) -> Any:
        loss = step(model, optimizer, x, y).detach()
        meter.last = [loss, "loss"]
        return loss

    w, meter, kept = world(), Meter(), []
    compiled = graphopt.compile(metered)
    for number in range(3):
        loss = compiled(w.model, w.optimizer, *CASE.batch(number), meter)
        assert meter.last[0] is loss and meter.last[1:] == ["loss"]
        kept.append(meter.last)
    assert len({id(each) for each in kept}) == 3 and len(compiled.captures) == 1


def asked_in_c(value: Tensor) -> float:
    return max([value], key=float)


@pytest.mark.parametrize("number", [asked_in_c, bool])
def test_large_and_cyclic_containers(number: Callable[[Tensor], Any]) -> None:
    """Tens of thousands of items are not looked into, but the container itself is put back."""
    large: list[Any] = list(range(20_000))
    large.append(large)
    chain: list[Any] = []
    for _ in range(5_000):
        chain = [chain]

    def growing(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        large.append(len(chain))
        loss = step(model, optimizer, x, y)
        return loss if number(loss > 0) else None

    w = world()
    with pytest.raises(graphopt.CaptureError):
        graphopt.compile(growing)(w.model, w.optimizer, *CASE.batch(0))
    assert len(large) == 20_001


def test_what_other_threads_work_with_is_left_alone() -> None:
    """A loader's thread goes on during a capture: what it has delivered must not be taken back."""

    class Loader:
        def __init__(self) -> None:
            self.lock, self.ready, self.ends = threading.Lock(), [0], threading.Event()
            self.waiting: queue.Queue[int] = queue.Queue()

        def load(self) -> None:
            while not self.ends.wait(0.002):
                self.ready.append(len(self.ready))
                self.waiting.put(len(self.ready))

    loader = Loader()
    thread = threading.Thread(target=loader.load)
    thread.start()

    def loading(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        assert loader.lock is not None
        return step(model, optimizer, x, y)

    w = world()
    graphopt.capture(loading, w.model, w.optimizer, *CASE.batch(0))
    loader.ends.set()
    thread.join()
    assert loader.ready == list(range(loader.waiting.qsize() + 1)) and len(loader.ready) > 1


def test_what_a_step_does_to_what_other_threads_work_with_is_refused() -> None:
    class Loader:
        def __init__(self) -> None:
            self.lock, self.ready = threading.Lock(), [1]

    loader = Loader()

    def loading(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loader.ready.append(2)
        return step(model, optimizer, x, y)

    w = world()
    with pytest.raises(graphopt.CaptureError, match=r"it changes loader\.ready outside"):
        graphopt.capture(loading, w.model, w.optimizer, *CASE.batch(0))


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 5), lambda: nn.Sequential(nn.Linear(4, 4))])
def test_a_fake_model_is_captured_after_a_refusal(make: Callable[[], nn.Module]) -> None:
    """Its mode keeps the stand-ins of the refused trace, with their gradients."""

    def step(model: nn.Module, x: torch.Tensor, asks: bool) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        if asks:
            max([loss.detach()], key=float)
        return loss

    with _compat.new_fake_mode():
        model, x = make(), torch.randn(3, 4)
    with pytest.raises(graphopt.CaptureError, match="value of a tensor") as refusal:
        graphopt.capture(step, model, x, True)
    graph = graphopt.capture(step, model, x, False).graph_module.graph
    assert refusal.value is not None  # held until here, with its traceback
    assert not any(node.op == "get_attr" for node in graph.nodes)
