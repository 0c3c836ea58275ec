"""Digests of a pass's code and everything that it uses, for cache keys.

torch's own `get_hash_for_files` reads the files that it is given and nothing else, so that code
compiled with one pass would be served for another where a file was edited after its import, where a
file that it imports is another, or where a closure or a module holds other values.
"""

from __future__ import annotations

import dis
import hashlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions, version
from modulefinder import ModuleFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from graphopt._compat.frames import stored_globals
from graphopt.manager.literals import has_literal, literal
from graphopt.tracing.rollback.reachable import codes_in, names_in

logger = logging.getLogger("graphopt")

_CHANGING = frozenset(
    {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort", "__setitem__"}
    | {"add", "discard", "popitem", "setdefault", "update"}
    | {"appendleft", "extendleft", "popleft", "rotate", "subtract"}
)
"""Methods of lists, sets, dicts, deques and counters that change them."""

_ITEM_CHANGES = frozenset({"STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR", "DUP_TOP_TWO", "COPY"})
"""Instructions behind a container whose item is assigned to; the last two: with ``+=``, which reads
container and key once more."""

_ELSEWHERE = frozenset({"graphopt", "torch", "functorch", *sys.stdlib_module_names})
"""Packages whose versions are part of an identity anyway."""


def source_digest(function: Callable[..., Any]) -> str | None:
    """The digest of a function, of everything it uses, and of the files that define these.

    That is: the loaded code of the function and of the functions that it calls by global names, the
    plain values that they read from modules and closures, and the text of its file and of every
    file that this imports, wherever the import stands. Of installed packages, the version counts.

    Returns:
        None if the file cannot be read, as for a function typed into a shell, if the function
        closes over something other than functions and plain values, or if it changes a list of its
        module, since it would be another function after each run. The log says why.
    """
    module = function.__module__ or "__main__"  # None where a text is run without a module
    if _elsewhere(module):
        return f"{module}.{function.__qualname__}"
    loaded = _LoadedCode()
    known = loaded.add(function)
    files = _imported_files(module, Path(function.__code__.co_filename))
    reason = loaded.changed
    if reason is None and not known:
        reason = "it closes over what has no text form"
    elif reason is None and files is None:
        reason = "its file cannot be read"
    if reason is not None:
        logger.info("what %s leaves is not cached: %s", function.__qualname__, reason)
        return None
    parts = (sorted(loaded.parts), sorted(files or ()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _elsewhere(module: str) -> bool:
    """True if a module is part of graphopt, torch or Python, and not `__main__`."""
    return module != "__main__" and module.partition(".")[0] in _ELSEWHERE


class _LoadedCode:
    """The functions that a digest covers, as loaded: their code, and the plain values that they
    use.

    Attributes:
        parts: one text for each.
        changed: in words, a list of a module that one of the functions changes; None if none does.
    """

    def __init__(self) -> None:
        self.parts: set[str] = set()
        self.changed: str | None = None
        self._seen: set[FunctionType] = set()

    def add(self, value: Any) -> bool:
        """Adds a value to the digest; False if its content cannot be known."""
        if has_literal(value):
            self.parts.add(literal(value))
            return True
        if not isinstance(value, FunctionType):
            return isinstance(value, ModuleType)  # its text is taken in where it is imported
        if value in self._seen or _elsewhere(value.__module__ or "__main__"):
            return True
        self._seen.add(value)
        code = value.__code__
        self.parts.add(f"{value.__module__}.{value.__qualname__}: {_code_text(code)}")
        for used in self._globals_of(value):
            self.add(used)
        cells = value.__closure__ or ()
        return all(self._add_cell(n, c) for n, c in zip(code.co_freevars, cells, strict=True))

    def _add_cell(self, name: str, cell: Any) -> bool:
        try:
            value = cell.cell_contents
        except ValueError:  # assigned later, or never
            return False
        if has_literal(value):
            self.parts.add(f"{name} = {literal(value)}")
            return True
        return self.add(value)

    def _globals_of(self, function: FunctionType) -> Iterator[Any]:
        names = set(names_in(function.__code__))
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if _is_changed(name, value, function.__code__):
                what = f"the {type(value).__name__} {name}" if _is_container(value) else name
                self.changed = f"{function.__qualname__} changes {what} of its module"
            if has_literal(value):
                self.parts.add(f"{function.__module__}.{name} = {literal(value)}")
            elif isinstance(value, ModuleType) and not _elsewhere(value.__name__):
                yield from (vars(value)[used] for used in sorted(names & vars(value).keys()))
            else:
                yield value


def _is_container(value: object) -> bool:
    return isinstance(value, (list, dict, set, bytearray, deque))


def _is_changed(name: str, value: object, code: CodeType) -> bool:
    """True if code rebinds a global name, or changes the container there."""
    if name in _rebound_names(code):
        return True
    return _is_container(value) and any(name in _changed_names(c) for c in codes_in(code))


def _rebound_names(code: CodeType) -> set[str]:
    """The names of globals that a code object assigns to."""
    return set[str]().union(*map(stored_globals, codes_in(code)))


def _changed_names(code: CodeType) -> Iterator[str]:
    """The global names whose containers code changes, by a method or by assigning items."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "NOP")]
    for index, step in enumerate(steps):
        if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        following = steps[index + 1 : index + 4]
        called = following and following[0].argval in _CHANGING
        if called or any(after.opname in _ITEM_CHANGES for after in following):
            yield step.argval


def _code_text(code: CodeType) -> str:
    """The content of a code object without file and line, equal in every process."""
    constants = [
        _code_text(constant) if isinstance(constant, CodeType) else _constant_text(constant)
        for constant in code.co_consts
    ]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, constants))


def _constant_text(constant: Any) -> str:
    if isinstance(constant, frozenset):  # ordered by hashes, which differ between processes
        return f"frozenset({sorted(map(repr, constant))})"
    return repr(constant)


def _imported_files(module: str, file: Path) -> set[tuple[str, str]] | None:
    """The digests of a module's file and of all files that it imports, wherever the import stands,
    and the versions of installed packages among them; None if they cannot be read."""
    installed = packages_distributions()
    own = module.partition(".")[0]
    known = [name for name in installed if name != own]
    root = file.parents[module.count(".") + (file.name == "__init__.py")]
    finder = ModuleFinder([str(root), *sys.path], excludes=[*_ELSEWHERE, *known])
    try:
        if module == "__main__":
            finder.run_script(str(file))
        else:
            finder.import_hook(module)
        files = {name: vars(each)["__file__"] for name, each in finder.modules.items()}
        texts = {name: Path(path).read_bytes() for name, path in files.items() if path}
    except Exception:  # whatever reading and compiling the files raises
        return None
    found = {(name, hashlib.sha256(text).hexdigest()) for name, text in texts.items()}
    for package in {name.partition(".")[0] for name in finder.badmodules}:
        found.update((name, version(name)) for name in installed.get(package, ()))
    return found
