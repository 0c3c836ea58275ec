"""Prevents libraries from noticing a trace, in which they would compute differently.

Models of `transformers` leave attention without padding to the kernel, and make a mask and repeat
keys where they find a fake tensor: the same numbers up to rounding. While a step is traced whose
values are known, the answer is that of eager code, and what they then look at (whether there is
padding in the batch) is a decision by value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graphopt.tracing.interception.replaced_functions import calling_frame, replaced

_QUESTIONS = (("transformers.utils.import_utils", "is_fake_tensor"),)
"""Modules and their functions that find out whether a tensor is a fake one."""

_FOR_A_WARNING = frozenset({"warn_if_padding_and_no_attention_mask"})
"""Functions that ask because they look at values for no more than a warning."""


@contextmanager
def answered_as_in_eager(noticed: Callable[[], None]) -> Iterator[None]:
    """While active, libraries that test for tracing get the answer of eager code.

    Args:
        noticed: called when one has asked.
    """

    def is_fake(tensor: Any) -> bool:
        if calling_frame(2).f_code.co_name in _FOR_A_WARNING:
            return True
        noticed()
        return False

    modules = [(sys.modules.get(module), name) for module, name in _QUESTIONS]
    with replaced(*((m, name, is_fake) for m, name in modules if hasattr(m, name))):
        yield
