"""Whose functions are observed: those of the user, of models and of most libraries."""

from __future__ import annotations

import types
from functools import lru_cache
from pathlib import Path

from graphopt.ir.user_frames import is_library_file

_READ_THROUGH = frozenset(
    {"os", "dataclasses", "copy", "collections", "enum", "types", "functools", "configparser",
     "argparse", "string", "_collections_abc", "graphlib", "reprlib", "queue", "weakref",
     "_weakrefset", "csv"}
)  # fmt: skip
"""Modules of the standard library whose functions read what they are given."""

_INTERNAL = frozenset({"sympy", "mpmath", "numpy", "triton", "networkx"})
"""Libraries that torch uses while it traces."""

_OF_TORCH = ("torch/optim/lr_scheduler.py", "torch/optim/swa_utils.py", "torch/amp/grad_scaler.py")


@lru_cache(maxsize=4096)
def is_observed(filename: str) -> bool:
    """Whether the instructions of a file's functions are looked at."""
    if not is_library_file(filename):
        return not _INTERNAL.intersection(Path(filename).parts)
    name = filename.replace("\\", "/")
    if name.endswith(_OF_TORCH) or "/torch/distributions/" in name:
        return True
    path = Path(filename)
    name = path.parent.name if path.stem == "__init__" else path.stem
    if filename.startswith("<frozen "):
        name = filename.removeprefix("<frozen ").removesuffix(">")
    return name in _READ_THROUGH and not {"torch", "graphopt"} & set(path.parts)


def is_generated(code: types.CodeType) -> bool:
    """Whether the standard library has made a function of text: the constructor of a named tuple,
    which reads nothing but its arguments."""
    return code.co_filename == "<string>" and "_tuple_new" in code.co_names
