"""Words of memory that tell that nothing has changed, compared all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import compress
from typing import Any

from graphopt._compat.memory_words import MemoryWords, changed_words

_MOST_CHANGES = 3
"""The number of changes after which a word is no longer read."""


class KnownWords:
    """The words of objects under which these are known to be as expected.

    A word is left out once it changes again and again, such as the version of the globals of a
    program that counts its steps in one of them.

    Args:
        addresses: where the words are.
        kept: the objects whose words these are, which it keeps alive.
    """

    def __init__(self, addresses: Iterable[int], kept: Any) -> None:
        self._kept = kept
        self._changes: Counter[int] = Counter()
        self._known: bytes | None = None
        self._read(addresses)

    def _read(self, addresses: Iterable[int]) -> None:
        self._addresses = sorted(set(addresses))  # read faster so
        self._told = frozenset(self._addresses)
        self._words = MemoryWords(self._addresses)
        self.now = self._words.now

    def are(self, words: bytes) -> bool:
        """True if these are the words that are known to be right."""
        return words == self._known

    def tell(self, addresses: Iterable[int]) -> bool:
        """True if all of these words are read."""
        return self._told.issuperset(addresses)

    def note(self, words: bytes) -> bool:
        """Records that everything is right with these words, read before it was looked at.

        Returns:
            Whether some words are no longer read.
        """
        known, self._known = self._known, words
        if known is None:
            return False
        self._changes.update(compress(self._addresses, changed_words(known, words)))
        kept = [each for each in self._addresses if self._changes[each] <= _MOST_CHANGES]
        if len(kept) == len(self._addresses):
            return False
        self._read(kept)
        self._known = None
        return True
