"""Host work that a step must not do: the reason and the cure for each kind.

A captured step runs as a graph: its Python runs while it is traced, and not in each call. What it
would do on the host is refused where it stands. Three cures take such a line out of the step:

    an argument    step(model, optimizer, batch, random.random())
    a result       losses.append(step(model, optimizer, batch))
    a callback     graphopt.callback(function, loss)
"""

from __future__ import annotations

from enum import Enum

from graphopt.errors import CaptureError
from graphopt.ir.user_frames import own_location
from graphopt.tracing.scalars.numbers import refused

_RETURN = "return the value, and do this behind the call"
_BEFORE = "do this before the call, and pass the result as an argument"


class HostWork(Enum):
    """A kind of host work that no graph does, with the text of reason and cure."""

    CHANGE = (
        "changes {}, and not by a tensor or a number that it puts into an attribute or an item of a"
        " dictionary",
        "return the value and add it behind the call, history.append(step(…)); or let a function"
        " do it that is called in every step: graphopt.callback(history.append, loss); what is"
        " done once, such as filling a cache or hooks that the first forward installs, do before"
        " the first step: model(batch)",
    )
    TEXT = (
        "makes a text of {}, which is another one in each call",
        f"{_RETURN}; or make the text in a function that is called in every step:"
        " graphopt.callback(lambda loss: print(f'loss {{loss:.3f}}'), loss.item())",
    )
    PRINT = (
        "prints",
        f"{_RETURN}; or let a function do it that is called in every step:"
        " graphopt.callback(print, loss.item())",
    )
    LOG = (
        "writes to a log or shows something ({})",
        f"{_RETURN}; or let a function do it that is called in every step:"
        " graphopt.callback(logger.info, 'loss %f', loss.item())",
    )
    WARNING = (
        "warns",
        f"{_RETURN}; or let a function do it that is called in every step:"
        " graphopt.callback(warnings.warn, 'a message')",
    )
    WRITE = (
        "writes to a file ({})",
        f"{_RETURN}; or let a function do it that is called in every step, and opens the file"
        " itself: graphopt.callback(write_row, loss.item())",
    )
    READ = ("reads from a file, a folder or a process ({})", _BEFORE)
    CLOCK = (
        "reads a clock ({})",
        "read it before and behind the call, or in a function that is called in every step:"
        " graphopt.callback(function); or pass the time as an argument",
    )
    DRAW = (
        "draws from a generator of Python or numpy ({})",
        f"draw with torch, torch.rand(()).item(); or {_BEFORE}",
    )
    ARRAY = (
        "computes with an array of numpy's ({})",
        "compute with tensors; or pass the array as a tensor, torch.from_numpy(array); or return"
        " the tensor and convert it behind the call; or let a function do it that is called in"
        " every step: graphopt.callback(function, tensor)",
    )
    ITERATOR = (
        "takes values from an iterator outside its arguments ({})",
        "take them outside the step, and pass them as arguments: step(model, next(batches))",
    )
    SCHEDULER = (
        "steps a scheduler ({})",
        "step it behind the call: loss = step(…); scheduler.step()",
    )

    def said(self, what: str) -> tuple[str, str]:
        """The texts of reason and cure.

        Args:
            what: the step does this to, or by; a part of the reason.
        """
        reason, cure = self.value
        return f"it {reason.format(what)}, which would happen at capture only", cure.format()

    def error(self, what: str, location: object) -> CaptureError:
        """The `CaptureError` for this kind of work, with its source line."""
        reason, cure = self.said(what)
        return CaptureError(reason, location=location, hint=cure)

    def refused(self, what: str = "", location: object = None) -> CaptureError:
        """The `CaptureError`, which refuses the step even if it is caught.

        Args:
            location: by default the line that runs.
        """
        return refused(self.error(what, location or own_location()))
