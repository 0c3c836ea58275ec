"""Log messages about nodes that are not compiled."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

from graphopt.readable.columns import first_of

logger = logging.getLogger("graphopt")


def log_left_out(what: str, nodes: Iterable[tuple[str, str, str]]) -> None:
    """Logs operator, names and reason of nodes, one line for each operator and reason.

    Args:
        what: begins each line, such as "not lowered".
    """
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for target, name, reason in nodes:
        alike[target, reason].append(f"%{name}")
    for (target, reason), names in alike.items():
        logger.info("%s: %s (%s): %s", what, target, first_of(names, 3), reason)
