"""Every use of a private torch API, each in one small function.

What the parts of torch that are loaded late need (Inductor, Triton) is in files beside this one.

Written for torch 2.11 to 2.15. A branch for one version says so.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# ---------------------------------------------------------------------------- pytrees

tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _pytree.tree_flatten
tree_unflatten: Callable[[Sequence[Any], Any], Any] = _pytree.tree_unflatten
tree_map: Callable[..., Any] = _pytree.tree_map
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves


def leaf_names(fn: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> list[str]:
    """A name for each leaf of `(args, kwargs)`, after the parameter names of `fn`."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    paths, _ = _pytree.tree_flatten_with_path(tree_unflatten(leaves, spec))
    names = []
    for path, _ in paths:
        entries: tuple[Any, ...] = path
        top, first, *tail = entries
        if top.idx == 1:
            head = first.key
        elif first.idx < len(positional):
            head = positional[first.idx]
        else:
            head = f"{rest}[{first.idx - len(positional)}]"
        names.append(head + _pytree.keystr(tuple(tail)))
    return names


# ---------------------------------------------------------------------------- modules


def is_fsdp(module: nn.Module) -> bool:
    """FSDP's wrapper (FSDP1) or a module that `fully_shard` changed (FSDP2)."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, (FullyShardedDataParallel, FSDPModule))


def is_compiled_module(module: nn.Module) -> bool:
    """`torch.compile(module)`, or a module whose `.compile()` was called."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def module_call_code() -> CodeType:
    """Code of the frame in which a module's forward and hooks run."""
    return nn.Module._call_impl.__code__


# ---------------------------------------------------------------------------- global settings


_GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    *(
        table
        for name, table in vars(torch.nn.modules.module).items()
        if name.startswith("_global_") and isinstance(table, dict)
    ),
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)


