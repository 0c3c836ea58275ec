"""Log messages about nodes that are left out of compiled code."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

logger = logging.getLogger("graphopt")


def log_left_out(what: str, nodes: Iterable[tuple[str, str, str]]) -> None:
    """Log target, name and reason of each node, those of one target and reason in one line.

    Args:
        what: begins each line, such as "not lowered".
    """
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for target, name, reason in nodes:
        alike[target, reason].append(f"%{name}")
    for (target, reason), names in alike.items():
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        logger.info("%s: %s (%s): %s", what, target, listed, reason)
