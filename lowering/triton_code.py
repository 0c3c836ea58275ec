"""Generation of Triton kernels for a CUDA GPU from a graph, on any machine."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat import triton as compat_triton
from graphopt.errors import LoweringError
from graphopt.ir.metadata import fake_value, has_value, source_line
from graphopt.lowering.compiler import NUMBER
from graphopt.lowering.prepare import PreparedRegion

_LOWERED_FROM = "lowered_from"
"""Metadata of traced nodes: the node that they come from, described for a message."""


@dataclass(frozen=True)
class InductorCode:
    """The code that Inductor generates for a graph.

    Attributes:
        kernels: name and source of each Triton kernel.
        externs: the number of calls of each library kernel, such as `mm` of cuBLAS.
    """

    kernels: list[tuple[str, str]]
    externs: Counter[str]


def cuda_code(graph_module: fx.GraphModule) -> InductorCode:
    """Generates the CUDA code of a graph, which itself is unchanged.

    To be called while there is a pretended GPU (`graphopt._compat.triton`). All tensors of the
    graph are taken to be on that GPU.

    Raises:
        LoweringError: it cannot be lowered; the message names the node and the user's line.
    """
    mode = _compat.plain_fake_mode()
    constants = _constants(graph_module)
    values = [_input_value(node) for node in graph_module.graph.find_nodes(op="placeholder")]
    inputs = [_on_cuda(value, mode) for value in (*values, *constants.values())]

    def run(*args: Any) -> list[Any]:
        own = dict(zip(constants, args[len(values) :], strict=True))
        returned = _OnCuda(graph_module, own).run(*args[: len(values)], enable_io_processing=False)
        leaves = _compat.tree_leaves(returned)
        return [value for value in leaves if isinstance(value, torch.Tensor)]

    traced = compat_triton.traced_with_decompositions(run, inputs, mode)
    try:
        return _read(compat_triton.inductor_code(traced, inputs, mode))
    except Exception as error:
        node = compat_triton.node_being_lowered(error)
        place = "" if node is None else node.meta.get(_LOWERED_FROM) or _described(node)
        raise LoweringError(_message(place, error)) from error


class _OnCuda(PreparedRegion):
    """Interprets a graph on CUDA tensors, whichever device its nodes name."""

    def __init__(self, graph_module: fx.GraphModule, constants: dict[str, torch.Tensor]) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False  # what it adds to messages is said by _message
        self._constants = constants

    def run_node(self, n: fx.Node) -> Any:
        traced = _compat.current_tracer().graph
        before = len(traced.nodes)
        try:
            result = super().run_node(n)
        except Exception as error:
            raise LoweringError(_message(_described(n), error)) from error
        for _, new in zip(range(len(traced.nodes) - before), reversed(traced.nodes), strict=False):
            new.meta[_LOWERED_FROM] = _described(n)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._constants[target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = _compat.tree_map(_cuda_device, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.update_inputs()
        return args[0]


def _cuda_device(value: Any) -> Any:
    return compat_triton.DEVICE if isinstance(value, torch.device) else value


def _constants(graph_module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The constant tensors of a graph, by name; only their shapes matter."""
    names = dict.fromkeys(node.target for node in graph_module.graph.find_nodes(op="get_attr"))
    found = {}
    for name in names:
        value = fx.Interpreter(graph_module).fetch_attr(name)
        if not isinstance(value, torch.Tensor):
            raise LoweringError(f"%{name} is a constant of type {type(value).__name__}")
        found[name] = value
    return found


def _input_value(node: fx.Node) -> Any:
    if not has_value(node):
        raise LoweringError(
            f"the placeholder %{node.name} has no meta['val'], which says what it is\n"
            '  hint:  trace with make_fx(tracing_mode="fake"), or use graphopt.capture'
        )
    value = fake_value(node)
    if isinstance(value, torch.SymFloat):
        return NUMBER.fake()
    symbolic = isinstance(value, (torch.SymInt, torch.SymBool))
    if symbolic or (isinstance(value, torch.Tensor) and _compat.has_symbolic_shape(value)):
        raise LoweringError(
            f"the placeholder %{node.name} has a shape or number that is not known: {value}\n"
            "  hint:  kernels are compiled for known shapes; trace with fixed ones"
        )
    return value


def _on_cuda(value: Any, mode: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=compat_triton.DEVICE
        )


def _described(node: fx.Node) -> str:
    where = source_line(node)
    line = f"%{node.name} = {node.target}"
    return line if where is None else f"{line}\n  from:  {where}"


def _message(place: str, error: Exception) -> str:
    if isinstance(error, LoweringError):
        return str(error)
    reason = str(error).strip().partition("\n")[0] or "no reason is given"
    text = f"this cannot be lowered to Triton: {type(error).__name__}: {reason}"
    return f"{text}\n  node:  {place}" if place else text


# ---------------------------------------------------------------------------- reading the code


def _read(code: str) -> InductorCode:
    """Parses the kernels out of a module written by Inductor, without running it."""
    kernels: list[tuple[str, str]] = []
    externs: Counter[str] = Counter()
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "async_compile.triton":
            name, source = (ast.literal_eval(argument) for argument in node.args[:2])
            kernels.append((name, source))
        elif (match := _EXTERN.match(called)) is not None:
            externs[match["name"]] += 1
    return InductorCode(kernels, externs)


_EXTERN = re.compile(r"(?:extern_kernels\.|torch\.ops\.(?!inductor\.)|(?=aten\.))(?P<name>.+)")
