"""Kinds and side effects of operators, from one table with a row for each.

Capture, passes, verifier, finalizer, lowering and pipelining all ask here which operators are
views, work on lists, in place, at random, element by element, or communicate. An operator that no
family (`graphopt.ir.families`) names aliases and writes what its schema says.
"""

from graphopt.ir.operators.calls import (
    aliased,
    argument,
    argument_at,
    arguments_by_name,
    calls_of,
    draws,
    first_argument,
    nodes_in,
    overwritten,
    writers,
    written,
    written_positions,
)
from graphopt.ir.operators.kinds import (
    fused_in_place,
    fused_optimizer,
    is_collective,
    is_copy,
    is_fused_optimizer,
    is_item,
    is_list_operator,
    is_marker,
    is_operator,
    is_pointwise,
    is_random,
    is_wait,
    may_alias,
    rounds_a_list_in_place,
    rounds_in_place,
    updated_lists,
)
from graphopt.ir.operators.table import Operator, is_list_of_tensors, operator_of, row
