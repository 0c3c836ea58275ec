"""Errors raised by pipelining, besides `PartitionError`."""

from __future__ import annotations

from graphopt.errors import CaptureError

_HINT = (
    "typical reasons are: an `if` or a loop that depends on values of tensors, `.item()` or"
    " `.tolist()`, a shape that depends on data, an operator without a fake kernel, a container"
    " that is not a pytree among the arguments or results, and code that writes to tensors outside"
    " the module. `torch.export.export(module, args, kwargs)` shows the details"
)


class ModuleCaptureError(CaptureError):
    """A model cannot be exported as one graph; `__cause__` is the error of `torch.export`.

    >>> from graphopt.pipelining import ModuleCaptureError
    >>> issubclass(ModuleCaptureError, graphopt.GraphOptError)
    True
    """

    def __init__(self, module: str, cause: BaseException) -> None:
        first = next((line for line in str(cause).splitlines() if line.strip()), "")
        self.module, self.heading = module, f"{module} cannot be captured whole"
        super().__init__(f"{type(cause).__name__}: {first.strip()}", hint=_HINT)


class LostGradientError(CaptureError):
    """Dividing the model into stages would change its gradients.

    >>> from graphopt.pipelining import LostGradientError
    >>> issubclass(LostGradientError, graphopt.GraphOptError)
    True
    """

    heading = "stages would compute other gradients than the model"


class StageCompileError(CaptureError):
    """A stage cannot be compiled, or its compiled graphs do not fit the schedule's call.

    Attributes:
        stage: its index.

    >>> from graphopt.pipelining import StageCompileError
    >>> issubclass(StageCompileError, graphopt.GraphOptError)
    True
    """

    def __init__(self, stage: int, reason: str, *, hint: str | None = None) -> None:
        super().__init__(reason, hint=hint)
        self.stage, self.heading = stage, f"stage {stage} cannot be compiled"
