"""Identities of pipelines, which Inductor's caches use as keys.

Two pipelines with one identity leave the same graphs. So the identity has the code and the options
of each pass, all of graphopt's own code, the version of torch, and the rank where a pass says that
it depends on it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import graphopt
from graphopt import _compat
from graphopt.hooks.partial import PartialManager
from graphopt.hooks.sources import source_digest
from graphopt.manager import Pass
from graphopt.manager.literals import has_literal, literal
from graphopt.manager.options import bind
from graphopt.manager.text import Step


def identity(manager: PartialManager) -> str | None:
    """The identity of a pipeline, equal in every process, or None if there is none.

    None as well for a pipeline that somebody watches, by dumps or callbacks: what comes from a
    cache was not rewritten now, and there would be nothing to see.
    """
    if manager.observed:
        return None
    parts = [graphopt.__version__, _own_code(), torch.__version__, manager.verify, manager.on_error]
    for step in manager.enabled:
        part = _of_step(step)
        if part is None:
            return None
        parts.append(part)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _of_step(step: Step) -> str | None:
    pass_ = step.pass_
    arguments = bind(pass_.options, step.options, pass_.name)
    source = source_digest(pass_.function)
    if source is None or not all(map(has_literal, arguments.values())):
        return None
    options = {name: literal(value) for name, value in sorted(arguments.items())}
    return repr((source, options, _declaration(pass_), _place() if pass_.bakes_rank else None))


def _declaration(pass_: Pass) -> tuple[Any, ...]:
    return (
        *pass_.identity,
        pass_.name,
        pass_.prerequisites,
        pass_.apply_after,
        pass_.apply_before,
        pass_.repeatable,
        pass_.changes_numerics,
        pass_.bakes_rank,
    )


def _place() -> tuple[int, int] | None:
    """Rank and world size, or None without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if _compat.in_process_group() else None


@cache
def _own_code() -> str:
    """The digest of all source files of graphopt."""
    root = Path(graphopt.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(_python_files(root)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _python_files(root: Path) -> Iterator[Path]:
    # In a checkout, the folders of passes and lowerings are links.
    for folder, _, files in os.walk(root, followlinks=True):
        yield from (Path(folder) / name for name in files if name.endswith(".py"))
