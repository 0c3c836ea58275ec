"""Conversion of exceptions during a trace to `CaptureError`s with the user's line and a cure."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError, GraphOptError
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import is_library_file, is_tracing_file, user_line_of
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.refusals.unknown_features import unknown_feature

_VALUE = (
    "do it in a function that every step calls: graphopt.callback(function, loss.item()), or return"
    " the value from the step"
)
_PICKLED = HostWork.WRITE.said("torch.save, pickle, of tensors or numbers")

_DEVICES = (
    "it mixes tensors of different devices",
    "move the batch to the model's device first: batch.to(device)",
)
_NUMBERS = ("ReadFloat", "ReadInt", "ReadBool")

_ADVICE: tuple[tuple[str, str, str | None], ...] = (
    ("is not JSON serializable", *HostWork.TEXT.said("a value of the graph")),
    *((kind, "it takes the value of a tensor for a plain number", _VALUE) for kind in _NUMBERS),
    (
        "does not require grad and does not have a grad_fn",
        "backward was called on a value that needs no gradient",
        "compute the loss from parameters that require gradients, outside torch.no_grad()",
    ),
    (
        "_apply(): Couldn't swap",
        "it casts or moves parameters of a module (module.to(…), half(), float(), cuda())",
        "do so once, outside the step; to compute in another dtype, cast what the module is given,"
        " use autocast, or call torch.nn.functional with weight.to(dtype)",
    ),
    ("Unhandled FakeTensor Device Propagation", *_DEVICES),
    ("Expected all tensors to be on the same device", *_DEVICES),
    (
        "Please convert all Tensors to FakeTensors first",
        "it uses a tensor from outside its arguments, which would be baked in as a constant",
        "pass it, or the module that owns it, as an argument of the step",
    ),
    (
        "Mixing fake modes",
        "it uses a fake tensor of another FakeTensorMode than that of its arguments",
        "make all tensors in one mode, or none of them, and pass them as arguments of the step",
    ),
    (
        "got FakeTensor",
        "it takes the value of a tensor for a plain number, such as a size",
        "take sizes from shapes or Python numbers; pad sequences of several lengths, and mask the"
        " loss, instead of packing them",
    ),
    (
        "InferenceMode::is_enabled()",
        "it differentiates forward (jacfwd, hessian) through zeros that torch hides from a trace",
        "differentiate backward: jacrev(f) for jacfwd(f), jacrev(jacrev(f)) for hessian(f)",
    ),
    (
        "its data is not allocated yet",
        "a function of torch takes the values of a tensor for plain numbers",
        "give it plain numbers where it takes them: a list in place of the tensor",
    ),
    ("<locals>.CorrectedMode", *_PICKLED),
    ("<locals>.QuickShapeEnv", *_PICKLED),
    (".numpy() is not supported", *HostWork.ARRAY.said("one of a tensor")),
    (
        ".tolist() is not supported",
        "it converts a tensor to a list",
        "convert it in a function that every step calls: graphopt.callback(function, tensor), or"
        " return the tensor from the step",
    ),
)

_SIZES = (
    "Size-like symbols: u",
    "unhashable type: non-nested SymInt",
    "tracked with proxy",
    "with symbolic sizes/strides",
)
"""Texts of errors about sizes that are known only when a step runs."""


@contextmanager
def explained(step: Callable[..., Any]) -> Iterator[None]:
    """While active, exceptions become `CaptureError`s; graphopt's own keep their type."""
    try:
        yield
    except CaptureError as error:
        if error.location is None:
            error.location = _location(error, step)
        raise
    except GraphOptError:
        raise
    except Exception as error:
        raise _explain(error, step) from error


def raised_by_step(error: CaptureError) -> Exception | None:
    """The user's own exception (`raise`, `assert`) behind a refusal, or None if it has another
    cause."""
    filename = _raising_file(error)
    cause = error.__cause__
    if filename is None or is_library_file(filename) or not isinstance(cause, Exception):
        return None
    return cause


def is_raised(error: CaptureError) -> bool:
    """True if code of the step or of a library it calls raised the exception behind a refusal,
    rather than graphopt or torch's tracing."""
    filename = _raising_file(error)
    return filename is not None and not is_tracing_file(filename)


def _raising_file(error: CaptureError) -> str | None:
    """The file whose `raise` or `assert` is behind a refusal, or None."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, GraphOptError):
        return None
    trace = cause.__traceback__
    assert trace is not None, "it has been raised"
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    raises = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return code.co_filename if raises else None


@contextmanager
def located(line: str | None) -> Iterator[None]:
    """While active, refusals without a source line get this one."""
    try:
        yield
    except CaptureError as error:
        error.location = error.location or line
        raise


def _location(error: BaseException, step: Callable[..., Any]) -> str | None:
    line = user_line_of(error) or definition_of(step)
    return None if line is None else str(line)


def definition_of(step: Callable[..., Any]) -> SourceLine | None:
    """Where a step is defined."""
    code = getattr(step, "__code__", None)
    if code is None:
        return None
    return SourceLine(code.co_filename, code.co_firstlineno, code.co_name)


def _explain(error: Exception, step: Callable[..., Any]) -> CaptureError:
    reason, cure = _cause(error, str(error))
    return CaptureError(reason, location=_location(error, step), hint=cure)


def _cause(error: Exception, text: str) -> tuple[str, str | None]:
    """The reason why no capture follows what has raised an exception, and the cure."""
    unknown = unknown_feature(error)
    if unknown is not None:
        return unknown
    if isinstance(error, KeyError) and any(isinstance(x, torch.Tensor) for x in error.args):
        return (
            "it looks for a parameter in a dictionary of its own, whose keys are parameters",
            "let the keys be names, as in dict(model.named_parameters())",
        )
    if any(fragment in text for fragment in _SIZES):
        return (
            "the size of a tensor depends on values (boolean-mask indexing, nonzero, a length that"
            " is drawn, or the like), and what is computed from it needs the size",
            "keep the size: torch.where(mask, x, 0), or a mean as (x * mask).sum() /"
            " mask.sum(); or index outside the step, and pass the result; and pass a length that is"
            " drawn at random",
        )
    if isinstance(error, _compat.data_dependent_errors()):
        return (
            "Python code depends on the value of a tensor",
            "take the number with tensor.item(), where float or int is called by another"
            " function or in a library; use tensor operations (torch.where, torch.clamp, …); log"
            " values with graphopt.callback(function, tensor), or return them from the step",
        )
    if isinstance(error, _compat.unsupported_operator_errors()):
        return (
            f"an operator has no shape rule (meta kernel): {_first_line(text)}",
            "register one with torch.library.register_fake, or use another operator",
        )
    for fragment, reason, advice in _ADVICE:
        if fragment in text:
            return reason, advice
    return (
        f"it raised {type(error).__name__}: {_first_line(text)}",
        "run the step once without graphopt: if that fails as well, the error is in the step;"
        " if not, no capture knows what this line does: move it out of the step, or let the step"
        ' run as it is, graphopt.compile(step, fallback="eager")',
    )


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]
