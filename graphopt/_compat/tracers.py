"""Private torch APIs of `make_fx` traces in progress."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    _ProxyTensor,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.proxy_tensor import make_fx as torch_make_fx

from graphopt._compat.fakes import is_fake
from graphopt._compat.functionalization import from_functional
from graphopt._compat.threads import Replacement, TrueInTrace, taking_turns
from graphopt._compat.torch_functions import is_unwatched

_WITHOUT_METADATA: Any = {"_disable_torch_fn_metadata_mode": True}


def make_fx(fn: Callable[..., Any]) -> Callable[..., fx.GraphModule]:
    """`make_fx` on fake tensors without decompositions, whose graph's code is generated when
    needed."""
    # Which torch function a node comes from is of no interest here, and noting it takes a fifth.
    traced = torch_make_fx(_alone(fn), tracing_mode="fake", **_WITHOUT_METADATA)

    def make(*args: Any) -> fx.GraphModule:
        with taking_turns(), _flag_of_trace(), _use_lazy_graph_module(True):
            return traced(*args)

    return make


def _alone(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function so that `make_fx` affects this thread only."""

    def run(*args: Any) -> Any:
        with _others_left_alone():
            return fn(*args)

    if isinstance(fn, FunctionType):
        functools.update_wrapper(run, fn)  # whose parameters name the inputs of the graph
    return run


@contextmanager
def _flag_of_trace() -> Iterator[None]:
    """While active, torch's tracing flag is set for this trace only: in other threads, code from
    `torch.compile` would refuse to run."""
    tracer: Any = PythonKeyTracer
    places, trace = vars(_symbolic_trace), inspect.unwrap(_symbolic_trace.Tracer.trace)
    if "_is_fx_tracing_flag" not in places:  # torch 2.15, which has a flag for each thread
        yield
        return
    own_names = {**places}  # in which torch sets the flag, for nobody to see
    quiet = FunctionType(
        *(trace.__code__, own_names, trace.__name__, trace.__defaults__, trace.__closure__)
    )
    former, places["_is_fx_tracing_flag"] = places["_is_fx_tracing_flag"], TrueInTrace()
    before, tracer.trace = tracer.trace, Replacement(quiet, trace).function
    try:
        yield
    finally:
        tracer.trace = before
        places["_is_fx_tracing_flag"] = former


@contextmanager
def _others_left_alone() -> Iterator[None]:
    """While active, modules that `make_fx` patches are unchanged for other threads."""
    module: Any = torch.nn.Module
    former = {"__call__": _MODULE_CALL, "__getattr__": _MODULE_GETATTR}
    patched = {name: getattr(module, name) for name in former}
    stand_ins = {name: Replacement(patched[name], former[name]) for name in former}
    for name, each in stand_ins.items():
        setattr(module, name, each.function)
    try:
        yield
    finally:
        for name, each in stand_ins.items():
            setattr(module, name, patched[name])
            each.end()


_MODULE_CALL, _MODULE_GETATTR = torch.nn.Module.__call__, torch.nn.Module.__getattr__


def current_tracer() -> Any:
    """The tracer of the running `make_fx`."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def named_in_profile(name: str) -> AbstractContextManager[Any]:
    """While active, torch's profiler shows a range of this name."""
    on = torch.autograd._profiler_enabled()
    return torch.profiler.record_function(name) if on else nullcontext()


def is_traced() -> bool:
    """True if `make_fx` records what this thread computes."""
    return not is_unwatched() and get_proxy_mode() is not None


def node_of(tracer: Any, value: Any) -> fx.Node | None:
    """The node that computes a traced tensor or symbolic number."""
    slot = _slot(tracer, value)
    if slot is None:
        return None
    return slot.proxy.node if isinstance(value, torch.Tensor) else slot.force().node  # type: ignore[no-any-return]


def is_constant(tracer: Any, tensor: torch.Tensor) -> bool:
    """True if a traced tensor has a known value, as after `torch.tensor(1.0)`."""
    if not is_fake(tensor):
        return False
    slot = _slot(tracer, tensor)
    recorded = slot is not None and slot.constant is not None
    return recorded or tensor.constant is not None  # type: ignore[attr-defined]


def forget_constant(tracer: Any, tensor: torch.Tensor) -> None:
    """Makes the value of a traced tensor unknown from now on."""
    slot = _slot(tracer, tensor)
    if slot is not None:
        slot.constant = None
    if tensor.constant is not None:  # type: ignore[attr-defined]
        converter = tensor.fake_mode.fake_tensor_converter  # type: ignore[attr-defined]
        converter.invalidate_constant_aliases(tensor.constant)  # type: ignore[attr-defined]
        tensor.constant = None  # type: ignore[attr-defined]


