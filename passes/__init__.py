"""Graph passes, one per file. Import as ``graphopt.passes``.

Each pass is an attribute here under its own name, whichever file it is in:
``from graphopt.passes import schedule_comm_wait``. Files in this folder that need another pass name
it, or import it from its file.
"""

if __name__ == "passes":
    raise ImportError("import graphopt.passes instead of passes", name=__name__)

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from graphopt.manager import Pass


def __getattr__(name: str) -> Pass:
    if not name.startswith("_"):
        for module in _modules():
            for pass_ in _passes_of(module):
                if pass_.name == name:
                    return pass_
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(pass_.name for module in _modules() for pass_ in _passes_of(module))


def _modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(__path__):
        yield importlib.import_module(f"{__name__}.{found.name}")


def _passes_of(module: ModuleType) -> Iterator[Pass]:
    for value in vars(module).values():
        if isinstance(value, Pass) and value.module == module.__name__:
            yield value
