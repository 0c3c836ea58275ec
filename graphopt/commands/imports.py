"""The option `--import`: modules that declare further passes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from graphopt.errors import GraphOptError
from graphopt.ir.user_files import place


def import_passes(modules: Iterable[str]) -> None:
    """Imports each module, given as a file (``my_passes.py``) or a dotted name.

    Raises:
        GraphOptError: it cannot be imported.
    """
    for name in modules:
        try:
            imported(name)
        except (Exception, SystemExit) as error:
            raise GraphOptError(f"--import {name}: {type(error).__name__}: {error}") from error


def imported(name: str) -> ModuleType:
    """The module of a file or a dotted name."""
    path = place(name)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    if str(path.parent.absolute()) not in sys.path:  # files import those beside them
        sys.path.append(str(path.parent.absolute()))
    spec.loader.exec_module(module)
    return module
