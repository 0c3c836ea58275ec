"""The listing in a file of `graphopt.saved.save_graph`, read without torch.

Such a file is what `torch.save` writes: a zip archive with a pickle. Of the pickle, text and
numbers alone are made; whatever else it names, tensors included, becomes an object that does
nothing, so that reading runs no code of the file.
"""

from __future__ import annotations

import json
import pickle
import zipfile
import zlib
from base64 import b64decode, b64encode
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphopt.listing.rows import Listing, ListingRow

FORMAT = "graphopt graph"
VERSION = 1
"""What a file says that it is."""


def packed(listing: Listing) -> str:
    """A listing as text, about a tenth of its JSON."""
    return b64encode(zlib.compress(json.dumps(asdict(listing)).encode())).decode()


def read_listing(path: Path) -> Listing | None:
    """The listing in a file; None where it has none, or is anything but a whole file of this kind:
    then loading its graph says what is wrong."""
    try:
        saved = _read(path)
        if (saved["format"], saved["version"]) != (FORMAT, VERSION):
            return None
        return _unpacked(saved["listing"])
    except Exception:  # what reading a damaged file raises is not limited
        return None


def _read(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        if archive.testzip() is not None:
            return {}
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(name) as file:
            return _Plain(file).load()


def _unpacked(text: str) -> Listing:
    data = json.loads(zlib.decompress(b64decode(text)))
    sections = [(title, [ListingRow(**row) for row in rows]) for title, rows in data["sections"]]
    return Listing(list(data["summary"]), sections, data["collectives"])


class _Nothing:
    """Stands for whatever a pickle makes besides text and numbers."""

    def __new__(cls, *_: Any, **__: Any) -> _Nothing:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Plain(pickle.Unpickler):
    """Makes text, numbers, and lists and dicts of them."""

    def find_class(self, module: str, name: str) -> type[_Nothing]:
        return _Nothing

    def persistent_load(self, pid: Any) -> _Nothing:
        return _Nothing()
