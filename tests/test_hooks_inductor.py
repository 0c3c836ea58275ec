"""Pipelines in Inductor's places for passes: composition, restoring, caches, compiled results."""

from __future__ import annotations

import copy
import operator
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional as F

from graphopt import PassManager, PassRegistry, graph_optimization_pass
from graphopt.errors import PipelineSyntaxError, VerificationError
from graphopt.graph_utils import call_function_with_meta, get_output, phase_of
from graphopt.hooks import backend, graph_kind, inductor_pass, inductor_passes
from graphopt.manager import Pass, PassCallback, PassContext, applied_passes

with warnings.catch_warnings():  # parts of Inductor are deprecated parts of torch
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._inductor.compile_fx

# What torch itself warns of while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a"),
]

aten = torch.ops.aten

SLOTS = {
    "post_grad_pre": "post_grad_custom_pre_pass",
    "post_grad": "post_grad_custom_post_pass",
    "joint_pre": "joint_custom_pre_pass",
    "joint_post": "joint_custom_post_pass",
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """No compiled code from other tests, and no processes that compile in the background."""
    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


class Theirs(CustomGraphPass):
    """A pass that somebody else registered."""

    def __init__(self, notes: list[Any], name: str = "theirs") -> None:
        self._notes, self._name = notes, name

    def __call__(self, graph: fx.Graph) -> None:
        self._notes.append(self._name)

    def uuid(self) -> Any:
        return self._name


# A list of strings is a plain value, and so a part of a uuid; one of objects is not.
def noting(notes: list[Any], name: str = "ours") -> Pass:
    @graph_optimization_pass(registry=PassRegistry(), name=name)
    def note(gm: fx.GraphModule) -> None:
        notes.append(name)

    return note


def plain(registry: PassRegistry | None = None) -> Pass:
    @graph_optimization_pass(registry=registry or PassRegistry())
    def plain_pass(gm: fx.GraphModule, size: int = 1) -> None: ...

    return plain_pass


def small_graph() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: x + x)


def registered(slot: str) -> Any:
    return getattr(config, SLOTS[slot])


@pytest.mark.parametrize("slot", SLOTS)
def test_a_pipeline_is_registered_and_taken_back(slot: str) -> None:
    notes: list[Any] = []
    with inductor_passes(**{slot: noting(notes)}):
        others = [other for other in SLOTS if other != slot]
        assert [registered(other) for other in others] == [None, None, None]
        gm = small_graph()
        registered(slot)(gm.graph)
        assert applied_passes(gm) == ["ours"]
    assert notes == ["ours"]
    assert registered(slot) is None


def test_what_was_registered_runs_first_and_comes_back() -> None:
    notes: list[Any] = []
    theirs = Theirs(notes)
    with config.patch(post_grad_custom_post_pass=theirs):
        with inductor_passes(post_grad=noting(notes, "first")):
            with inductor_passes(post_grad=noting(notes, "second")):
                registered("post_grad")(small_graph().graph)
                assert notes == ["theirs", "first", "second"]
            notes.clear()
            registered("post_grad")(small_graph().graph)
            assert notes == ["theirs", "first"]
        assert registered("post_grad") is theirs
    assert registered("post_grad") is None


def test_an_exception_takes_pipelines_back_as_well() -> None:
    with pytest.raises(LookupError), inductor_passes(joint_pre=plain(), post_grad=plain()):
        raise LookupError
    assert [registered(slot) for slot in SLOTS] == [None] * 4


def test_nothing_is_registered_if_a_pipeline_is_wrong() -> None:
    with (
        pytest.raises(PipelineSyntaxError, match="there is no pass 'no_such'"),
        inductor_passes(joint_pre=plain(), post_grad="no_such"),
    ):
        pass
    assert [registered(slot) for slot in SLOTS] == [None] * 4


def test_a_made_pass_can_be_registered() -> None:
    made = inductor_pass(plain())
    with inductor_passes(joint_post=made):
        assert registered("joint_post") is made


def test_uuids_are_combined() -> None:
    ours = inductor_pass(plain())
    with config.patch(post_grad_custom_pre_pass=Theirs([])), inductor_passes(post_grad_pre=ours):
        both = registered("post_grad_pre").uuid()
    with (
        config.patch(post_grad_custom_pre_pass=Theirs([], "others")),
        inductor_passes(post_grad_pre=ours),
    ):
        assert registered("post_grad_pre").uuid() != both
    assert both == ("theirs", ours.uuid())


@pytest.mark.parametrize("theirs", [lambda graph: None, Theirs([], "")])
def test_without_one_uuid_there_is_none(theirs: Any) -> None:
    with config.patch(post_grad_custom_pre_pass=theirs), inductor_passes(post_grad_pre=plain()):
        assert registered("post_grad_pre").uuid() is None
    with inductor_passes(post_grad_pre=noting([])):  # it closes over a list
        assert registered("post_grad_pre").uuid() is not None
    with inductor_passes(post_grad_pre=noting([object()])):
        assert registered("post_grad_pre").uuid() is None