def rebind(tracer: Any, target: torch.Tensor, new: torch.Tensor) -> None:
    """Gives two traced tensors one node, as `target.data = new` does."""
    torch._C.TensorBase.data.__set__(target, new)  # type: ignore[attr-defined]
    set_proxy_slot(target, tracer, _ProxyTensor(_slot(tracer, new).proxy, None))


def _slot(tracer: Any, tensor: torch.Tensor) -> Any:
    return get_proxy_slot(tensor, tracer, None)


_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)
_Symbol = TypeVar("_Symbol", torch.SymFloat, torch.SymInt, torch.SymBool)


def record_number(
    function: Callable[..., Any], args: tuple[Any, ...], among: tuple[Any, ...] = ()
) -> torch.SymFloat:
    """Records a Python call on symbolic numbers whose result is an unknown float.

    Torch would build a symbolic expression, which takes milliseconds for each operator.

    Args:
        among: symbolic numbers of the trace, where `args` are constants.
    """
    result: torch.SymFloat = _unknown("create_unbacked_symfloat", (*args, *among))
    return record_known(function, args, result)


def record_integer(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.SymInt:
    """Records a Python call whose result is an unknown integer."""
    result: torch.SymInt = _unknown("create_unbacked_symint", args)
    return record_known(function, args, result)


def record_truth(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.SymBool:
    """Records a comparison of symbolic floats, whose result is a new unknown.

    Torch would answer some for all numbers, such as `x == x`, and be wrong where one is no number.
    """
    result: torch.SymBool = _unknown("create_unbacked_symbool", args)
    return record_known(function, args, result)


def _unknown(create: str, args: tuple[Any, ...]) -> Any:
    """A new symbol of the environment to which symbolic numbers belong."""
    environment: Any = next(arg for arg in args if isinstance(arg, _SYMBOLIC)).node.shape_env
    with environment.ignore_fresh_unbacked_symbols():
        return getattr(environment, create)()


def record_known(function: Callable[..., Any], args: tuple[Any, ...], result: _Symbol) -> _Symbol:
    """Records a Python call whose result is a symbolic number that exists already."""
    mode = get_proxy_mode()
    assert mode is not None
    slots = [get_proxy_slot(a, mode.tracer) if isinstance(a, _SYMBOLIC) else a for a in args]
    nodes = tuple(a if isinstance(a, (int, float)) else a.force().node for a in slots)
    proxy = mode.tracer.proxy(mode.tracer.create_node("call_function", function, nodes, {}))
    track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
    return result


_PROXY = torch._C._TorchDispatchModeKey.PROXY


def is_recording() -> bool:
    """True if a tracer records this thread's operators, `torch.export` included."""
    before_autograd = _get_dispatch_mode_pre_dispatch(_PROXY)
    return before_autograd is not None or torch._C._get_dispatch_mode(_PROXY) is not None


def recorded(
    function: Callable[..., Any], values: Sequence[Any], result: torch.Tensor
) -> torch.Tensor:
    """Returns `result`; if a trace runs, it is recorded as the result of a call of `function`."""
    if is_recording():
        proxy: Any = record_call(function, values)
        track_tensor_tree(result, proxy, constant=None, tracer=proxy.tracer)
    return result


def record_call(function: Callable[..., Any], values: Sequence[Any]) -> fx.Proxy:
    """Records a call of `function` on traced tensors and numbers."""
    mode = get_proxy_mode()
    assert mode is not None
    proxies = []
    for value in map(from_functional, values):
        if isinstance(value, torch.Tensor):
            proxies.append(get_proxy_slot(value, mode.tracer).proxy)
        elif isinstance(value, (torch.SymFloat, torch.SymInt, torch.SymBool)):
            proxies.append(get_proxy_slot(value, mode.tracer).force())
        else:
            proxies.append(value)
    return mode.tracer.create_proxy("call_function", function, tuple(proxies), {})


def forward_sequence_number() -> int:
    """The autograd sequence number of the operator being dispatched in forward."""
    return int(torch.autograd._get_sequence_nr()) - 1


def backward_sequence_number() -> int | None:
    """The autograd sequence number of the running backward node, or None outside a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def asking_for_tracers() -> tuple[Any, str, Callable[[], bool]]:
    """A replacement of the "is tracing" check of torch's attention by one that answers no."""
    return torch.nn.modules.activation, "_is_make_fx_tracing", lambda: False
