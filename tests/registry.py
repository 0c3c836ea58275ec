"""A test declares passes that no other test sees."""

from __future__ import annotations

import pytest

from graphopt.manager import default_registry, discovery


def isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, after the test, what it declares in the default registry."""
    discovery.install()
    default_registry().names()  # loads what there is: a module declares its passes only once
    known = vars(default_registry())
    for name in list(known):
        monkeypatch.setitem(known, name, known[name].copy())
    for name, pass_ in list(known["_passes"].items()):
        if not pass_.module.startswith("graphopt."):  # of another test's file
            del known["_passes"][name]
