"""graphopt pipelines as custom passes of Inductor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from graphopt._compat import hooks as _torch
from graphopt._compat.inductor import patched_config
from graphopt.errors import PassError
from graphopt.hooks.decomposition import decompose_new, targets_of
from graphopt.hooks.identity import identity
from graphopt.hooks.partial import AnyPipeline, PartialManager


class InductorPass(_torch.CustomGraphPass):
    """A pipeline as a custom pass of Inductor, made by `inductor_pass`.

    Attributes:
        manager: runs the pipeline.

    >>> str(graphopt.hooks.inductor_pass("schedule_comm_wait").manager)
    'schedule_comm_wait'
    """

    def __init__(self, manager: PartialManager) -> None:
        self.manager = manager

    def __call__(self, graph: fx.Graph) -> None:
        module = _module_of(graph)
        before = targets_of(graph)
        self.manager.optimize(module, _torch.kind_of_graph())
        decompose_new(module.graph, before)
        _torch.complete_metadata(module.graph)

    def uuid(self) -> Any:
        """The key of the pipeline in Inductor's caches: passes, their code and options.

        None if the code of a pass cannot be found, if an option has no text form, and if graphs are
        dumped: nothing is cached then.
        """
        return identity(self.manager)

    def __repr__(self) -> str:
        return f"inductor_pass({str(self.manager)!r})"


class PassSequence(_torch.CustomGraphPass):
    """Several custom passes of Inductor that run one after the other."""

    def __init__(self, passes: Sequence[_torch.GraphPass]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        module = _module_of(graph)
        for graph_pass in self.passes:
            # A pipeline that fails leaves another graph object in the module.
            _torch.apply_graph_pass(graph_pass, module.graph)

    def uuid(self) -> Any:
        """The keys of all passes, or None if one has none."""
        identities = tuple(map(_torch.identity_of, self.passes))
        return None if any(one is None for one in identities) else identities

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.passes)!r})"


def inductor_pass(
    pipeline: AnyPipeline, *, verify: str | None = None, on_error: str = "raise"
) -> InductorPass:
    """Make a pipeline a pass for one of Inductor's settings, such as `post_grad_custom_post_pass`.

    Args:
        pipeline: see `graphopt.compile`. Passes that need a whole step are left out.
        verify: see `graphopt.compile`; None: as the environment says.
        on_error: what becomes of a pass that is refused or raises: "raise" its error, or "skip" it
            and those after it, with a warning.

    Raises:
        PipelineSyntaxError: the pipeline or a setting cannot be understood.

    >>> from torch._inductor import config
    >>> fusion = graphopt.hooks.inductor_pass("comm_fusion_with_concat")
    >>> with config.patch(post_grad_custom_post_pass=fusion):  # call compiled functions here
    ...     config.post_grad_custom_post_pass is fusion
    True
    """
    return InductorPass(PartialManager(pipeline, verify=verify, on_error=on_error))


@contextmanager
def inductor_passes(
    *,
    post_grad_pre: AnyPipeline | InductorPass | None = None,
    post_grad: AnyPipeline | InductorPass | None = None,
    joint_pre: AnyPipeline | InductorPass | None = None,
    joint_post: AnyPipeline | InductorPass | None = None,
    verify: str | None = None,
    on_error: str = "raise",
) -> Iterator[None]:
    """While active, Inductor applies pipelines to the graphs that it compiles.

    They run after what is registered there already, which is back in its place afterwards. What
    counts is when a graph is compiled: on the first call of a compiled function, not when
    `torch.compile` is called.

    Args:
        post_grad_pre: for forward, backward and inference graphs, before Inductor's own rewrites.
        post_grad: for the same graphs, after these.
        joint_pre: for joint and inference graphs, before Inductor's rewrites.
        joint_post: for the same graphs, after these.
        verify, on_error: see `inductor_pass`.

    Raises:
        PipelineSyntaxError: a pipeline or a setting cannot be understood. Nothing is registered.

    >>> from torch._inductor import config
    >>> with graphopt.hooks.inductor_passes(post_grad="schedule_comm_wait"):  # call them here
    ...     config.post_grad_custom_post_pass is not None
    True
    """
    pipelines = {
        "post_grad_custom_pre_pass": post_grad_pre,
        "post_grad_custom_post_pass": post_grad,
        "joint_custom_pre_pass": joint_pre,
        "joint_custom_post_pass": joint_post,
    }
    settings = {}
    for setting, pipeline in pipelines.items():
        if pipeline is None:
            continue
        if not isinstance(pipeline, InductorPass):
            pipeline = inductor_pass(pipeline, verify=verify, on_error=on_error)
        settings[setting] = after_registered(_torch.registered_passes(setting), pipeline)
    with patched_config(dict(settings)):
        yield


def after_registered(
    registered: Sequence[_torch.GraphPass], ours: InductorPass
) -> _torch.CustomGraphPass:
    """Appends our passes to those that the user has registered with Inductor."""
    return PassSequence([*registered, ours]) if registered else ours


def _module_of(graph: fx.Graph) -> fx.GraphModule:
    module = graph.owning_module
    if module is None:
        raise PassError(
            "a graph that belongs to no graph module takes no passes: make an fx.GraphModule of it"
        )
    return module
