"""Imports go one way, torch's private parts stay in one package, `import graphopt` is light."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import graphopt

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("graphopt", "graphopt/passes", "graphopt/lowering")
    for path in (ROOT / folder).rglob("*.py")
}

# The layer above all others: it alone knows both the core and what is built on the core.
TOP = (
    "graphopt",
    "graphopt.__main__",
    "graphopt.cli",
    "graphopt.commands",
    "graphopt.demo",
    "graphopt.estimate",
    "graphopt.manager.discovery",
    "graphopt.stages",
    "graphopt.hooks",
    "graphopt.pipelining",
    "graphopt.step",
    "graphopt.testing",
)
BUILT_ON_CORE = ("graphopt.passes", "graphopt.lowering")
PRIVATE_TORCH_IS_IN = "graphopt._compat"

PUBLIC = {
    "graphopt": [
        "AssumptionFailedError",
        "AutoPipeline",
        "CaptureError",
        "CapturedStep",
        "CollectiveError",
        "DataParallel",
        "FileError",
        "GraphOptError",
        "IterGraph",
        "IterGraphModule",
        "IterationError",
        "LoweringError",
        "Manual",
        "ParallelismError",
        "PartitionError",
        "PassDefinitionError",
        "PassError",
        "PassManager",
        "PassOrderError",
        "PassRecord",
        "PassRegistry",
        "PipelineSyntaxError",
        "SpmdMismatchError",
        "TrainStep",
        "VerificationError",
        "ZeRO",
        "applied_passes",
        "callback",
        "capture",
        "compile",
        "enable_graph_optimization_dump",
        "graph_optimization_pass",
        "note",
        "parse_pipeline",
        "registry",
        "rewrite",
        "simulate",
    ],
    "graphopt.comm": [
        "BucketMember",
        "CommBlock",
        "bucket_members",
        "get_all_comm_blocks",
        "get_comm_block",
        "late_nodes",
        "parameters_of",
        "replace_collective",
        "wait_of",
    ],
    "graphopt.optim": [
        "AdamArgs",
        "ForeachAddBlock",
        "FusedAdamBlock",
        "FusedOptimizerBlock",
        "get_all_fused_optimizer_blocks",
        "get_fused_optimizer_block",
        "split_fused_optimizer",
    ],
    "graphopt.passes": [
        "comm_fusion_with_concat",
        "iter_move_grads_and_optimizers",
        "remove_copy_from_optimizer",
        "schedule_comm_wait",
    ],
    "graphopt.hooks": ["InductorPass", "backend", "graph_kind", "inductor_pass", "inductor_passes"],
    "graphopt.lowering": [
        "LoweredSubgraph",
        "Options",
        "TritonKernel",
        "compile_triton",
        "partial_lower",
    ],
    "graphopt.partition": ["Partition", "PartitionCycleError", "partition_graph", "split_module"],
    "graphopt.pipelining": [
        "LossReducer",
        "LossWrapper",
        "MultiUseParameterConfig",
        "Pipe",
        "PipeInfo",
        "PipeSequential",
        "Reducer",
        "Replicated",
        "SplitPoint",
        "TensorChunkSpec",
        "TrivialLossWrapper",
        "annotate_split_points",
        "balanced",
        "merge_chunks",
        "pipe_split",
        "pipeline",
        "split_args_kwargs_into_chunks",
        "stage_backward",
    ],
    "graphopt.testing": ["FakeRanks", "StepUnderTest", "check_pass", "fake_ranks"],
    "graphopt.graph_utils": [
        "call_function_with_meta",
        "find_all_descendants",
        "find_nodes",
        "get_output",
        "move_after",
        "move_before",
    ],
    "graphopt.tracing": ["CapturedStep", "InputSpec", "SourceLine", "capture"],
    "graphopt.verify": ["check_captured", "check_dependencies", "check_spmd", "dependency_graph"],
}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(), str(FILES[module]))


def absolute(node: ast.ImportFrom, module: str) -> str:
    """The module that a `from … import` names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def imports(module: str) -> Iterator[tuple[str, str, str]]:
    """(dotted name, local name, what the local name stands for) of every import in `module`."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.name, alias.asname or first, alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name, alias.asname or alias.name, name


def imported_modules(module: str) -> set[str]:
    """Modules of this project that `module` imports."""
    return {file for name, _, _ in imports(module) if (file := file_of(name))}


def file_of(name: str) -> str:
    """The module of this project that a dotted name leads to; empty if there is none."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name


def run_imports(module: str) -> set[str]:
    """Other modules that `module` imports when it runs, by `import_module` and in functions too."""
    names: set[str] = set()
    left: list[ast.AST] = [tree_of(module)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{absolute(node, module)}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names.update(a.value for a in node.args if isinstance(a, ast.Constant))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        else:
            left += ast.iter_child_nodes(node)
    return set(filter(None, map(file_of, names))) - {module}


def within(module: str, packages: tuple[str, ...]) -> bool:
    """Whether `module` is one of `packages` or inside one; `graphopt` stands for itself alone."""
    return any(
        module == package or (package != "graphopt" and module.startswith(f"{package}."))
        for package in packages
    )


def edges() -> Iterator[tuple[str, str]]:
    for module in FILES:
        for imported in imported_modules(module):
            yield module, imported


def test_all_modules_are_seen() -> None:
    assert {*TOP, *BUILT_ON_CORE, "graphopt.tracing.capture"} <= FILES.keys()


def test_only_the_top_layer_knows_passes_and_lowering() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, imported in edges()
        if within(imported, BUILT_ON_CORE)
        and not within(module, TOP)
        and module.split(".")[:2] != imported.split(".")[:2]
    ]
    assert wrong == []


