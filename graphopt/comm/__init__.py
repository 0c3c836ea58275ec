"""Communication blocks: a collective, its wait, and the views that lead to its readers."""

from graphopt.comm.blocks import (
    MAX_WAIT_DISTANCE,
    CommBlock,
    get_all_comm_blocks,
    get_comm_block,
    kind_of,
    late_nodes,
    located,
    parameters_of,
    wait_of,
)
from graphopt.comm.editing import replace_collective, updates_of
from graphopt.comm.members import BucketMember, bucket_members
from graphopt.ir.metadata import SENT as SENDS
from graphopt.ir.operators import argument
from graphopt.ir.views import view_tail

__all__ = [
    "MAX_WAIT_DISTANCE",
    "SENDS",
    "BucketMember",
    "CommBlock",
    "argument",
    "bucket_members",
    "get_all_comm_blocks",
    "get_comm_block",
    "kind_of",
    "late_nodes",
    "located",
    "parameters_of",
    "replace_collective",
    "updates_of",
    "view_tail",
    "wait_of",
]
