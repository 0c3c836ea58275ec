"""Saved graphs: everything that passes look at comes back, in a process that knows no model."""

from __future__ import annotations

import io
import json
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

import graphopt
from graphopt import _compat
from graphopt.graph_utils import call_function_with_meta, get_output, is_operator
from graphopt.iter_graph import IterGraphModule
from graphopt.readable import graph_text
from graphopt.saved import SavedGraphError, load_description, load_graph, save_graph
from zoo import MODELS, OPTIMIZERS, train_step

ROOT = Path(__file__).resolve().parent.parent
aten = torch.ops.aten

KEPT = ("phase", "provenance", "kind", "fqn")


def captured(model: str = "mlp", optimizer: str = "adamw-loop") -> fx.GraphModule:
    """A step of the zoo that has state, as a graph."""
    case = MODELS[model]
    module = case.make()
    chosen = OPTIMIZERS[optimizer](module.parameters())
    train_step(module, chosen, *case.batch(0))
    return graphopt.capture(train_step, module, chosen, *case.batch(1)).graph_module


def described(value: Any) -> list[Any]:
    """Leaves of a node's value: kinds of tensors and numbers."""
    return [
        (v.dtype, v.device, v.shape, v.stride(), v.storage_offset(), v.requires_grad)
        if isinstance(v, torch.Tensor)
        else type(v)
        for v in tree_leaves(value)
    ]


def shared(graph: fx.Graph) -> list[int]:
    """For each tensor of a graph in order, the number of the first that shares its storage."""
    tensors = [
        leaf
        for node in graph.nodes
        for leaf in tree_leaves(node.meta.get("val"))
        if isinstance(leaf, torch.Tensor)
    ]
    first: dict[int, int] = {}
    return [first.setdefault(_compat.storage_key(t), i) for i, t in enumerate(tensors)]


def module_names(node: fx.Node) -> list[str]:
    return [name for name, _ in node.meta.get("nn_module_stack", {}).values()]


def assert_same_graph(actual: fx.GraphModule, expected: fx.GraphModule) -> None:
    pairs = list(zip(actual.graph.nodes, expected.graph.nodes, strict=True))
    for a, e in pairs:
        assert (a.name, a.op, a.target) == (e.name, e.op, e.target)
        assert str((a.args, a.kwargs)) == str((e.args, e.kwargs))
        assert described(a.meta.get("val")) == described(e.meta.get("val")), a.name
        assert [a.meta.get(key) for key in KEPT] == [e.meta.get(key) for key in KEPT]
        if "source" in e.meta:
            assert (str(a.meta["source"]), a.meta["source"].function) == (
                str(e.meta["source"]),
                e.meta["source"].function,
            )
        assert module_names(a) == module_names(e)
    assert shared(actual.graph) == shared(expected.graph)
    assert actual.code == expected.code


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("mlp", "adamw-loop"),
        ("gpt", "adamw-fused"),
        ("convnet", "sgd-momentum-foreach"),
        ("checkpointed", "nadam-loop"),
        ("shared-storage", "rprop-foreach"),
    ],
)
def test_round_trip(model: str, optimizer: str, tmp_path: Path) -> None:
    original = captured(model, optimizer)
    save_graph(original, tmp_path / "new folder" / "step.pt")
    loaded = load_graph(tmp_path / "new folder" / "step.pt")
    assert type(loaded).__mro__[1] is fx.GraphModule
    assert_same_graph(loaded, original)
    assert graph_text(loaded) == graph_text(original)


def test_a_loaded_graph_runs_like_the_original(tmp_path: Path) -> None:
    original = captured()
    save_graph(original, tmp_path / "step.pt")
    loaded = load_graph(tmp_path / "step.pt")
    values = [node.meta["val"] for node in original.graph.nodes if node.op == "placeholder"]
    real = [torch.full(v.shape, 0.5 if v.is_floating_point() else 1, dtype=v.dtype) for v in values]
    twin = [x.clone() for x in real]
    with torch.no_grad():
        expected, actual = original(*real), loaded(*twin)
    assert all(map(torch.equal, tree_leaves(actual), tree_leaves(expected)))
    assert all(map(torch.equal, twin, real))


