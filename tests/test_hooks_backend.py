"""torch.compile(backend="graphopt"): what a model computes, which graphs passes see, and errors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from graphopt import PassManager, PassRegistry, graph_optimization_pass
from graphopt.errors import VerificationError
from graphopt.graph_utils import call_function_with_meta, find_nodes, get_output, is_operator
from graphopt.hooks import backend, graph_kind
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import Pass
from toy_passes import declare, double_negation
from twins import assert_same


@pytest.fixture(autouse=True)
def _no_compiled_code_is_left() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.conv(x)))
        return self.head(self.drop(x).mean((2, 3)))


class Broken(nn.Module):
    """Dynamo compiles what comes before the break and what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(F.gelu(x))


def images(size: int) -> Tensor:
    return torch.randn(size, 2, 6, 6)


def rows(size: int) -> Tensor:
    return torch.randn(size, 4)


def negating() -> PassManager:
    return PassManager([double_negation(PassRegistry())])


def train(model: nn.Module, forward: Callable[..., Tensor], batches: list[Tensor]) -> Any:
    """Everything that training leaves: losses, gradients, state, random numbers."""
    torch.manual_seed(1)
    losses, gradients = [], []
    for batch in batches:
        model.zero_grad()
        loss = forward(batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        gradients.append([] if batch.grad is None else [batch.grad.clone()])
        with torch.no_grad():
            losses.append(forward(batch))
    model.eval()
    losses.append(forward(batches[0]).detach())
    model.train()
    return losses, gradients, model.state_dict(), torch.get_rng_state()


def frozen(model: nn.Module) -> nn.Module:
    next(model.parameters()).requires_grad_(False)
    return model


TRAINING: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], dict[str, Any]]] = {
    "conv net": (ConvNet, images, {}),
    "graph break": (Broken, rows, {}),
    "dynamic shapes": (ConvNet, images, {"dynamic": True}),
    "frozen parameter": (lambda: frozen(ConvNet()), images, {}),
    "input with gradient": (Broken, lambda size: rows(size).requires_grad_(), {}),
}


# Dynamo looks at `.grad` of what it continues with after a graph break.
AFTER_A_BREAK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a")


@AFTER_A_BREAK
@pytest.mark.parametrize("case", TRAINING)
def test_without_lowering_the_bits_are_those_of_aot_eager(case: str) -> None:
    make, batch, options = TRAINING[case]
    model = make()
    twin = copy.deepcopy(model)
    batches = [batch(size) for size in (4, 6, 7)]
    expected = train(twin, torch.compile(twin, backend="aot_eager", **options), batches)
    for entry in batches:
        entry.grad = None
    ours = {"lower": None, "pipeline": negating()}
    compiled = torch.compile(model, backend="graphopt", options=ours, **options)
    assert_same(train(model, compiled, batches), expected, case)


@AFTER_A_BREAK
def test_under_autocast() -> None:
    model = Broken()
    twin = copy.deepcopy(model)

    def run(model: nn.Module, **options: Any) -> list[Tensor]:
        compiled = torch.compile(model, **options)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(torch.ones(3, 4)).square().mean()
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    ours = run(model, backend="graphopt", options={"lower": None, "pipeline": negating()})
    assert_same(ours, run(twin, backend="aot_eager"), "autocast")


def compiled(function: Callable[..., Any], pipeline: Any, **options: Any) -> Callable[..., Any]:
    """Compiled with graphs that run as they are."""
    options = {"lower": None, "pipeline": pipeline, **options}
    return torch.compile(function, backend=backend, fullgraph=True, options=options)


def square(x: Tensor) -> Tensor:
    return F.gelu(x).square()


def gate(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x) * y


def watch(registry: PassRegistry, name: str = "watching") -> tuple[Pass, list[str | None]]:
    """A pass that notes the kind of each graph."""
    seen: list[str | None] = []

    @graph_optimization_pass(registry=registry, name=name)
    def watching(gm: fx.GraphModule) -> None:
        seen.append(graph_kind(gm))

    return watching, seen


def test_passes_know_which_graph_it_is() -> None:
    pass_, seen = watch(PassRegistry())
    run = compiled(square, PassManager([pass_]))
    run(torch.ones(3, requires_grad=True)).sum().backward()
    run(torch.ones(3))
    assert seen == ["forward", "backward", "inference"]


def test_a_captured_step_has_no_kind() -> None:
    assert graph_kind(fx.symbolic_trace(square)) is None


def test_passes_change_what_runs() -> None:
    @graph_optimization_pass(registry=PassRegistry())
    def leave_gelu_out(gm: fx.GraphModule) -> None:
        for node in find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::gelu")):
            node.replace_all_uses_with(node.all_input_nodes[0])

    run = compiled(square, PassManager([leave_gelu_out], verify="off"))
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(run(x), x * x)
    assert not torch.equal(square(x), x * x)


def breaking(registry: PassRegistry) -> Pass:
    @graph_optimization_pass(registry=registry)
    def open_the_gate(gm: fx.GraphModule) -> None:
        """Return the gelu, which does not depend on the second input."""
        (gelu,) = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::gelu"))
        get_output(gm.graph).args = ((gelu,),)

    return open_the_gate