@pytest.mark.skipif(
    "CustomInferenceAwareGraphPass" not in dir(custom_graph_pass), reason="not in this torch"
)
def test_passes_that_ask_whether_it_is_inference_are_told() -> None:
    notes: list[Any] = []

    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            notes.append(is_inference)

        def uuid(self) -> None:
            return None

    with (
        config.patch(post_grad_custom_post_pass=[Aware(), Theirs(notes)]),
        inductor_passes(post_grad=plain()),
    ):
        product(torch.ones(2, 2), torch.ones(2, 2))
    assert notes == [True, "theirs"]


def product(x: Tensor, w: Tensor, **options: Any) -> Tensor:
    """A product, compiled anew. It needs no kernel of Inductor's own, so that this is quick."""
    torch._dynamo.reset()
    return torch.compile(lambda x, w: x @ w, fullgraph=True, **options)(x, w)


def test_passes_see_every_kind_of_graph() -> None:
    seen: list[Any] = []

    def watching(place: str) -> Pass:
        @graph_optimization_pass(registry=PassRegistry(), name=f"watch_{place}")
        def watch(gm: fx.GraphModule) -> None:
            seen.append((place, graph_kind(gm)))

        return watch

    passes = {slot: watching(slot) for slot in SLOTS}
    with (
        config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        inductor_passes(**passes),
    ):
        product(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).sum().backward()
        training = seen.copy()
        seen.clear()
        product(torch.ones(2, 2), torch.ones(2, 2))
    assert training[:2] == [("joint_pre", "joint"), ("joint_post", "joint")]
    assert training[2:] == [
        (slot, kind) for kind in ("forward", "backward") for slot in ("post_grad_pre", "post_grad")
    ]
    places = ["joint_pre", "joint_post", "post_grad_pre", "post_grad"]
    assert seen == [(place, "inference") for place in places]


def unequal(registry: PassRegistry) -> Pass:
    @graph_optimization_pass(registry=registry)
    def return_an_input(gm: fx.GraphModule) -> None:
        (first, *_) = gm.graph.nodes
        get_output(gm.graph).args = ((first,),)

    return return_an_input


def test_a_refused_pass_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, w = torch.randn(2, 2), torch.randn(2, 2)
    with (
        inductor_passes(post_grad=unequal(PassRegistry())),
        pytest.raises(Exception, match="pass 'return_an_input' was refused") as caught,
    ):
        product(x, w)
    causes = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert any(isinstance(cause, VerificationError) for cause in causes) or (
        "VerificationError" in str(caught.value)
    )
    with inductor_passes(post_grad=unequal(PassRegistry()), on_error="skip"):
        assert torch.equal(product(x, w), x @ w)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what Inductor compiles."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def lookups(**options: Any) -> dict[str, int]:
    """What the caches of Inductor and AOTAutograd say to one compilation of a forward."""
    counters.clear()
    product(torch.ones(2, 2), torch.ones(2, 2), **options)
    found = {**counters["inductor"], **counters["aot_autograd"]}
    return {
        name.removeprefix("autograd_").removeprefix("fxgraph_"): found[name]
        for name in sorted(found)
        if name.partition("_")[0] in ("autograd", "fxgraph") and not name.endswith("saved")
    }


MISS, HIT, BYPASS = {"cache_miss": 1}, {"cache_hit": 1}, {"cache_bypass": 1}


def test_caches_know_pipelines(cache: Path) -> None:
    def ours(**given: Any) -> dict[str, Any]:
        return {"backend": backend, "options": {"pipeline": [(plain(), given)]}}

    assert lookups(**ours()) == MISS
    assert lookups(**ours()) == HIT
    assert lookups(**ours(size=2)) == MISS
    assert lookups(**ours(size=2)) == HIT
    assert lookups() == MISS
    assert lookups(backend=backend, options={"pipeline": "none"}) == HIT
    with inductor_passes(post_grad="comm_fusion_with_concat"):
        assert lookups() == MISS
        assert lookups() == HIT
        assert lookups(**ours()) == MISS
        assert lookups(**ours()) == HIT
    opaque = {"backend": backend, "options": {"pipeline": noting([object()])}}
    assert lookups(**opaque) == BYPASS
    assert lookups(**opaque) == BYPASS