def test_nothing_imports_the_top_layer_from_below() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, imported in edges()
        if within(imported, TOP) and not within(module, TOP)
    ]
    assert wrong == []


def test_no_circle_of_imports_has_more_than_two_files() -> None:
    """Imports within functions are imports; those for the type checker alone are not."""
    graph = nx.DiGraph((module, name) for module in FILES for name in run_imports(module))
    # `graphopt/__init__.py` re-exports, and its siblings in the top layer may use it.
    graph.remove_node("graphopt")
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 2]
    assert circles == []


def test_imports_by_name_and_within_functions_are_seen() -> None:
    assert "graphopt.viewing" in run_imports("graphopt")
    assert "graphopt.pipelining.stage.building" in run_imports("graphopt.pipelining.pipe.pipe")
    assert "graphopt.pipelining.stage.stage" not in run_imports("graphopt.pipelining.pipe.pipe")


def test_no_class_name_stands_twice() -> None:
    """A name says what a class is: two of one name are two things, or one thing done twice."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{module}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def dotted(node: ast.expr, local: dict[str, str]) -> str | None:
    """`fx.node.map_arg` as `torch.fx.node.map_arg`, if it begins with an imported name."""
    if isinstance(node, ast.Name):
        return local.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, local)
        return f"{base}.{node.attr}" if base else None
    return None


def torch_names(module: str) -> Iterator[str]:
    """Dotted names of torch that `module` imports or uses."""
    yield from (name for name, _, _ in imports(module))
    local = {bound: meaning for _, bound, meaning in imports(module)}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Attribute) and (name := dotted(node, local)):
            yield name


def is_private(name: str) -> bool:
    """Whether a dotted name of torch or functorch goes through a private part.

    Operator namespaces (`torch.ops._c10d_functional`) are public, and so are dunder names.
    """
    first, *rest = name.split(".")
    if first not in ("torch", "functorch") or rest[:1] == ["ops"]:
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in rest)


def test_private_torch_is_used_in_one_package_only() -> None:
    others = [module for module in FILES if not within(module, (PRIVATE_TORCH_IS_IN,))]
    names = {module: sorted(set(filter(is_private, torch_names(module)))) for module in others}
    private = {module: found for module, found in names.items() if found}
    assert private == {}, f"wrap these in {PRIVATE_TORCH_IS_IN}"


def test_private_names_are_recognised() -> None:
    assert is_private("torch._C")
    assert is_private("torch.utils._pytree.tree_map")
    assert is_private("functorch._src")
    assert not is_private("torch.ops._c10d_functional.all_reduce")
    assert not is_private("torch.__version__")
    assert not is_private("graphopt._compat")
    # The one module that may is where the rule would find most.
    assert any(is_private(name) for name in torch_names(PRIVATE_TORCH_IS_IN))


def printed_by(program: str) -> list[str]:
    """The words that a program prints in a process of its own."""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def modules_after(statement: str) -> set[str]:
    return set(printed_by(f"{statement}\nimport sys\nprint(*sys.modules)"))


HEAVY = ("torch._inductor", "torch._dynamo", "triton", "sympy", "transformers", "matplotlib")
LOADED_LATER = (
    "networkx",
    *(
        f"graphopt.{room}"
        for room in (
            "cost",
            "executable",
            "guards",
            "iter_graph",
            "lowering",
            "manager",
            "partition",
            "passes",
            "pipelining",
            "replicas",
            "rewriting",
            "schedule",
            "testing",
            "tracing",
            "verify",
            "viewing",
        )
    ),
)


def test_import_is_light() -> None:
    added = modules_after("import graphopt") - modules_after("import torch")
    assert [name for name in sorted(added) if name.startswith(HEAVY)] == []


def test_what_decorates_a_step_is_light() -> None:
    """What a program imports when it starts; a decorated step loads its passes and the capture."""
    added = modules_after("import torch, graphopt; graphopt.compile") - modules_after(
        "import torch"
    )
    rooms = (*HEAVY, *LOADED_LATER)
    assert [name for name in sorted(added) if name.startswith(rooms)] == []
    assert len(added) < 80
    assert len([name for name in added if not name.startswith("graphopt")]) < 20


GROUP = """
from pathlib import Path
import torch, torch.distributed as dist

def threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
started = threads()
import graphopt
model = torch.nn.Linear(2, 2)
step = graphopt.compile(lambda model, x: model(x).sum().backward())
step(model, torch.ones(1, 2))
del step
dist.destroy_process_group()
print(started, threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_destroyed_group_ends() -> None:
    """Also one that was made before torch.compile's tracer was imported. Its threads would run
    while Python ends."""
    before, after = map(int, printed_by(GROUP))
    assert before > 0 and after == 0


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module: str) -> None:
    exporting = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(exporting, name)] == []


def test_modules_need_no_import_of_their_own() -> None:
    code = "import graphopt; print(graphopt.cost.CostModel, graphopt.verify.check_dependencies)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_star_import_is_the_public_surface() -> None:
    assert sorted(graphopt.__all__) == sorted(PUBLIC["graphopt"])


@pytest.mark.parametrize("name", ["passes", "lowering"])
def test_the_folders_have_one_name_each(name: str) -> None:
    """In a checkout `import passes` would find the folder, and make second copies of modules."""
    command = [sys.executable, "-c", f"import {name}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"ImportError: import graphopt.{name} instead of {name}" in result.stderr
    assert importlib.import_module(f"graphopt.{name}").__name__ == f"graphopt.{name}"