def test_a_pass_that_breaks_a_graph_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = compiled(gate, PassManager([breaking(PassRegistry())]))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        run(torch.ones(3), torch.ones(3))
    assert isinstance(caught.value.inner_exception, VerificationError)
    assert "pass 'open_the_gate' was refused" in str(caught.value)


def test_a_refused_pass_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    registry = PassRegistry()
    first, seen = watch(registry)
    second, unseen = watch(registry, "watching_later")
    manager = PassManager([first, breaking(registry), second], registry=registry)
    run = compiled(gate, manager, on_error="skip")
    x, y = torch.randn(2, 3)
    assert torch.equal(run(x, y), gate(x, y))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "goes on without a pass: pass 'open_the_gate' was refused" in warning
    assert (len(seen), len(unseen)) == (1, 0)


@pytest.mark.filterwarnings("ignore:Raw SymInt value")
def test_sizes_that_are_not_known_are_not_written_into_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    @graph_optimization_pass(registry=PassRegistry())
    def view_as_it_is(gm: fx.GraphModule) -> None:
        (node,) = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::gelu"))
        shape = list(node.meta["val"].shape)
        users = list(node.users)
        with gm.graph.inserting_after(node):
            view = call_function_with_meta(
                gm.graph, torch.ops.aten.view.default, (node, shape), like=node
            )
        for user in users:
            user.replace_input_with(node, view)

    ours = {"lower": None, "pipeline": PassManager([view_as_it_is])}
    run = torch.compile(square, backend=backend, dynamic=True, options=ours)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="size that is not known"):
        run(torch.ones(3))
    torch._dynamo.reset()
    run = torch.compile(square, backend=backend, dynamic=False, options=ours)
    assert torch.equal(run(torch.ones(3)), square(torch.ones(3)))


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    records = [(r.levelno, r.getMessage()) for r in caplog.records]
    return [(level, text) for level, text in records if "left out" in text]


def test_passes_for_whole_steps_are_left_out_with_one_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "graphopt")
    registry = PassRegistry()

    @graph_optimization_pass(registry=registry)
    def moves_to_the_next_step(gm: IterGraphModule) -> None:
        raise AssertionError("this is no IterGraphModule")

    @graph_optimization_pass(registry=registry, whole_step=True)
    def needs_the_optimizer(gm: fx.GraphModule) -> None:
        raise AssertionError("here is no optimizer")

    needs_another = declare(registry, "needs_another", ["needs_the_optimizer"])
    pass_, seen = watch(registry)
    passes = [moves_to_the_next_step, needs_the_optimizer, needs_another, pass_]
    for size in (2, 3):
        torch._dynamo.reset()
        run = compiled(square, PassManager(passes, registry=registry))
        run(torch.ones(size, requires_grad=True)).sum().backward()
    assert len(seen) == 4
    ((level, text),) = messages(caplog)
    assert level == logging.WARNING
    assert "moves_to_the_next_step, needs_the_optimizer, needs_another\n" in text
    # Another pipeline is another message.
    compiled(square, PassManager([needs_the_optimizer]))(torch.ones(5))
    assert len(messages(caplog)) == 2


def test_nobody_asked_for_what_the_default_pipeline_leaves_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "graphopt")
    from graphopt.hooks import partial

    partial._say_skipped.cache_clear()
    torch.compile(square, backend=backend, options={"lower": None})(torch.ones(3))
    ((level, text),) = messages(caplog)
    assert level == logging.INFO
    left_out = (
        "remove_copy_from_optimizer, drop_unread_gradients, schedule_gathers,"
        " iter_move_grads_and_optimizers"
    )
    assert f"{left_out}\n" in text
    applied = [r.getMessage().partition("(")[0] for r in caplog.records[1:]]
    assert applied[0] == "comm_fusion_with_concat"


def test_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = PassRegistry()
    _, seen = watch(registry)
    monkeypatch.setenv("GRAPHOPT_DISABLE", "watching")
    compiled(square, PassManager("watching", registry=registry))(torch.ones(3))
    assert seen == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipelin": "none"}, "no option 'pipelin'; did you mean 'pipeline'"),
        ({"max_autotun": True}, "no option 'max_autotun'; did you mean 'max_autotune'"),
        ({"max_autotune": True, "lower": None}, "no option 'max_autotune'"),
        ({"lower": "triton"}, "lower='triton': 'inductor' or None"),
        ({"on_error": "ignore"}, "on_error='ignore': one of raise, skip"),
        ({"pipeline": "comm_fusion"}, "there is no pass 'comm_fusion'"),
        ({"pipeline": "defualt"}, "did you mean 'default'"),
        ({"verify": "maybe"}, "verify='maybe'"),
    ],
)
def test_options_that_cannot_be_understood(options: dict[str, Any], message: str) -> None:
    run = torch.compile(square, backend=backend, options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        run(torch.ones(3))


def test_a_mode_is_for_inductor() -> None:
    gm = fx.symbolic_trace(square)
    with pytest.raises(ValueError, match="mode='max-autotune' is for Inductor"):
        backend(gm, [torch.ones(3)], mode="max-autotune", options={"lower": None})


def test_torch_finds_the_backend_by_name() -> None:
    assert "graphopt" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("graphopt") is backend
