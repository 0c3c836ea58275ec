"""Checks of the order constraints between passes, before any graph is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from graphopt.errors import PassOrderError
from graphopt.manager.declaration import Pass
from graphopt.manager.registry import PassRegistry


def check_order(
    passes: Sequence[Pass],
    applied: Sequence[str],
    registry: PassRegistry,
    disabled: Collection[str] = (),
) -> None:
    """Raises unless `passes` may be applied to a graph in this order.

    Args:
        passes: in the order in which they are to run.
        applied: what was applied to the graph before.
        registry: knows the constraints of passes that were applied.
        disabled: passes that were left out of `passes`.

    Raises:
        PassOrderError: a prerequisite is missing, a pass comes after one that has to follow it, or
            a pass that is not repeatable comes twice.
        PassDefinitionError: a prerequisite is an unknown pass.
    """
    registry.check_known(passes)
    constraints = _constraints(applied, registry) | {p.name: p.apply_after for p in passes}
    done = list(applied)
    for pass_ in passes:
        _check_repetition(pass_, done)
        _check_prerequisites(pass_, passes, done, disabled)
        _check_not_late(pass_, constraints, done)
        done.append(pass_.name)


def _constraints(applied: Sequence[str], registry: PassRegistry) -> dict[str, tuple[str, ...]]:
    """Returns the `apply_after` constraints of applied passes, which may be unknown here if
    loaded."""
    if not applied:
        return {}
    known = set(registry.names())
    return {name: registry.get(name).apply_after for name in applied if name in known}


def _check_repetition(pass_: Pass, done: Sequence[str]) -> None:
    if pass_.name in done and not pass_.repeatable:
        raise PassOrderError(
            f"pass {pass_.name!r} was applied to this graph already, and is not repeatable"
            f"{_so_far(done)}"
        )


def _check_prerequisites(
    pass_: Pass, passes: Sequence[Pass], done: Sequence[str], disabled: Collection[str]
) -> None:
    missing = [name for name in pass_.prerequisites if name not in done]
    if not missing:
        return
    name = missing[0]
    if name in disabled:
        hint = f"{name!r} is disabled: disable {pass_.name!r} as well"
    elif name in (p.name for p in passes):
        hint = f"put {name!r} before {pass_.name!r} in the pipeline"
    else:
        hint = f"run {name} -> {pass_.name}"
    raise PassOrderError(
        f"pass {pass_.name!r} needs {name!r} to have been applied before{_so_far(done)}"
        f"\n  hint:     {hint}"
    )


def _check_not_late(
    pass_: Pass, constraints: dict[str, tuple[str, ...]], done: Sequence[str]
) -> None:
    if pass_.name in done:
        return
    for other in done:
        if pass_.name in constraints.get(other, ()) or other in pass_.apply_before:
            raise PassOrderError(
                f"pass {pass_.name!r} comes too late: {other!r}, which has to come after it, was"
                f" applied before{_so_far(done)}"
                f"\n  hint:     put {pass_.name!r} before {other!r}"
            )


def _so_far(done: Sequence[str]) -> str:
    return f"\n  applied:  {' -> '.join(done) or 'nothing'}"
