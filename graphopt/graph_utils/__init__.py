"""Free functions that read and edit FX graphs and keep metadata up to date."""

from graphopt.graph_utils.cleaning import eliminate_dead_code, is_needed, remove_identities
from graphopt.graph_utils.inserting import call_function_with_meta, evaluate
from graphopt.graph_utils.modes import environment, without_autocast
from graphopt.graph_utils.nodes import (
    after_placeholders,
    find_all_descendants,
    find_nodes,
    move_after,
    move_before,
)
from graphopt.graph_utils.tensor_metadata import is_dense, lies_apart, same_kind, tensors_in
from graphopt.ir.families import COLLECTIVE_NAMESPACE, WAIT_FOR_SEVERAL, WAITS
from graphopt.ir.metadata import phase_of
from graphopt.ir.operators import (
    is_collective,
    is_copy,
    is_item,
    is_list_operator,
    is_operator,
    is_pointwise,
    is_random,
    is_wait,
    may_alias,
    written,
)
from graphopt.ir.outputs import (
    Outputs,
    follows_output_convention,
    get_output,
    get_outputs,
    set_outputs,
)
from graphopt.ir.views import readers_through_views

__all__ = [
    "COLLECTIVE_NAMESPACE",
    "WAITS",
    "WAIT_FOR_SEVERAL",
    "Outputs",
    "after_placeholders",
    "call_function_with_meta",
    "eliminate_dead_code",
    "environment",
    "evaluate",
    "find_all_descendants",
    "find_nodes",
    "follows_output_convention",
    "get_output",
    "get_outputs",
    "is_collective",
    "is_copy",
    "is_dense",
    "is_item",
    "is_list_operator",
    "is_needed",
    "is_operator",
    "is_pointwise",
    "is_random",
    "is_view",
    "is_wait",
    "lies_apart",
    "may_alias",
    "move_after",
    "move_before",
    "phase_of",
    "readers_through_views",
    "remove_identities",
    "same_kind",
    "set_outputs",
    "tensors_in",
    "without_autocast",
    "written",
]

is_view = may_alias
"""The name under which passes know `may_alias`."""
