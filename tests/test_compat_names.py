"""Every private name of torch that `graphopt/_compat` uses is there, in whatever torch runs this.

The names are read from the source: imports, attributes of what is imported, and `getattr` of it.
Private attributes of objects are looked up on an object that `OBJECTS` makes; one that nobody has
declared there fails the test. A name that only some releases or builds have is in `RELEASES` or
`BUILDS`.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.pipelining import microbatch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

FOLDER = Path(__file__).parent.parent / "graphopt" / "_compat"

RELEASES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch._inductor.custom_graph_pass.CustomInferenceAwareGraphPass": ((2, 13), (99, 0))
}
"""The first and the last release that have a name."""

BUILDS: dict[str, bool] = {
    "torch._C._cuda_clearCublasWorkspaces": torch.backends.cuda.is_built(),
    "torch._C._cuda_endAllocateToPool": torch.backends.cuda.is_built(),
    "torch._C._tensors_data_ptrs_at_indices_equal": torch.backends.cuda.is_built(),
}
"""Whether this build of torch has a name."""

DYNAMIC = ("torch._inductor.virtualized.V",)
"""Objects that have attributes only while Inductor works."""

LATER = frozenset(
    {
        "_create_compile_meta",  # of Triton's tuners, which test_triton.py makes
        "_create_compile_options",
        "_device_types",  # of a process group
        "_get_backend",
        "_timeout",  # of the options of a process group
        "_sequence_nr",  # of what stands in `_current_autograd_node()` during a backward
        "_in_spec",  # of an exported pipeline, a graph module of ours
        "_out_spec",
        "_allgather_base",  # of a process group: test_gathers_on_gloo.py
        "_local_tensor",  # of a DTensor, which needs a group: test_zero_state.py
        "_is_param",  # written, not read
        "_opt_called",
        "_wrapped_by_lr_sched",
        "_is_gil_enabled",  # of Python's own modules, from some version on
        "_parse_exception_table",
        "_at_fork_reinit",
        "_current_frames",
    }
)
"""Private attributes of objects that cannot be made here."""

OBJECTS: dict[str, Callable[[], object]] = {
    "_Replicate": lambda: microbatch,
    "_backward_hooks": lambda: torch.ones(1),
    "_base": lambda: torch.ones(1),
    "_push_saved_tensors_default_hooks": lambda: torch._C._autograd,
    "_buffers": nn.Module,
    "_backward_pre_hooks": nn.Module,
    "_cdata": lambda: torch.ones(1).untyped_storage(),
    "_body_transformer": lambda: fx.Graph()._codegen,
    "_codegen": fx.Graph,
    "_compiled_call_impl": nn.Module,
    "_ctc_loss": lambda: torch.ops.aten,
    "_ctc_loss_backward": lambda: torch.ops.aten,
    "_gen_python_code": fx.graph.CodeGen,
    "_get_stack_summary": ShapeEnv,
    "_init_group": lambda: torch.optim.Adam([torch.ones(1)]),
    "_optimizer_step_post_hooks": lambda: torch.optim.Adam([torch.ones(1)]),
    "_optimizer_step_pre_hooks": lambda: torch.optim.Adam([torch.ones(1)]),
    "_global_backward_hooks": lambda: nn.modules.module,
    "_global_backward_pre_hooks": lambda: nn.modules.module,
    "_has_symbolic_sizes_strides": lambda: torch.ones(1),
    "_graph": lambda: fx.symbolic_trace(nn.ReLU()),
    "_indices": lambda: torch.eye(2).to_sparse(),
    "_insert": fx.Graph,
    "_allow_unsafe_data_ptr_access": FakeTensorMode,
    "_find_nodes_lookup_table": fx.Graph,
    **dict.fromkeys(
        ("name", "target", "_args", "_kwargs", "_input_nodes"), lambda: fx.Graph().placeholder("x")
    ),
    "_lineno_map": lambda: fx.symbolic_trace(nn.ReLU()),
    "_mode_key": FakeTensorMode,
    "_modules": nn.Module,
    "_non_persistent_buffers_set": nn.Module,
    "_per_optimizer_states": lambda: torch.amp.GradScaler("cpu"),
    "_post_accumulate_grad_hooks": lambda: torch.ones(1),
    "_op": lambda: torch.ops.aten.add.Tensor,
    "_overloadname": lambda: torch.ops.aten.add.Tensor,
    "_parameters": nn.Module,
    "_prologue_start": lambda: fx.symbolic_trace(nn.ReLU()),
    "_rename": lambda: fx.Graph().placeholder("x"),
    "_root": fx.Graph,
    "_schema": lambda: torch.ops.aten.add.Tensor,
    "_target_to_str": fx.Graph,
    "_use_count": lambda: torch.ones(1),
    "_values": lambda: torch.eye(2).to_sparse(),
    "_version": lambda: torch.ones(1),
}


class Names(ast.NodeVisitor):
    """Finds the names of torch and Triton that a file uses.

    Attributes:
        absolute: dotted names of what is imported, and of attributes of it.
        attributes: private attributes of other objects.
    """

    def __init__(self) -> None:
        self.absolute: set[str] = set()
        self.attributes: set[str] = set()
        self._scopes: list[dict[str, str | None]] = [{}]

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._bind(alias.asname or top, alias.name if alias.asname else top, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            self._bind(alias.asname or alias.name, name, name)

    def _bind(self, local: str, name: str, used: str) -> None:
        if used.partition(".")[0] in ("torch", "triton"):
            self._scopes[-1][local] = name
            self.absolute.add(used)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """What a class without bases keeps in itself is its own, and no name of torch."""
        before = set(self.attributes)
        self.generic_visit(node)
        if not node.bases:
            inside = list(ast.walk(node))
            methods = {each.name for each in inside if isinstance(each, ast.FunctionDef)}
            self.attributes -= (_kept_in_self(inside) | methods) - before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        self._scopes.append({argument.arg: None for argument in arguments})
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node.value, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        constants = [a.value for a in node.args if isinstance(a, ast.Constant)]
        texts = [text for text in constants if isinstance(text, str)]
        if called in ("getattr", "hasattr") and texts:
            self._use(node.args[0], texts[0])
        if called == "attrgetter":
            self.attributes.update(text.partition(".")[0] for text in texts)
        self.generic_visit(node)

    def _use(self, owner: ast.expr, attribute: str) -> None:
        name = self._dotted(owner)
        if name is not None:
            self.absolute.add(f"{name}.{attribute}")
        elif attribute.startswith("_") and not attribute.startswith("__"):
            self.attributes.add(attribute)

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        if not isinstance(node, ast.Name):
            return None
        return next((scope[node.id] for scope in reversed(self._scopes) if node.id in scope), None)


def _kept_in_self(nodes: list[ast.AST]) -> set[str]:
    stored = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def names() -> Names:
    found = Names()
    for path in sorted(FOLDER.glob("*.py")):
        found.visit(ast.parse(path.read_text()))
    return found


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def expected(name: str) -> bool:
    """Whether this torch has to have a name."""
    if any(name.startswith(f"{owner}.") for owner in DYNAMIC):
        return False
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    first, last = RELEASES.get(name, ((0, 0), (99, 0)))
    return first <= release <= last and BUILDS.get(name, True)


def resolve(name: str) -> Any:
    """What a dotted name stands for: a module as far as there are modules, then attributes."""
    parts = name.split(".")
    found: Any = None
    for index, part in enumerate(parts):
        try:
            found = importlib.import_module(".".join(parts[: index + 1]))
        except ModuleNotFoundError:
            found = getattr(found, part)
    return found


def unresolved(candidates: set[str]) -> Iterator[str]:
    for name in sorted(candidates):
        try:
            resolve(name)
        except (ImportError, AttributeError) as error:
            yield f"{name}: {error}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules of torch that it imports
def test_names_are_there() -> None:
    used = {name for name in names().absolute if is_private(name)}
    assert len(used) > 60
    needs_triton = {name for name in used if name.startswith("triton.")}
    found = list(unresolved({name for name in used - needs_triton if expected(name)}))
    assert not found, f"torch {torch.__version__} lacks " + "; ".join(found)


def test_names_of_other_releases_are_used() -> None:
    """What is declared for some releases or builds is used, so that the lists do not outlive it."""
    assert {*RELEASES, *BUILDS} <= names().absolute


def test_attributes_are_there() -> None:
    used = names().attributes
    assert used == {*OBJECTS, *LATER}
    for name, make in OBJECTS.items():
        assert hasattr(make(), name), f"{name} in torch {torch.__version__}"


@pytest.mark.parametrize(
    "source",
    [
        "from torch._nowhere import thing",
        "import torch\ntorch._C._no_such_name()",
        "import torch\ndef f():\n    return getattr(torch._C, '_no_such_name', None)",
        "def f():\n    from torch.distributed import distributed_c10d as c\n    c._no_such_name",
    ],
)
def test_a_missing_name_is_found(source: str) -> None:
    found = Names()
    found.visit(ast.parse(source))
    assert len(list(unresolved(found.absolute))) == 1
