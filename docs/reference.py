"""The API reference: `python docs/reference.py MODULE...` writes docs/api.

Modules import some of their public names on first use. These are resolved first, since pdoc looks
at what is there.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pdoc


def main(modules: list[str]) -> None:
    for name in modules:
        module = importlib.import_module(name)
        for entry in module.__all__:
            vars(module).setdefault(entry, getattr(module, entry))
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*modules, output_directory=Path(__file__).with_name("api"))


if __name__ == "__main__":
    main(sys.argv[1:])
