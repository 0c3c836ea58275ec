"""Decisions by value: the branch that a call takes is captured, and others when they are taken."""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import graphopt
from gloo import Pool
from graphopt.errors import AssumptionFailedError, CaptureError
from graphopt.host.decisions.assumptions import assumptions
from graphopt.tracing.call import Call

Step = Callable[[nn.Module, Optimizer, Tensor], Any]


class Net(nn.Module):
    """Has statistics that are updated before the loss is known, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.linear(x)), 0.25)


def finish(optimizer: Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def skips(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    return finish(optimizer, loss) if torch.isfinite(loss) else loss


def clips(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = (model(x) * x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    if norm > 0.5:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5 / norm)
    optimizer.step()
    return norm


def after_the_update(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = finish(optimizer, (model(x) * x).sum())
    if loss > 0:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    return loss


def draws(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    h = model(x)
    if h.sum() > 0:
        h = h * torch.rand_like(h)
    return finish(optimizer, h.square().mean())


def goes_round(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, int]:
    h, rounds = model(x), 0
    while h.abs().max() > 2 and rounds < 5:
        h, rounds = h * 0.8, rounds + 1
    return finish(optimizer, h.square().mean()), rounds


def by_number(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = (model(x) * x).sum()
    value = loss.item()
    if value > 1:
        loss = loss * value
    elif not value < -1:
        loss = loss / 2
    return finish(optimizer, loss)


def compares(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    h = model(x)
    if torch.equal(h, h.abs()) or torch.allclose(x, x.abs()):
        h = h * 2
    return finish(optimizer, h.square().mean())


def chooses(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return finish(optimizer, model(x).square().mean() * [1.0, 2.0][(x.sum() > 0).long()])


def by_item(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if loss.item() < 100:
        optimizer.step()
    return loss


def by_norm(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    if torch.isfinite(norm):
        optimizer.step()
    return norm


def by_arguments(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    assert not (x > 1e6).any(), "out of range"
    normal = torch.distributions.Normal(model(x), torch.tensor(1.0), validate_args=True)
    return finish(optimizer, -normal.log_prob(x).mean())


def by_limits(model: nn.Module, optimizer: Optimizer, x: Tensor) -> list[float]:
    """The larger and the smaller of numbers, of which one is not a number in some calls."""
    h = model(torch.nan_to_num(x))
    largest, sums = x.abs().max().item(), [row.sum().item() for row in x]
    limits = [max(1.0, largest), max(largest, 1.0), min(0.5, largest), min(largest, 0.5)]
    limits += [max(sums), min(tuple(sums)), max(0.0, sums[0], -0.0), max(-0.0, 0.0 * sums[2])]
    scale = min(1.0, 0.1 / max(1e-3, h.norm().item()))
    finish(optimizer, h.square().mean() * scale)
    return limits


STEPS: list[Step] = [
    skips, clips, after_the_update, draws, goes_round, by_number, compares, chooses,
]  # fmt: skip


def left_by(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Everything that a step may change."""
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    gradients = [p.grad for p in model.parameters()]
    found = [*model.state_dict().values(), *state, *gradients, torch.get_rng_state()]
    return [value.clone() if isinstance(value, Tensor) else value for value in found]


def batches(calls: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    found = [torch.randn(8, 4, generator=generator) * (3 if n % 2 else 0.1) for n in range(calls)]
    found[::3] = [x.abs() for x in found[::3]]
    found[0][1, 1] = found[3][0, 0] = float("nan")
    return found


def trained(step: Step, compiled: bool, calls: int = 8, **options: Any) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run = graphopt.compile(step, **options) if compiled else step
    found: list[Any] = []
    for x in batches(calls):
        result = run(model, optimizer, x if step in (skips, by_limits) else x.nan_to_num())
        found += [result, *left_by(model, optimizer)]
    made = len(run.captures) if isinstance(run, graphopt.TrainStep) else 0
    return torch.utils._pytree.tree_leaves(found), made


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b) or (a != a and b != b)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=7), b.nan_to_num(nan=7))


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    assert all(map(same, found, expected))


