"""Private facts of CPython about classes."""

from __future__ import annotations

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def is_made_by_statement(kind: type) -> bool:
    """True if a class may come from a class statement: its attributes can be set, and its objects
    can change class. Classes in C on the heap, such as `deque` from Python 3.12 on, cannot be
    changed.

        >>> from collections import UserList, deque
        >>> is_made_by_statement(UserList), is_made_by_statement(deque)
        (True, False)
    """
    return kind.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE
