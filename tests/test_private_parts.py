"""Private parts of torch, and keys of metadata, are used in one place each."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.stage import PipelineStage
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphopt._compat import OpOverload, TorchDispatchMode, new_fake_mode
from graphopt.ir import metadata
from test_imports import FILES, PRIVATE_TORCH_IS_IN, dotted, imports, tree_of, within

CLASSES: tuple[type, ...] = (
    *(fx.Graph, fx.Node, fx.GraphModule, fx.Interpreter, fx.Tracer, fx.graph.CodeGen),
    *(nn.Module, nn.Parameter, torch.Tensor, torch.UntypedStorage, torch.SymInt, torch.Generator),
    *(OpOverload, type(torch.ops.aten.add), TorchDispatchMode, type(new_fake_mode()), ShapeEnv),
    *(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler),
    *(torch.autograd.Function, torch.cuda.CUDAGraph, dist.ProcessGroup, PipelineStage),
    *(pipelining.ScheduleGPipe, pipelining.Schedule1F1B, pipelining.ScheduleInterleaved1F1B),
)
"""Classes of torch whose objects pass through graphopt."""


OF_PYTHON = frozenset(
    {
        *("_asdict", "_fields", "_make", "_replace"),  # of named tuples
        *("_exit", "_getframe"),  # of os and sys
        "_lru_cache_wrapper",  # of functools
        "_extra_reducers",  # of multiprocessing.reduction.ForkingPickler
    }
)
"""Names with an underscore that belong to Python."""


ACCESSES = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def private_names(cls: type) -> frozenset[str]:
    """Private methods of a class and of its bases, as far as they are torch's, and attributes that
    their methods give to `self`."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "functorch", "triton"):
            continue
        found.update(filter(is_private, {*vars(base), *getattr(base, "__annotations__", ())}))
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # made by C++
            continue
        found.update(filter(is_private, kept_in_self(ast.parse(source))))
    return frozenset(found)


def kept_in_self(tree: ast.AST) -> set[str]:
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    stores = (n for n in stored if isinstance(n.ctx, ast.Store))
    return {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}


@cache
def names_of_torch() -> frozenset[str]:
    return frozenset().union(*map(private_names, CLASSES))


class Uses:
    """Finds private names of torch's objects in one module.

    Attributes:
        found: line, and what stands there.
    """

    def __init__(self, tree: ast.AST, space: dict[str, Any], local: dict[str, str]) -> None:
        self.found: list[tuple[int, str]] = []
        self._space, self._local = space, local
        self._own = self._names_of_own(tree)
        self._visit(tree, frozenset())

    def _names_of_own(self, tree: ast.AST) -> set[str]:
        """What the module defines, and its classes without a base of torch's keep."""
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not self._inherited(node):
                inside = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
                fields = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
                found |= kept_in_self(node) | {n.name for n in inside}
                found |= {field.id for field in fields if isinstance(field, ast.Name)}
        return found

    def _inherited(self, node: ast.ClassDef) -> frozenset[str]:
        """Private names that a class has from torch."""
        bases = [self._class(base) for base in node.bases]
        return frozenset().union(*(private_names(base) for base in bases if base is not None))

    def _class(self, base: ast.expr) -> type | None:
        plain = base.value if isinstance(base, ast.Subscript) else base
        try:
            found = eval(ast.unparse(plain), self._space)
        except NameError:  # a class that is made in a function
            return None
        return found if isinstance(found, type) else None

    def _visit(self, node: ast.AST, inherited: frozenset[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                names = self._inherited(child)
                for method in child.body:
                    if isinstance(method, ast.FunctionDef) and method.name in names:
                        self.found.append((method.lineno, f"{child.name}.{method.name}"))
                self._visit(child, names)
                continue
            for owner, name in self._accessed(child):
                if self._is_torchs(owner, name, inherited):
                    self.found.append((child.lineno, f"{ast.unparse(owner)}.{name}"))  # type: ignore[attr-defined]
            self._visit(child, inherited)

    def _accessed(self, node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
        """Objects with the private attributes of theirs that a node uses."""
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.value, node.attr
        if not isinstance(node, ast.Call):
            return
        texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
        private = [text for text in texts if isinstance(text, str) and is_private(text)]
        if ast.unparse(node.func) in ACCESSES:
            yield from ((node.args[0], text) for text in private)
        elif ast.unparse(node.func).endswith("attrgetter"):
            yield from ((node.func, text.partition(".")[0]) for text in private)

    def _is_torchs(self, owner: ast.expr, name: str, inherited: frozenset[str]) -> bool:
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            return name in inherited
        known = dotted(owner, self._local) or ""
        if known.startswith("torch.ops") or ast.unparse(owner).startswith(("aten", "c10d")):
            return False  # an operator
        return name not in OF_PYTHON and name in names_of_torch() and name not in self._own


def uses_in(module: str) -> list[tuple[int, str]]:
    loaded: ModuleType = importlib.import_module(module)
    local = {bound: meaning for _, bound, meaning in imports(module)}
    return Uses(tree_of(module), dict(vars(loaded)), local).found


MODULES = [
    module
    for module in FILES
    if not within(module, (PRIVATE_TORCH_IS_IN,)) and not module.endswith("__main__")
]


def test_private_attributes_of_torch_are_used_in_one_package_only() -> None:
    found = {module: uses for module in MODULES if (uses := uses_in(module))}
    assert found == {}, f"wrap these in {PRIVATE_TORCH_IS_IN}"


SEEN = {
    "attribute": "def f(node):\n    return node.target._schema.name",
    "of a module": "def f(module):\n    return module._modules",
    "getattr": "def f(node):\n    return getattr(node.target, '_schema', None)",
    "attrgetter": "from operator import attrgetter\nf = attrgetter('_schema.name')",
    "own of a subclass": "class M(nn.Module):\n    def f(self):\n        return self._modules",
    "overridden": "class M(nn.Module):\n    def _call_impl(self, *args): ...",
    "in a function": "def f():\n    class M(fx.Interpreter):\n        def g(self, t):\n"
    "            return t._version",
}


UNSEEN = {
    "own class": "class A:\n    def __init__(self):\n        self._graph = 1\n"
    "def f(a):\n    return a._graph",
    "named tuple": "def f(x):\n    return x._replace(a=1)",
    "operator": "f = torch.ops.aten._to_copy.default",
    "public": "def f(node):\n    return node.target.name()",
}


@pytest.mark.parametrize("source", [*SEEN.values(), *UNSEEN.values()], ids=[*SEEN, *UNSEEN])
def test_what_is_seen(source: str) -> None:
    uses = Uses(ast.parse(source), {"nn": nn, "fx": fx, "torch": torch}, {"torch": "torch"})
    assert bool(uses.found) is (source in SEEN.values())


KEYS = frozenset(
    value for name, value in vars(metadata).items() if name.isupper() and isinstance(value, str)
)


OTHER_DIALECTS = ("graphopt._compat", "graphopt.ir.metadata")
"""Modules that read and write the metadata of torch's own graphs."""


def keys_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where a text is used as a key of metadata: `x.meta["val"]`, `x.meta.get("val")`, `"val" in
    x.meta`."""
    for node in ast.walk(tree):
        used: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and _is_metadata(node.value):
            used = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            used = node.args[:1] if _is_metadata(node.func.value) else []
        elif isinstance(node, ast.Compare) and any(map(_is_metadata, node.comparators)):
            used = [node.left]
        for key in used:
            if isinstance(key, ast.Constant) and key.value in KEYS:
                yield node.lineno, str(key.value)


def _is_metadata(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Attribute) and expression.attr == "meta"


def test_keys_of_metadata() -> None:
    modules = [module for module in FILES if not within(module, OTHER_DIALECTS)]
    found = [f"{m}:{line} {key}" for m in modules for line, key in keys_in(tree_of(m))]
    assert not found, f"graphopt.ir.metadata has a function for each: {found}"


def test_what_is_found() -> None:
    written = 'x.meta["val"]; x.meta.get("kind", 0); "phase" in x.meta; x.meta["own"]; x["val"]'
    assert [key for _, key in keys_in(ast.parse(written))] == ["val", "kind", "phase"]