@pytest.mark.parametrize("step", STEPS)
def test_every_call_takes_the_branch_of_eager(step: Step) -> None:
    expected, _ = trained(step, compiled=False)
    found, made = trained(step, compiled=True)
    assert_alike(found, expected)
    assert 2 <= made <= 6  # both branches are met; branches that come back have their graph


@pytest.mark.parametrize("step", [by_item, by_norm, by_arguments, by_limits])
def test_what_is_asked_and_always_answered_alike_needs_one_graph(step: Step) -> None:
    expected, _ = trained(step, compiled=False)
    found, made = trained(step, compiled=True)
    assert_alike(found, expected)
    assert made == 1


def test_a_branch_of_every_optimizer_step() -> None:
    """RAdam counts before it decides, with each parameter for itself."""

    def run(compiled: bool) -> tuple[list[Any], int]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.RAdam(model.parameters())

        def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
            return finish(optimizer, model(x).square().mean())

        call = graphopt.compile(step) if compiled else step
        found = [call(model, optimizer, x.nan_to_num()) for x in batches(8)]
        made = len(call.captures) if isinstance(call, graphopt.TrainStep) else 0
        return [*found, *left_by(model, optimizer)], made

    found, made = run(compiled=True)
    assert all(map(same, found, run(compiled=False)[0]))
    assert made == 2


def test_a_failed_assumption_has_changed_nothing() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step = graphopt.compile(skips)
    x = torch.ones(8, 4) * torch.arange(8)[:, None]
    step(model, optimizer, x)
    step.flush()
    before = left_by(model, optimizer)
    other = Call(skips, (model, optimizer, x * float("nan")), {})
    with pytest.raises(AssumptionFailedError, match=r"test_decisions\.py"):
        step._entries[0](other, 2)
    assert all(map(same, left_by(model, optimizer), before))