SCRIPT = """
import torch
from torch._dynamo.utils import counters
from cached_pass import the_pass

x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
for size in SIZES:
    torch._dynamo.reset()
    options = {"pipeline": [(the_pass, {"size": size})]}
    run = torch.compile(lambda x, w: x @ w, backend="graphopt", options=options)
    run(x, w).sum().backward()
print(w.grad.sum().item(), counters["aot_autograd"]["autograd_cache_hit"])
"""
CACHED_PASS = """
from graphopt import graph_optimization_pass
from graphopt.hooks import graph_kind

@graph_optimization_pass()
def the_pass(gm, size: int):
    print(size, graph_kind(gm))
"""


@pytest.mark.full
def test_a_second_process_takes_what_the_first_compiled(cache: Path) -> None:
    (cache / "cached_pass.py").write_text(CACHED_PASS)

    def run(sizes: str) -> list[str]:
        command = [sys.executable, "-c", SCRIPT.replace("SIZES", sizes)]
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        result = subprocess.run(
            command, cwd=cache, env=environment, check=True, capture_output=True, text=True
        )
        return result.stdout.splitlines()

    assert run("[1]") == ["1 forward", "1 backward", "8.0 0"]
    assert run("[1, 2]") == ["2 forward", "2 backward", "16.0 1"]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.conv(x))).mean((2, 3)))


# It makes a zero of a negative zero.
@graph_optimization_pass(registry=PassRegistry(), changes_numerics=True)
def add_nothing(gm: fx.GraphModule) -> int:
    """Add zeros to results, with operators that Inductor decomposes and has no code for."""
    output = get_output(gm.graph)
    changed = 0
    for node in dict.fromkeys(output.all_input_nodes):
        value = node.meta["val"]
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim():
            continue
        with gm.graph.inserting_before(output):
            zeros = call_function_with_meta(gm.graph, aten.new_zeros.default, (node, value.shape))
            total = call_function_with_meta(gm.graph, aten.add.Tensor, (node, zeros), like=node)
            parts = (total, value.shape[0])
            split = call_function_with_meta(gm.graph, aten.unsafe_split.Tensor, parts)
            whole = call_function_with_meta(gm.graph, operator.getitem, (split, 0))
        output.replace_input_with(node, whole)
        changed += 1
    return changed


def trained(model: nn.Module, run: Callable[..., Any], inputs: dict[str, Tensor]) -> list[Tensor]:
    """A loss, and what its backward leaves."""
    torch.manual_seed(1)
    loss = run(**inputs)
    loss.backward()
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None), *buffers]


def assert_near_eager(model: nn.Module, inputs: dict[str, Tensor], loss: Callable[..., Any]) -> int:
    """Train a step both ways. Returns how many results the pass changed."""
    twin = copy.deepcopy(model)
    expected = trained(twin, lambda **given: loss(twin, **given), inputs)
    changes: list[int] = []

    class Count(PassCallback):
        def after_pass(self, context: PassContext) -> None:
            changes.append(context.record.changes or 0)

    manager = PassManager([add_nothing], callbacks=[Count()])
    options = {"pipeline": manager, "fallback_random": True}
    run = torch.compile(lambda **given: loss(model, **given), backend=backend, options=options)
    torch.testing.assert_close(trained(model, run, inputs), expected)
    assert len(changes) >= 2  # a forward and a backward, for each graph that Dynamo finds
    return sum(changes)


def test_a_conv_net_trains_as_in_eager_mode() -> None:
    inputs = {"x": torch.randn(3, 2, 6, 6)}
    changes = assert_near_eager(ConvNet(), inputs, lambda model, x: model(x).square().mean())
    assert changes > 6


@pytest.mark.full
@pytest.mark.hf
def test_a_hugging_face_model_trains_as_in_eager_mode() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'bench'")
    sizes = {"vocab_size": 48, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    tokens = torch.randint(0, 48, (2, 8))
    changes = assert_near_eager(
        model, {"tokens": tokens}, lambda model, tokens: model(tokens, labels=tokens).loss
    )
    assert changes > 12


def test_passes_know_the_phase_of_a_node_in_every_kind_of_graph() -> None:
    seen: dict[tuple[str, str | None], set[str | None]] = {}

    def watching(place: str) -> Pass:
        @graph_optimization_pass(registry=PassRegistry(), name=f"phases_{place}")
        def watch(gm: fx.GraphModule) -> None:
            for node in gm.graph.nodes:
                phases = seen.setdefault((place, graph_kind(gm)), set())
                phases |= {phase_of(node)} if node.op == "call_function" else set()

        return watch

    with (
        config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        inductor_passes(**{slot: watching(slot) for slot in SLOTS}),
    ):
        product(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).sum().backward()
        product(torch.ones(2, 2), torch.ones(2, 2))
    assert seen.pop(("joint_pre", "joint")) == {"forward", "backward"}
    for (_, kind), phases in seen.items():
        assert phases <= {"forward", "backward", None}
        if kind in ("forward", "backward"):
            assert phases == {kind}
        elif kind == "inference":
            assert phases == {None}
