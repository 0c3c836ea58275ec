"""`@graph_optimization_pass`: declares a pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from graphopt.errors import PassDefinitionError
from graphopt.manager.declaration import Pass
from graphopt.manager.names import suggestion
from graphopt.manager.records import PassRecord
from graphopt.manager.registry import PassRegistry, default_registry
from graphopt.manager.running import run_alone


def graph_optimization_pass(
    prerequisites: Iterable[Pass | str] = (),
    apply_after: Iterable[Pass | str] = (),
    *,
    apply_before: Iterable[Pass | str] = (),
    name: str | None = None,
    repeatable: bool = False,
    changes_numerics: bool = False,
    changes_communication: bool = False,
    whole_step: bool = False,
    bakes_rank: bool = False,
    registry: PassRegistry | None = None,
) -> Callable[[Callable[..., int | None]], Pass]:
    """Declares a function that edits a graph module's graph in place as a pass.

        @graph_optimization_pass(prerequisites=["comm_fusion_with_concat"])
        def my_pass(gm: fx.GraphModule, threshold: int = 3) -> int:
            \"\"\"What it does, in one line.\"\"\"

    Parameters after the first are options, which pipelines give by name; text can give those whose
    type is int, float, str, bool, a list or tuple of these, or a union with None. The function may
    return how many changes it made. Cleaning up, checks and records are the `PassManager`'s.

    Args:
        prerequisites: passes, or names of passes, that must have been applied before: what it
            cannot work without.
        apply_after: passes, or names, that come first if both are applied. The name of a pass that
            is not installed constrains nothing; where pipelines look for names, it is warned of.
        apply_before: passes, or names, that come later if both are applied.
        name: by which pipelines know it; None: the name of the function.
        repeatable: it may be applied to a graph more than once.
        changes_numerics: it may change the bits of the results. What is proven to keep them is
            accepted all the same.
        changes_communication: its collectives may send other amounts than before, or be of other
            kinds: it compresses, sends the largest elements alone, or leaves out what nobody reads.
            Without `changes_numerics` the results are still proven to be the same.
        whole_step: it needs the graph of a whole training step, and is left out inside
            `torch.compile`. A first parameter that is annotated `IterGraphModule` says so as well.
        bakes_rank: it writes this process's rank, or what follows from it, into the graph, so that
            ranks may not share compiled code.
        registry: where it is declared; None: where pipelines look for names.

    Raises:
        PassDefinitionError: the function cannot be a pass, another pass has its name, or the
            constraints form a circle.

    >>> import graphopt, torch
    >>> @graphopt.graph_optimization_pass(registry=graphopt.PassRegistry())
    ... def count_nodes(gm, least: int = 1) -> None:
    ...     print(len(gm.graph.nodes) >= least)
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> record = count_nodes(captured.graph_module, least=3)
    True
    """
    if callable(prerequisites) and not isinstance(prerequisites, Pass):
        raise PassDefinitionError(
            "write the decorator with parentheses:\n"
            "    @graph_optimization_pass()\n"
            f"    def {getattr(prerequisites, '__name__', 'my_pass')}(gm): ..."
        )
    chosen = default_registry() if registry is None else registry

    def run(pass_: Pass, gm: fx.GraphModule, options: Mapping[str, Any]) -> PassRecord:
        return run_alone(pass_, gm, options, chosen)

    def declare(function: Callable[..., int | None]) -> Pass:
        declared = Pass(
            function,
            run,
            name=name,
            prerequisites=prerequisites,
            apply_after=apply_after,
            apply_before=apply_before,
            repeatable=repeatable,
            changes_numerics=changes_numerics,
            changes_communication=changes_communication,
            whole_step=whole_step,
            bakes_rank=bakes_rank,
        )
        registered = chosen.register(declared)
        if registry is None:  # one of one's own may be filled in any order
            _warn_of_unknown(registered, chosen)
        return registered

    return declare


def _warn_of_unknown(pass_: Pass, registry: PassRegistry) -> None:
    """Warns of `apply_after` and `apply_before` names that match no pass: misspelt, or not
    installed."""
    if pass_.module.startswith("graphopt.passes."):  # whose other files may not be imported yet
        return
    for name in registry.unknown(pass_):
        meant = suggestion(name, registry.names())
        warnings.warn(
            f"pass {pass_.name!r} is to be applied after or before {name!r}, which is no pass"
            f" so far and constrains nothing until it is one{meant if 'mean' in meant else ''}",
            stacklevel=3,
        )