def global_settings() -> tuple[Any, ...]:
    """Settings of torch that decide which operators run: hooks of all modules and optimizers,
    the default device, libraries that are switched off."""
    return (
        [tuple(table) for table in _GLOBAL_HOOKS if table],
        torch.get_default_device(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.is_autocast_cache_enabled(),
    )


# ---------------------------------------------------------------------------- fake tensors


Correction = Callable[[Any, Any, Any, Any], Any]
"""From operator, arguments, keyword arguments and what its shape rule says to the true result."""

Sizer = Callable[[Any, Any], Any]
"""From operator and a result with unknown sizes to one with known ones."""


def new_fake_mode(correct: Correction | None = None) -> Any:
    """A FakeTensorMode with static shapes, and a ShapeEnv for values read by `.item()`.

    Args:
        correct: applied to what each operator gives.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    if correct is None:
        return FakeTensorMode(shape_env=_new_shape_env(), static_shapes=True)
    applied: Correction = correct

    class CorrectedMode(FakeTensorMode):
        correction = staticmethod(applied)
        sizer: Sizer | None = None
        met_sizes = False

        def dispatch(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})
        ) -> Any:
            unknown = gives_unknown_sizes(func, args)
            self.met_sizes |= unknown
            if self.sizer is not None and unknown:
                return self.sized(self.sizer, func, types, args, kwargs)
            result = super().dispatch(func, types, *_with_plain_numbers(func, args, kwargs))
            return applied(func, args, kwargs, result)

        def sized(self, sizer: Sizer, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            self.sizer = None  # what a shape rule calls itself stays as torch does it
            try:
                environment: Any = self.shape_env
                with environment.ignore_fresh_unbacked_symbols():
                    result = super().dispatch(func, types, args, kwargs)
                    return sizer(func, result)
            finally:
                self.sizer = sizer

    return CorrectedMode(shape_env=_new_shape_env(), static_shapes=True)


def _new_shape_env() -> Any:
    """A ShapeEnv that does not note where each number comes from. To tell torch's files from others
    torch's own loads half of Inductor, and then goes through the stack for each number."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, SLoc

    nowhere = SLoc(None, None)

    class QuickShapeEnv(ShapeEnv):
        def _get_stack_summary(
            self, is_debug: bool = False, framework_loc: str | None = None
        ) -> tuple[SLoc, str]:
            if is_debug:  # for the text of an error
                return super()._get_stack_summary(is_debug, framework_loc)
            return nowhere, ""

        def _log_create_unbacked_symbol(self, *args: Any, **kwargs: Any) -> None:
            """Nothing is logged."""

        def _get_user_frame(self) -> FrameType | None:
            frame = inspect.currentframe()
            while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
                frame = frame.f_back
            return frame

    return QuickShapeEnv()


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def _with_plain_numbers(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an operator, with any number in place of each that is not known where the
    operator goes element by element: its result has the same kind and sizes, which torch then finds
    in its cache."""
    numbers = any(isinstance(value, torch.SymFloat) for value in (*args, *kwargs.values()))
    if not numbers or torch.Tag.pointwise not in func.tags:
        return args, kwargs
    return tuple(map(_plain_number, args)), {key: _plain_number(kwargs[key]) for key in kwargs}


def _plain_number(value: Any) -> Any:
    return 0.5 if isinstance(value, torch.SymFloat) else value


def gives_unknown_sizes(func: Any, args: Any) -> bool:
    """Whether the sizes of what an operator gives depend on values, or it gives an integer."""
    if func is torch.ops.aten._local_scalar_dense.default:
        kind: torch.dtype = args[0].dtype
        return not (kind is torch.bool or kind.is_floating_point or kind.is_complex)
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


@contextmanager
def sizes_given(mode: Any, sizer: Sizer | None) -> Iterator[None]:
    """While active, `sizer` says what sizes operators give whose results depend on values."""
    before = getattr(mode, "sizer", None)
    mode.sizer = sizer
    try:
        yield
    finally:
        mode.sizer = before


def met_sizes(mode: Any) -> bool:
    """Whether an operator has given what has a size that depends on values."""
    return getattr(mode, "met_sizes", False)


def without_fake_mode() -> AbstractContextManager[Any]:
    """A fake mode of the caller's does not see what runs inside. What is fake stays fake."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def plain_fake_mode() -> Any:
    """A FakeTensorMode in which reading a value is an error."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def fake_laid_out(
    fake: torch.Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A fake tensor in the mode and on the device of another."""
    from torch._subclasses.fake_tensor import FakeTensor

    meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(fake.fake_mode, meta, fake.device)  # type: ignore[attr-defined]


def plain_view(target: object, args: tuple[Any, ...]) -> Any:
    """What a view or a split gives of a fake tensor, by the kernel alone. The mode asks it as well,
    after much else, which takes eight times as long and decides nothing where sizes are numbers.

    Args:
        args: values, not nodes.

    Returns:
        None for other operators and arguments, those that do not fit among them, and for tensors of
        which more is to be kept.
    """
    if (target is not _VIEW and target is not _SPLIT) or len(args) != 2:
        return None
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    source, sizes = args
    if type(source) is not FakeTensor or not isinstance(sizes, (list, tuple)):
        return None
    if not all(type(size) is int for size in sizes):
        return None
    mode, device = source.fake_mode, source.fake_device
    kept = source.constant is not None or source.real_tensor is not None or source.requires_grad
    if kept or source.is_conj() or source.is_neg() or source._has_symbolic_sizes_strides:
        return None
    try:
        with torch.no_grad(), in_kernel_invocation_manager(mode):
            found: Any = target(source, sizes)  # type: ignore[operator]
    except RuntimeError:  # the mode says what is wrong
        return None
    if target is _VIEW:
        return FakeTensor(mode, found, device)
    return [FakeTensor(mode, part, device) for part in found]


_VIEW = torch.ops.aten.view.default
_SPLIT = torch.ops.aten.split_with_sizes.default


def is_fake(value: object) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def fake_mode_of(tensors: Sequence[torch.Tensor]) -> Any | None:
    """The FakeTensorMode that the given tensors already live in, if any."""
    return next((t.fake_mode for t in tensors if is_fake(t)), None)  # type: ignore[attr-defined]


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor, in memory of its own on the CPU. A fake one made by
    `torch.tensor(1.0)` remembers it; None where it does not."""
    known = tensor.constant if is_fake(tensor) else tensor  # type: ignore[attr-defined]
    return None if known is None else known.detach().cpu().clone()


def deepcopied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """`copy.deepcopy` of a fake tensor as of a real one. Torch's own copies the mode with it, whose
    tensors mix with no other, and the gradient of a parameter, which a real one leaves behind.

    Args:
        tensor: a leaf, all of its storage.
        memo: what has been copied, by identity.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    with torch.no_grad():
        copied = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copied.grad = deepcopied(tensor.grad, memo)
    memo[id(tensor)] = copied
    return copied


def to_fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in `mode`: same metadata, leaf and requires_grad; `.grad` is not carried over."""
    if is_fake(tensor) and tensor.fake_mode is mode:  # type: ignore[attr-defined]
        return tensor
    gradient, tensor.grad = tensor.grad, None
    try:
        fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
    finally:
        tensor.grad = gradient
    return fake


@contextmanager
def foreach_accepts_fakes() -> Iterator[None]:
    """While active, `foreach=None` chooses for fake CUDA tensors what it chooses for real ones."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    lists = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    distinct = list({id(entry): entry for entry in lists}.values())
    for entry in distinct:
        entry.append(FakeTensor)
    try:
        yield
    finally:
        for entry in distinct:
            entry.remove(FakeTensor)


@contextmanager
def errors_raised_once() -> Iterator[None]:
    """While active, torch does not also log the errors of operators on fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def version_kept(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """While active, writing to a tensor does not count as an update of it."""
    kept: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensor)
    return kept


def storage_key(tensor: torch.Tensor) -> int:
    """An integer equal for tensors over one storage, as long as that storage lives."""
    if tensor.layout is not torch.strided:  # indices and values in storage of their own
        return id(tensor)
    return int(torch._C.TensorBase.untyped_storage(tensor)._cdata)


def storage_key_of_value(value: torch.Tensor) -> int:
    """As `storage_key`, of the value of a node. It asks for the class of the tensor, which one with
    late updates answers by finishing them, and takes half of the time."""
    try:
        return torch._C._storage_id(value)  # type: ignore[no-any-return, attr-defined]
    except NotImplementedError:  # indices and values in storage of their own
        return id(value)


def may_be_written(tensor: torch.Tensor) -> bool:
    """Whether somebody may have written to a tensor since it was made."""
    return tensor.is_inference() or tensor._version > 0


def is_profiling() -> bool:
    """Whether a profiler records this thread."""
    return bool(torch.autograd._profiler_enabled())


hook_tables: Callable[[torch.Tensor], tuple[dict[int, Any] | None, ...]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""The gradient hooks of a tensor by key, None where there have not been any."""


def hooks_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Keys of the gradient hooks of a tensor, which change when hooks are added or removed."""
    return tuple(key for table in hook_tables(tensor) for key in table or ())


def has_hooks_on_sum(tensor: torch.Tensor) -> bool:
    """Whether autograd calls a hook when it has added to the gradient of a tensor."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def copy_hooks(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each second tensor the gradient hooks of the first."""
    for source, target in pairs:
        for hook in (source._backward_hooks or {}).values():
            target.register_hook(hook)
        for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
            target.register_post_accumulate_grad_hook(hook)


# ---------------------------------------------------------------------------- tracing


_WITHOUT_METADATA: Any = {"_disable_torch_fn_metadata_mode": True}


def make_fx(fn: Callable[..., Any]) -> Callable[..., fx.GraphModule]:
    """`make_fx` on fake tensors, without decompositions. The code of the graph is made when it is
    asked for."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx as torch_make_fx

    # Which torch function a node comes from is of no interest here, and noting it takes a fifth.
    traced = torch_make_fx(fn, tracing_mode="fake", **_WITHOUT_METADATA)

    def make(*args: Any) -> fx.GraphModule:
        with _use_lazy_graph_module(True):
            return traced(*args)

    return make


def lazy_graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose code is made when it is asked for."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def forward_of(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """The code of a graph as it is now."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    graph_module.recompile()
    _LazyGraphModule.force_recompile(graph_module)
    return graph_module.forward


def current_tracer() -> Any:
    """The tracer of the `make_fx` that is running."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def node_of(tracer: Any, value: Any) -> fx.Node | None:
    """The node that computes a traced tensor or symbolic number."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    slot = get_proxy_slot(value, tracer, None)
    if slot is None:
        return None
    return slot.proxy.node if isinstance(value, torch.Tensor) else slot.force().node  # type: ignore[no-any-return]


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of `torch.func`'s, around another one, while its transforms run."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_constant(tracer: Any, tensor: torch.Tensor) -> bool:
    """Whether the value of a traced tensor is known, as after `torch.tensor(1.0)`."""
    if not is_fake(tensor):
        return False
    slot = _slot(tracer, tensor)
    recorded = slot is not None and slot.constant is not None
    return recorded or tensor.constant is not None  # type: ignore[attr-defined]


def forget_constant(tracer: Any, tensor: torch.Tensor) -> None:
    """Let the value of a traced tensor be unknown from now on."""
    slot = _slot(tracer, tensor)
    if slot is not None:
        slot.constant = None
    if tensor.constant is not None:  # type: ignore[attr-defined]
        converter = tensor.fake_mode.fake_tensor_converter  # type: ignore[attr-defined]
        converter.invalidate_constant_aliases(tensor.constant)  # type: ignore[attr-defined]
        tensor.constant = None  # type: ignore[attr-defined]


def _slot(tracer: Any, tensor: torch.Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    return get_proxy_slot(tensor, tracer, None)


def record_number(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.SymFloat:
    """Record a call of a Python operator on symbolic floats; its result is a new unknown.

    Torch would build a symbolic expression, which takes milliseconds for each operator.
    """
    from torch.fx.experimental.proxy_tensor import (
        get_proxy_mode,
        get_proxy_slot,
        track_tensor_tree,
    )

    mode = get_proxy_mode()
    assert mode is not None
    environment: Any = next(a for a in args if isinstance(a, torch.SymFloat)).node.shape_env
    with environment.ignore_fresh_unbacked_symbols():
        result: torch.SymFloat = environment.create_unbacked_symfloat()
    slots = [get_proxy_slot(a, mode.tracer) if isinstance(a, torch.SymFloat) else a for a in args]
    proxies = tuple(a if isinstance(a, (int, float)) else a.force() for a in slots)
    proxy = mode.tracer.create_proxy("call_function", function, proxies, {})
    track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
    return result


def is_recording() -> bool:
    """Whether a tracer of this thread records what is called, `torch.export` included."""
    from torch._ops import _get_dispatch_mode_pre_dispatch

    key = torch._C._TorchDispatchModeKey.PROXY
    before_autograd = _get_dispatch_mode_pre_dispatch(key)
    return before_autograd is not None or torch._C._get_dispatch_mode(key) is not None


def is_fake_mode_on() -> bool:
    """Whether what this thread computes is fake tensors."""
    key = torch._C._TorchDispatchModeKey.FAKE
    return torch._C._get_dispatch_mode(key) is not None


def record_call(function: Callable[..., Any], values: Sequence[Any]) -> None:
    """Record a call of `function` with traced tensors and numbers, which returns nothing."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

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
    mode.tracer.create_proxy("call_function", function, tuple(proxies), {})


def forward_sequence_number() -> int:
    """Number of the autograd node whose forward op is being dispatched."""
    return int(torch.autograd._get_sequence_nr()) - 1


def backward_sequence_number() -> int | None:
    """Number of the autograd node whose backward is running, None outside a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when Python asks for a value that only real data has."""
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (GuardOnDataDependentSymNode, DataDependentOutputException)


def unsupported_operator_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise for an operator whose result they cannot describe."""
    from torch._subclasses.fake_tensor import (
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )

    return (
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )


# ---------------------------------------------------------------------------- functional form


def functional_mode() -> AbstractContextManager[Any]:
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    return FunctionalTensorMode()


def without_functional_mode() -> AbstractContextManager[Any]:
    """While active, operators are called as outside `functional_mode`."""
    from torch._subclasses.functional_tensor import disable_functional_mode

    return disable_functional_mode()


def to_functional(tensor: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor.to_functional(tensor)


def from_functional(value: Any) -> Any:
    """The tensor inside a functional wrapper, with all writes through aliases applied."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def replace_functional_value(wrapper: torch.Tensor, value: torch.Tensor) -> None:
    """Let a functional tensor hold another tensor with the same elements (other strides, say)."""
    torch._functionalize_replace(wrapper.elem, value)  # type: ignore[attr-defined]


_fused_meta: torch.library.Library | None = None


def register_fused_meta_kernels() -> None:
    """Shape rules for the `tensor_lr` forms of the fused optimizers, which torch lacks."""
    global _fused_meta
    if _fused_meta is not None:
        return
    library = torch.library.Library("aten", "IMPL")
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        packet = getattr(torch.ops.aten, name)
        if "tensor_lr" not in packet.overloads():
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}.tensor_lr", "Meta"):
            continue
        library.impl(f"{name}.tensor_lr", lambda *args, **kwargs: None, "Meta")
    _fused_meta = library


# ---------------------------------------------------------------------------- distributed


def _forget_default_group() -> None:
    """Import `torch.distributed.nn`, whose functions take as a default argument the default group
    that there is at that moment, so that they take None.

    torch.compile's tracer imports them too, and where a script has made its group before, they
    would keep it when it is destroyed: its threads would still run while Python ends, and every now
    and then they abort the process then (seen in torch 2.13). None stands for the default group.
    """
    import torch.distributed.nn.functional as functions

    for function in vars(functions).values():
        if defaults := getattr(function, "__defaults__", None):
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in defaults
            )


if dist.is_available():
    _forget_default_group()


def default_store() -> dist.Store:
    """The store that all ranks of the default process group share."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group()


def group_named(name: str) -> dist.ProcessGroup | None:
    """The process group that operators know by a name; None where there is none any more."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type, no-any-return, unused-ignore]
    except (KeyError, RuntimeError, ValueError):
        return None


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where small tensors that a group sends are made: on the CPU, if it can send those."""
    kinds = group._device_types
    if not kinds or torch.device("cpu") in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0].type, torch.accelerator.current_device_index())


def ranks_of_group(name: str) -> list[int] | None:
    """The ranks of the process group that operators know by a name; None where there is none."""
    group = group_named(name)
    return None if group is None else dist.get_process_group_ranks(group)


def start_fake_group(count: int) -> None:
    """Make the default process group one of `count` ranks, of which only rank 0 exists, and whose
    communication does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(FAKE_BACKEND, store=FakeStore(), rank=0, world_size=count)


FAKE_BACKEND = "fake"


def fake_world_size() -> int | None:
    """How many ranks `start_fake_group` has made; None where there is no such group."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_world_size() if dist.get_backend() == FAKE_BACKEND else None


# ---------------------------------------------------------------------------- optimizers


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedulers, which warn otherwise, that the optimizer has stepped."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------- graphs


inputs_of: Callable[[fx.Node], Mapping[fx.Node, None]] = attrgetter("_input_nodes")
"""What `all_input_nodes` of a node lists, without making a list: to be read at once, while nobody
edits the node."""


content_of: Callable[[fx.Node], tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = attrgetter(
    "name", "target", "_args", "_kwargs"
)
"""Name, target, arguments and keyword arguments of a node."""


def calls_by_target(graph: fx.Graph) -> Iterator[tuple[Any, Collection[fx.Node]]]:
    """Each target of calls of functions with the nodes that call it, in no order. The graph keeps
    this table up to date itself, and `lint` compares it with the nodes."""
    for op, target, nodes in nodes_by_kind(graph):
        if op == "call_function":
            yield target, nodes


def nodes_by_kind(graph: fx.Graph) -> Iterator[tuple[str, Any, Collection[fx.Node]]]:
    """As `calls_by_target`, of all nodes: kind, target, nodes. Those that are no calls of functions
    have no target here."""
    for (op, target), nodes in graph._find_nodes_lookup_table.table.items():
        if nodes:
            yield op, target, nodes


def copy_codegen(source: fx.Graph, destination: fx.Graph) -> None:
    """Let `destination` take and return pytrees as `source` does."""
    destination.set_codegen(copy.deepcopy(source._codegen))


def copy_node(
    graph: fx.Graph, node: fx.Node, value_of: Callable[[fx.Node], Any], held: Any = None
) -> fx.Node:
    """`graph.node_copy(node, value_of)` in half of the time: arguments are put in when the node is
    there, so that those of a node that exists are not looked through for symbolic numbers.

    Args:
        held: name, target, arguments, keyword arguments and metadata, in place of those of `node`.
    """
    name, target, args, kwargs, meta = held or (
        node.name, node.target, node.args, node.kwargs, node.meta
    )  # fmt: skip
    copy = graph.create_node(node.op, target, name=name, type_expr=node.type)
    # the attribute of the class, past `Node.__setattr__`, which does book-keeping for targets
    if args:
        object.__setattr__(copy, "args", fx.node.map_arg(args, value_of))
    if kwargs:
        object.__setattr__(copy, "kwargs", fx.node.map_arg(kwargs, value_of))
    copy.meta.update(meta)
    return copy


def node_at_line(graph_module: fx.GraphModule, line: int) -> fx.Node | None:
    """The node that a line of the generated code of a graph runs."""
    lines: Any = graph_module._lineno_map
    index = (lines or {}).get(line - graph_module._prologue_start)
    return None if index is None else list(graph_module.graph.nodes)[index]


# ---------------------------------------------------------------------------- saved graphs


def has_symbolic_shape(tensor: torch.Tensor) -> bool:
    """Whether sizes, strides or offset of a tensor are not plain numbers."""
    if not tensor._has_symbolic_sizes_strides:
        return False
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)


def known_number(value: torch.SymInt | torch.SymFloat) -> int | float | None:
    """The value of a symbolic number that is a constant, else None."""
    node: Any = value.node
    known: int | float | None = (
        node.maybe_as_int() if isinstance(value, torch.SymInt) else node.maybe_as_float()
    )
    return known


def new_unknown(mode: Any, integer: bool) -> torch.SymInt | torch.SymFloat:
    """A symbolic number of which nothing is known, for fake tensors of `mode`."""
    environment = mode.shape_env
    with environment.ignore_fresh_unbacked_symbols():
        if integer:
            return environment.create_unbacked_symint()  # type: ignore[no-any-return]
        return environment.create_unbacked_symfloat()  # type: ignore[no-any-return]


def fake_like(
    mode: Any, meta: torch.Tensor, device: torch.device, *, conj: bool = False, neg: bool = False
) -> torch.Tensor:
    """A fake tensor on `device` over the storage of a tensor on the meta device."""
    from torch._subclasses.fake_tensor import FakeTensor

    fake: torch.Tensor = FakeTensor(mode, meta, device)
    if not (conj or neg):
        return fake
    with mode:
        fake = torch.conj(fake) if conj else fake
        return torch._neg_view(fake) if neg else fake


class DescribedTensor(torch.Tensor):
    """A tensor on the meta device that says it is on another one: to be looked at, not computed
    with. Unlike a fake tensor it needs none of torch's tracers, which take seconds to import.

    Attributes:
        described_device: where it says that it is.
    """

    described_device: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.described_device


def described_tensor(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A described tensor over the storage of one on the meta device."""
    described = meta.as_subclass(DescribedTensor)
    described.described_device = device
    return described


def rank_among_several() -> int | None:
    """This process's rank in the default process group; None where it is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.get_rank()


# ---------------------------------------------------------------------------- modes


@contextmanager
def without_modes() -> Iterator[None]:
    """No tracing, fake tensor, counting or functorch mode of the caller's sees what runs inside."""
    from torch._dispatch.python import no_python_dispatcher
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        no_python_dispatcher(),
        torch._C._PreserveDispatchKeyGuard(),
    ):
        # Inside an operator on fake tensors, as where their garbage is collected there, those on
        # all tensors would be of the meta device.
        torch._C._set_meta_in_tls_dispatch_include(False)
        yield


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """While active, fake tensors do not log what an operator raises, with a trace of their own."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    refuse: Callable[[logging.LogRecord], bool] = lambda record: False  # noqa: E731
    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)


def inserts_at_end(graph: fx.Graph) -> bool:
    """Whether no insertion point is active in a graph."""
    return bool(graph._insert == graph._root.prepend)


# ---------------------------------------------------------------------------- costs


def flop_formula(target: Any) -> Callable[..., int] | None:
    """What torch's flop counter computes an operator's operations by: takes the operator's
    arguments, and what it gives as `out_val`."""
    from torch.utils.flop_counter import flop_registry

    packet = target.overloadpacket if isinstance(target, OpOverload) else None
    return None if packet is None else flop_registry.get(packet)