def test_one_call_of_another_branch_does_not_make_the_next_one_fail() -> None:
    """Whatever comes: the branch that is taken most is tried first, and goes as captured."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step = graphopt.compile(skips)
    good, bad = torch.ones(8, 4) * torch.arange(8)[:, None], torch.full((8, 4), float("nan"))

    def failed(*calls: Tensor) -> list[bool]:
        found = []
        for x in calls:
            before = {entry: entry.tries.failures for entry in step._entries}
            step(model, optimizer, x)
            found.append(any(entry.tries.failures > was for entry, was in before.items()))
        return found

    assert failed(good, bad, good, good) == [False, True, False, False]
    assert failed(bad, good, bad, good) == [True, False, True, False]
    assert failed(bad, bad, bad, bad) == [True, True, False, False]
    assert failed(good, bad, good, good, good) == [True, False, True, True, False]
    assert len(step.captures) == 2


def test_what_a_failed_graph_has_computed_is_gone_when_the_other_one_runs() -> None:
    alive: list[int] = []

    def count(_: Tensor) -> None:
        tensors = (each for each in gc.get_objects() if type(each) is Tensor)
        alive.append(sum(t.shape == (3, 977) for t in tensors))

    @graphopt.compile
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if torch.isfinite(loss):
            return finish(optimizer, loss)
        graphopt.callback(count, loss)
        return loss

    model = nn.Sequential(nn.Linear(4, 977), nn.Tanh(), nn.Linear(977, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    good, bad = torch.ones(3, 4), torch.full((3, 4), float("nan"))
    for x in (good, bad, good, good):
        step(model, optimizer, x)
    gc.collect()  # a capture leaves garbage
    step(model, optimizer, bad)
    assert len(alive) == 2
    assert alive[1] == 0


def test_callbacks_are_called_once_in_a_step() -> None:
    seen: list[float] = []

    @graphopt.compile
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).mean()
        graphopt.callback(lambda value: seen.append(value.item()), loss)
        return finish(optimizer, loss) if loss > 0 else loss

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    xs = [x.nan_to_num() for x in batches(6)]
    losses = [step(model, optimizer, x).item() for x in xs]
    assert seen == losses


Kept = dict[str, Any]


def keeping(keep: Callable[[Kept, bool], Any], kept: Kept) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).mean()
        keep(kept, bool(loss.isnan()))
        return finish(optimizer, loss)

    return step


def fresh_kept() -> Kept:
    return {"list": [], "count": 0, "set": set(), "bytes": bytearray()}


@pytest.mark.parametrize(
    "keep",
    [
        lambda kept, bad: kept.update(count=kept["count"] + 1) if bad else None,
        lambda kept, bad: kept.update(last="bad" if bad else "good"),
    ],
)
def test_what_each_branch_keeps(keep: Callable[[Kept, bool], Any]) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        kept, model = fresh_kept(), nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = keeping(keep, kept)
        step = graphopt.compile(step) if compiled else step
        for number in range(6):
            x = torch.randn(3, 4) if number not in (2, 3, 5) else torch.full((3, 4), float("nan"))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.nan_to_num_()
            step(model, optimizer, x)
            found.append(repr(kept))
    assert found[:6] == found[6:]


@pytest.mark.parametrize(
    "keep",
    [
        lambda kept, bad: kept["bytes"].append(1 if bad else 2),
        lambda kept, bad: kept["bytes"].extend(b"bad" if bad else b"good"),
    ],
)
def test_what_each_branch_keeps_is_refused(keep: Callable[[Kept, bool], Any]) -> None:
    kept, model = fresh_kept(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(CaptureError, match="outside its arguments"):
        graphopt.compile(keeping(keep, kept))(model, optimizer, torch.randn(3, 4))
    assert kept == fresh_kept()


@pytest.mark.parametrize("by_callback", [False, True])
def test_a_list_that_is_read_and_emptied_is_named(by_callback: bool) -> None:
    """As the buffers of PPO are; what the refusal says to do is exact."""
    model, rewards = nn.Linear(2, 1), [1.0, 2.0]

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum() * sum(rewards)
        if loss > 1000:
            return loss * 2
        if by_callback:
            graphopt.callback(rewards.clear)
        else:
            del rewards[:]
        return loss

    if not by_callback:
        with pytest.raises(CaptureError, match=r"changes rewards outside.*\n.*del rewards"):
            step(torch.ones(1, 2))
        return
    for _ in range(3):
        rewards[:] = [1.0, 2.0]
        assert torch.equal(step(torch.ones(1, 2)), model(torch.ones(1, 2)).sum() * 3)
        assert rewards == []
    assert len(step.captures) == 1


def test_a_branch_that_raises() -> None:
    @graphopt.compile
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        if (x > 3).any():
            raise ValueError("labels are out of range")
        return finish(optimizer, model(x).mean())

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step(model, optimizer, torch.ones(2, 4))
    before = left_by(model, optimizer)
    with pytest.raises(ValueError, match="labels are out of range"):
        step(model, optimizer, torch.ones(2, 4) * 4)
    assert all(map(same, left_by(model, optimizer), before))
    step(model, optimizer, torch.ones(2, 4))
    assert len(step.captures) == 1


def test_a_decision_with_many_outcomes_is_bounded() -> None:
    @graphopt.compile(max_graphs=4, verify="off")
    def step(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x).sum()
        for threshold in range(6):
            if y > threshold:  # HERE
                y = y * 1.0
        return y

    model = nn.Identity()

    def many() -> None:
        for n in range(20):
            step(model, torch.full((1,), n + 0.5))

    with pytest.raises(CaptureError, match=r"each outcome of .*# HERE"):
        many()


def test_fake_tensors_take_no_branch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(CaptureError, match="depends on the value of a tensor"):
        graphopt.capture(lambda model, x: x if model(x).sum() > 0 else -x, model, x)


def test_assumptions_are_nodes() -> None:
    captured = graphopt.capture(
        lambda model, x: x if model(x).sum() > 0 else -x, nn.ReLU(), torch.ones(2)
    )
    nodes = assumptions(captured.graph_module.graph)
    assert [str(node.target) for node in nodes] == ["graphopt.assumption(0: True)"]
    captured.graph_module(torch.ones(2))
    with pytest.raises(AssumptionFailedError):
        captured.graph_module(-torch.ones(2))


def by_average_norm(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    return norm


def raising_by_average_norm(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isnan(norm) or torch.isinf(norm):
        raise ValueError("the norm is not finite")
    nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
    optimizer.step()
    return norm


def _left_on_rank(rank: int, step: Step, compiled: bool) -> tuple[list[Any], int]:
    """One rank's batch makes the average infinite once: all ranks skip that update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run: Any = graphopt.compile(step) if compiled else step
    used = model if compiled else nn.parallel.DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(rank)
    found: list[Any] = []
    for call in range(5):
        x = torch.randn(8, 4, generator=generator)
        if call == 2 and rank == 1:
            x[0, 0] = float("nan")
        try:
            found.append(run(used, optimizer, x))
        except ValueError as error:  # eager code leaves its gradients, and graphopt changes nothing
            found.append(str(error))
            optimizer.zero_grad()
        found += left_by(model, optimizer)
    return found, len(run.captures) if compiled else 0