def test_new_nodes_can_be_made_in_a_loaded_graph(tmp_path: Path) -> None:
    """Values live in one fake mode, symbolic numbers are known to it, views are views."""
    save_graph(captured(), tmp_path / "step.pt")
    graph = load_graph(tmp_path / "step.pt").graph
    number = next(n for n in graph.nodes if is_operator(n.target, "aten::_local_scalar_dense"))
    weight = next(n for n in graph.nodes if n.meta.get("kind") == "parameter")
    with graph.inserting_before(get_output(graph)):
        scaled = call_function_with_meta(graph, operator.mul, (number, 2.0))
        product = call_function_with_meta(graph, aten.mul.Tensor, (weight, scaled))
        view = call_function_with_meta(graph, aten.t.default, (weight,))
    assert isinstance(scaled.meta["val"], torch.SymFloat)
    assert product.meta["val"].shape == weight.meta["val"].shape
    keys = [_compat.storage_key(node.meta["val"]) for node in (view, weight, product)]
    assert keys[0] == keys[1] != keys[2]


LOAD_ELSEWHERE = """
import sys
from graphopt.readable import graph_text
from graphopt.saved import load_graph
graph = load_graph(sys.argv[1])
assert "zoo" not in sys.modules
source = next(n.meta["source"] for n in graph.graph.nodes if "source" in n.meta)
print(source.code)
print(graph_text(graph), end="")
"""


