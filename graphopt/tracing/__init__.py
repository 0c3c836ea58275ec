"""Capture: eager code to one functional FX graph.

`capture.capture_call` is the whole flow: find what the step works on (`inputs`), run it once under
`make_fx` (`trace`, `step_run`), write the raw graph functionally (`functional`), and say what its
results are for (`results`). `captured_dialect` has the stages behind the trace, and `retries` says
how a refused trace is tried again. While the step runs, `interception` answers what it asks of
tensors, `scalars` what it does with numbers, and `bytecode` sees what it reads and writes around
its arguments, which goes into `outside` and becomes guards, inputs and side effects (`effects`).
What no graph can do is refused (`refusals`), and all that the trace has changed is put back
(`rollback`). `exactness` and `layouts` give operators the bits and strides of eager code, `tensors`
follows storages and attributes, `optimizers` the state of the first step, `ranks` what several
ranks share.
"""

from graphopt.ir.source import SourceLine
from graphopt.tracing.capture import capture
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.entries import InputSpec

__all__ = ["CapturedStep", "InputSpec", "SourceLine", "capture"]