@pytest.mark.parametrize("step", [by_average_norm, raising_by_average_norm])
def test_ranks_follow_what_all_of_them_have_alike(two_ranks: Pool, step: Step) -> None:
    expected = two_ranks.run(_left_on_rank, step, False)
    captured = two_ranks.run(_left_on_rank, step, True)
    for (found, made), (eager, _) in zip(captured, expected, strict=True):
        assert made == (1 if step is raising_by_average_norm else 2)
        assert len(found) == len(eager)
        assert [i for i, pair in enumerate(zip(found, eager, strict=True)) if not same(*pair)] == []


def _failed_on_rank(rank: int) -> tuple[bool, bool, int]:
    """Whether a call that rank 1 makes all of them fail has changed nothing here, whether the next
    one goes on, and how many graphs there are."""
    torch.manual_seed(rank)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = graphopt.compile(by_average_norm)
    x = torch.randn(8, 4)
    step(model, optimizer, x)
    step.flush()
    before = left_by(model, optimizer)
    given = x * float("nan") if rank == 1 else x
    with pytest.raises(AssumptionFailedError):
        step._entries[0](Call(by_average_norm, (model, optimizer, given), {}), 2)
    unchanged = all(map(same, left_by(model, optimizer), before))
    return unchanged, bool(step(model, optimizer, x).isfinite()), len(step.captures)


def test_a_call_that_one_of_three_ranks_makes_fail_has_changed_nothing_on_any(
    three_ranks: Pool,
) -> None:
    assert three_ranks.run(_failed_on_rank) == [(True, True, 1)] * 3