def test_another_process_needs_no_model(tmp_path: Path) -> None:
    """Nor the program's files: lines are saved with their text."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "def step(model, x):\n"
        "    loss = model(x).sum()  # a comment\n"
        "    return loss\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(program.read_text(), str(program), "exec"), namespace)
    graph = graphopt.capture(namespace["step"], nn.Linear(3, 2), torch.randn(4, 3)).graph_module
    save_graph(graph, tmp_path / "step.pt")
    program.unlink()
    command = [sys.executable, "-c", LOAD_ELSEWHERE, str(tmp_path / "step.pt")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "loss = model(x).sum()  # a comment\n" + graph_text(graph)


LOOK = """
import sys
from graphopt.readable import graph_text
from graphopt.saved import load_description
print(graph_text(load_description(sys.argv[1])))
heavy = {"sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def test_looking_at_a_graph_is_light(tmp_path: Path) -> None:
    """It needs no tracer of torch's, which take longer to import than torch itself."""
    save_graph(captured(), tmp_path / "step.pt")
    command = [sys.executable, "-c", LOOK, str(tmp_path / "step.pt")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "[]\n")
    assert "aten.mm.default" in result.stdout


@pytest.mark.parametrize("make", [lambda: captured("gpt", "adamw-fused"), lambda: with_late_work()])
def test_a_description_looks_like_the_graph(
    make: Callable[[], fx.GraphModule], tmp_path: Path
) -> None:
    save_graph(make(), tmp_path / "step.pt")
    loaded, looked_at = load_graph(tmp_path / "step.pt"), load_description(tmp_path / "step.pt")
    assert graph_text(looked_at) == graph_text(loaded)
    assert str(graphopt.simulate(looked_at)) == str(graphopt.simulate(loaded))


def hand_made(*nodes: tuple[Callable[..., Any], tuple[Any, ...]]) -> fx.GraphModule:
    """A graph that applies each function to ``(x, *arguments)``."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(4, 4)
    results = [graph.call_function(function, (x, *args)) for function, args in nodes]
    graph.output(results)
    return fx.GraphModule(nn.Module(), graph)


def test_arguments_of_every_kind(tmp_path: Path) -> None:
    values = (
        None, True, 3, -2.5, float("inf"), 1 + 2j, "text", (1, [2, (3,)]), {"key": [1], 2: None},
        slice(1, None, 2), ..., torch.float16, torch.device("cuda:1"), torch.channels_last,
        torch.strided,
    )  # fmt: skip
    original = hand_made((operator.getitem, (values,)))
    save_graph(original, tmp_path / "graph.pt")
    loaded = load_graph(tmp_path / "graph.pt")
    assert list(loaded.graph.nodes)[1].args[1] == values


def test_constants_and_generators(tmp_path: Path) -> None:
    original = hand_made((aten.abs.default, ()))
    original.first, original.inner = torch.arange(6.0), nn.Module()
    original.inner.view = original.first[2:4]
    original.inner.generator = torch.Generator()
    with original.graph.inserting_before(get_output(original.graph)):
        for target in ("first", "inner.view", "inner.generator"):
            original.graph.create_node("get_attr", target)
    save_graph(original, tmp_path / "graph.pt")
    loaded = load_graph(tmp_path / "graph.pt")
    assert torch.equal(loaded.first, original.first)
    assert torch.equal(loaded.inner.view, original.inner.view)
    assert _compat.storage_key(loaded.inner.view) == _compat.storage_key(loaded.first)
    assert isinstance(loaded.inner.generator, torch.Generator)


@pytest.mark.parametrize("make", [torch.conj, torch._neg_view, lambda t: t.expand(3, 2).t()])
def test_views_of_every_kind(make: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    original = hand_made((aten.abs.default, ()))
    x = next(iter(original.graph.nodes))
    with _compat.new_fake_mode():
        x.meta["val"] = make(torch.zeros(2, dtype=torch.complex64))
    save_graph(original, tmp_path / "graph.pt")
    (value,) = [n.meta["val"] for n in load_graph(tmp_path / "graph.pt").graph.nodes if n.meta]
    assert described(value) == described(x.meta["val"])
    assert (value.is_conj(), value.is_neg()) == (x.meta["val"].is_conj(), x.meta["val"].is_neg())


def with_late_work() -> IterGraphModule:
    """`y = x * w`; `w` is updated with `w + x` one iteration late."""
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    for node, kind in ((w, "parameter"), (x, "user_input")):
        node.meta.update(val=torch.zeros(2), kind=kind)
    y = call_function_with_meta(graph, aten.mul.Tensor, (x, w))
    new = call_function_with_meta(graph, aten.add.Tensor, (w, x))
    update = call_function_with_meta(graph, aten.copy_.default, (w, new))
    graph.output(([y], [update], []))
    module = IterGraphModule(fx.GraphModule(nn.Module(), graph))
    first, *late = [n for n in module.graph.nodes if n.op == "call_function"]
    module.graph.move_to_next_iter_before(late, first)
    return module


@pytest.mark.parametrize("frozen", [False, True])
def test_late_nodes(frozen: bool, tmp_path: Path) -> None:
    original = with_late_work()
    if frozen:
        original.finalize_setup()
    save_graph(original, tmp_path / "graph.pt")
    loaded = load_graph(tmp_path / "graph.pt")
    assert isinstance(loaded, IterGraphModule)
    assert not loaded.frozen, "passes are to be tried on it"
    assert (
        {n.name: d.name for n, d in loaded.graph.late.items()}
        == {n.name: d.name for n, d in original.graph.late.items()}
        != {}
    )
    assert loaded.main_gm.code == original.main_gm.code


def python_function(x: torch.Tensor) -> torch.Tensor:
    return x


def submodule_call() -> fx.GraphModule:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))


def odd_argument() -> fx.GraphModule:
    return hand_made((operator.getitem, ({1},)))


def sparse_value() -> fx.GraphModule:
    original = hand_made((aten.abs.default, ()))
    next(iter(original.graph.nodes)).meta["val"] = torch.eye(2).to_sparse()
    return original


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hand_made((python_function, ())), "%python_function cannot be saved: it calls"),
        (lambda: hand_made((torch.relu, ())), "which is not an operator"),
        (submodule_call, "%_0 cannot be saved: it is a call_module"),
        (odd_argument, "%getitem cannot be saved: {1} of type set"),
        (sparse_value, "%x cannot be saved: its value is a sparse"),
        (lambda: nn.Linear(2, 2), "a Linear is not a graph"),
    ],
)
def test_what_cannot_be_saved(make: Callable[[], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SavedGraphError) as caught:
        save_graph(make(), tmp_path / "graph.pt")
    assert message in str(caught.value)
    assert not (tmp_path / "graph.pt").exists()


def test_a_symbolic_shape_is_refused(tmp_path: Path) -> None:
    original = hand_made((aten.abs.default, ()))
    mode = _compat.new_fake_mode()
    with mode:
        value = torch.empty(_compat.new_unknown(mode, integer=True))
    next(iter(original.graph.nodes)).meta["val"] = value
    with pytest.raises(SavedGraphError, match="depends on data"):
        save_graph(original, tmp_path / "graph.pt")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_graph(tmp_path / "nothing.pt")


def saved_object(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"PK\x03\x04 cut off", saved_object({"weight": torch.zeros(2)})],
    ids=["empty", "text", "cut off", "checkpoint"],
)
def test_other_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(SavedGraphError, match="does not hold a graph, or is damaged"):
        load_graph(tmp_path / "file.pt")


class Harmful:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harm"),))


def test_loading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(hand_made(), "graph.pt")
    saved = torch.load("graph.pt", weights_only=True)
    torch.save({**saved, "tensors": Harmful()}, "graph.pt")
    with pytest.raises(SavedGraphError):
        load_graph("graph.pt")
    assert not Path("harm").exists()


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the contents of a saved graph."""
    saved = torch.load(path, weights_only=True)
    content = json.loads(saved["content"])
    change(content)
    torch.save({**saved, "content": json.dumps(content)}, path)


def node(number: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["graph"]["nodes"][number].update(changes)


DAMAGE: list[Callable[[dict[str, Any]], Any]] = [
    node(0, name="x; import os"),
    node(0, target="x=print(1)"),
    node(0, name="class"),
    node(0, op="call_module", target="os.system"),
    node(1, kwargs={"a)b": 1}),
    node(1, args=[{"node": 7}]),
    node(1, args=[{"dtype": "save"}]),
    node(1, args=[{"surprise": 1}]),
    node(0, meta={"val": {"tensor": {"dtype": "float32"}}}),
    lambda content: content["graph"]["storages"].__setitem__(0, 3),
    lambda content: content["graph"]["late"].append([1, 5]),
    lambda content: content.pop("graph"),
    lambda content: content["graph"]["nodes"].reverse(),
]


@pytest.mark.parametrize("change", DAMAGE)
def test_damaged_files(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    path = tmp_path / "graph.pt"
    save_graph(IterGraphModule(hand_made((aten.abs.default, ()))), path)
    rewrite(path, change)
    with pytest.raises(SavedGraphError, match="is damaged"):
        load_graph(path)


@pytest.mark.parametrize(
    "target", ["mine::operator.default", "os::system.default", "math.comb", "aten::mm.nothing"]
)
def test_unknown_operators(target: str, tmp_path: Path) -> None:
    save_graph(hand_made((aten.abs.default, ())), tmp_path / "graph.pt")
    rewrite(tmp_path / "graph.pt", node(1, target=target))
    with pytest.raises(
        SavedGraphError, match=r"%abs_default cannot be loaded: .* import the module"
    ):
        load_graph(tmp_path / "graph.pt")


def test_a_later_version(tmp_path: Path) -> None:
    path = tmp_path / "graph.pt"
    save_graph(hand_made(), path)
    torch.save({**torch.load(path, weights_only=True), "version": 99}, path)
    with pytest.raises(SavedGraphError, match="version 99 of the format"):
        load_graph(path)
