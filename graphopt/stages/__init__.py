"""The stages between a call of a training step and the graphs that run.

    capture → parallelize → passes → derive → outline and lower → finalize → record

`graphopt.stages.compiling.Stages` is the list, and its `compile` the one function that goes through
it. The top layer makes it with `stages_for` and hands it to whoever compiles: `TrainStep`,
`Stage.compile`, the hooks and the command line. `calls.Calls` runs the calls of a step by what it
makes, and `other_branch.OtherBranch` those in which an assumption of a graph fails.
"""

from graphopt.stages.auto import AutoPipeline
from graphopt.stages.compiling import Stages, stages_for
from graphopt.stages.pipelines import default_pipeline, manager_for, options_for

__all__ = ["AutoPipeline", "Stages", "default_pipeline", "manager_for", "options_for", "stages_for"]