class Counted(nn.Module):
    """Counts its calls in a buffer, and keeps the mean of what it has seen in another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.lerp_(x.detach().mean(0), 0.1)
        return cast(Tensor, self.linear(x) * self.scale)


def averaged(model: Any, optimizer: Optimizer, x: Tensor, average: Any) -> Tensor:
    loss = finish(optimizer, model(x).square().mean())
    average.update_parameters(getattr(model, "module", model))
    return loss


def every_second(model: Any, optimizer: Optimizer, x: Tensor, average: Any) -> Tensor:
    loss = finish(optimizer, model(x).square().mean())
    counted = getattr(model, "module", model)
    if counted.calls % 2 == 0:
        counted.scale.mul_(0.5)
    if counted.scale < 0.3:
        average.update_parameters(counted)
    return loss


def _averaged_on_rank(
    rank: int, step: Callable[..., Any], kind: str, compiled: bool
) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = Counted()
    options: dict[str, Any] = {
        "mean": {},
        "exponential": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        "one by one": {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": False},
    }
    average = AveragedModel(model, **options[kind])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run: Any = graphopt.compile(step) if compiled else step
    used = model if compiled else nn.parallel.DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(rank)
    found: list[Any] = []
    for _ in range(6):
        loss = run(used, optimizer, torch.randn(8, 4, generator=generator), average)
        left = [value for name, value in average.state_dict().items() if "seen" not in name]
        found += [loss.detach(), *(value.clone() for value in left), model.scale.clone()]
    return found, len(run.captures) if compiled else 0


@pytest.mark.parametrize(
    ("step", "kind", "most"),
    [
        (averaged, "mean", 2),
        (averaged, "exponential", 2),
        (averaged, "one by one", 2),
        (every_second, "mean", 6),
    ],
)
def test_ranks_follow_buffers_that_all_of_them_have_alike(
    two_ranks: Pool, step: Callable[..., Any], kind: str, most: int
) -> None:
    expected = two_ranks.run(_averaged_on_rank, step, kind, False)
    captured = two_ranks.run(_averaged_on_rank, step, kind, True)
    for (found, made), (eager, _) in zip(captured, expected, strict=True):
        assert 1 <= made <= most
        assert len(found) == len(eager)
        assert [i for i, pair in enumerate(zip(found, eager, strict=True)) if not same(*pair)] == []


def by_statistics(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    h = model(x)
    return finish(optimizer, h.square().mean() * (2 if model.seen.sum() > 0 else 1))


def by_count_of_positives(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = finish(optimizer, model(x).square().mean())
    if model.calls > 3:
        model.scale.mul_(0.5)
    model.calls.add_((x > 0).sum())
    return loss


def by_what_is_replaced(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = finish(optimizer, model(x).square().mean())
    if model.scale > 0.5:
        loss = loss * 2
    model.scale = model.scale * x.mean()
    return loss


def counts(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = finish(optimizer, model(x).square().mean())
    return loss * 2 if model.calls > 3 else loss


def by_an_attribute_of_two_modules(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = finish(optimizer, model(x).square().mean())
    return loss * 2 if model.limit + model.linear.limit > 0 else loss


def _decided_alone_on_rank(rank: int, step: Callable[..., Any], kind: graphopt.DataParallel) -> int:
    model: Any = Counted()
    model.limit = model.linear.limit = torch.tensor(1.0 - rank)  # no buffers, which are sent
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = graphopt.compile(step, parallel=kind)
    compiled(model, optimizer, torch.ones(2, 4))
    targets: Any = (node.target for node in assumptions(compiled.graph_module.graph))
    return sum(target.alone for target in targets)


@pytest.mark.parametrize(
    ("step", "unsent", "sent"),
    [
        (counts, 0, 0),
        (by_statistics, 1, 1),
        (by_count_of_positives, 1, 0),
        (by_what_is_replaced, 1, 0),
        (by_an_attribute_of_two_modules, 1, 1),
    ],
)
def test_each_rank_decides_by_buffers_that_are_its_own(
    two_ranks: Pool, step: Callable[..., Any], unsent: int, sent: int
) -> None:
    """Each forward begins with rank 0's buffers where they are sent."""
    for sends, expected in ((False, unsent), (True, sent)):
        kind = graphopt.DataParallel(broadcast_buffers=sends)
        assert two_ranks.run(_decided_alone_on_rank, step, kind) == [expected] * 2


def test_each_rank_decides_by_buffers_that_do_not_begin_alike(two_ranks: Pool) -> None:
    kind = graphopt.DataParallel(broadcast=False, broadcast_buffers=False)
    assert two_ranks.run(_decided_alone_on_rank, counts, kind) == [1, 1]
