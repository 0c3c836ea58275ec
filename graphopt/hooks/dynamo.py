"""The backend of `torch.compile(model, backend="graphopt")`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from graphopt._compat import hooks as _torch
from graphopt.errors import PipelineSyntaxError
from graphopt.hooks.inductor import InductorPass, after_registered
from graphopt.hooks.partial import PartialManager
from graphopt.manager.names import suggestion

_SETTING = "post_grad_custom_pre_pass"
"""Where passes see the graphs before Inductor's own rewrites."""

_OUTSIDE = (
    "DistributedDataParallel averages gradients outside the graphs of torch.compile, so that passes"
    " find no collective in them\n"
    "  hint:  graphopt.compile(train_step) takes the bare model and averages by itself; or set"
    " torch._dynamo.config.optimize_ddp = 'python_reducer' and"
    " torch._dynamo.config.compiled_autograd = True, wrap the model after that, and compile the"
    " function that calls loss.backward(): torch.compile(train_step, backend='graphopt')"
)

_OPTIONS = ("pipeline", "verify", "on_error", "lower")
_LOWER = ("inductor", None)


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Backend of `torch.compile`: Inductor on graphs that graphopt's passes have rewritten.

    Called by torch with each graph that Dynamo finds. AOTAutograd makes a forward and a backward of
    it, or one graph where nothing needs a gradient; the passes run on each of these.

    Args:
        mode: the mode of ``backend="inductor"``.
        options: ``pipeline`` (as of `graphopt.compile`; "default"), ``verify`` (as of
            `graphopt.compile`; None: the environment decides), ``on_error`` ("raise", or "skip":
            warn and compile without the pass), ``lower`` ("inductor", or None: run the graphs as
            ``backend="aot_eager"`` does). All others are Inductor's.

    Raises:
        PipelineSyntaxError: an option is unknown or cannot be understood.
        VerificationError: a pass broke a graph. Torch wraps these in `BackendCompilerFailed`.

    >>> compiled = torch.compile(torch.nn.ReLU(), backend="graphopt")
    """
    given = dict(options or {})
    lower = given.pop("lower", "inductor")
    if lower not in _LOWER:
        raise PipelineSyntaxError(f"lower={lower!r}: 'inductor' or None is expected")
    manager = PartialManager(
        given.pop("pipeline", "default"),
        verify=given.pop("verify", None),
        on_error=given.pop("on_error", "raise"),
    )
    _check_options(given, mode, lower)
    if manager.pipeline and _torch.averages_outside_graphs():
        warnings.warn(_OUTSIDE, UserWarning, stacklevel=2)
    if lower is None:
        return _torch.compile_eagerly(
            gm, example_inputs, lambda graph: manager.optimize(graph, _torch.kind_of_graph())
        )
    settings = _torch.inductor_options(mode, given)
    if manager.pipeline:
        # An option replaces what is registered, as with backend="inductor".
        registered = (
            _torch.passes_in(settings[_SETTING])
            if _SETTING in settings
            else _torch.registered_passes(_SETTING)
        )
        settings[_SETTING] = after_registered(registered, InductorPass(manager))
    return _torch.compile_with_inductor(gm, example_inputs, settings)


def _check_options(given: Mapping[str, Any], mode: str | None, lower: str | None) -> None:
    inductor = [] if lower is None else _torch.names_of_inductor_options()
    for name in given:
        if name.replace("-", "_") not in inductor:
            raise PipelineSyntaxError(
                f"backend='graphopt' has no option {name!r}"
                + suggestion(name, _OPTIONS if lower is None else [*_OPTIONS, *inductor])
            )
    if lower is None and mode is not None:
        raise PipelineSyntaxError(f"mode={mode!r} is for Inductor, which lower=None leaves out")
