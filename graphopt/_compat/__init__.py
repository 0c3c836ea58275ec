"""All uses of private torch APIs, each in one small function.

What is imported here is used from here; what parts of torch need that are loaded late (Inductor,
Triton, pipelining), from files of their own.

Written for torch 2.11 to 2.15. A branch for one version says so.
"""

from torch.utils._python_dispatch import TorchDispatchMode

from graphopt._compat.copied_generator import CopiedGenerator as CopiedGenerator
from graphopt._compat.dtensors import local_of as local_of
from graphopt._compat.dtensors import set_local as set_local
from graphopt._compat.fakes import (
    data_dependent_errors,
    errors_raised_once,
    fake_anew,
    fake_laid_out,
    fake_like,
    fake_mode_of,
    foreach_accepts_fakes,
    has_symbolic_shape,
    is_fake,
    is_fake_class,
    is_fake_mode_on,
    known_number,
    met_sizes,
    new_fake_mode,
    new_unknown,
    plain_fake_mode,
    quiet_fakes,
    register_fused_meta_kernels,
    sizes_given,
    to_fake,
    truths_of_fakes,
    unsupported_operator_errors,
    without_fake_mode,
)
from graphopt._compat.functionalization import (
    from_functional,
    functional_mode,
    replace_functional_value,
    to_functional,
    without_functional_mode,
)
from graphopt._compat.graphs import (
    calls_by_target,
    code_maker,
    copy_codegen,
    copy_node,
    forward_of,
    graph_in,
    inputs_of,
    inserts_at_end,
    lazy_graph_module,
    node_at_line,
    renamed,
    set_graph,
)
from graphopt._compat.metadata_check import metadata_match
from graphopt._compat.module_kinds import (
    floats_of_statistics,
    is_compiled_module,
    is_fsdp,
    module_call_code,
    moved_where_needed,
    own_buffers,
    own_modules,
    own_parameters,
    own_tables,
    weights_of_layers,
)
from graphopt._compat.operators import (
    HigherOrderOperator,
    OpOverload,
    flop_formula,
    has_functionalization,
    operator_name,
    overload_name,
    schema_of,
)
from graphopt._compat.optimizer_hooks import hooks_around_steps, mark_stepped
from graphopt._compat.plain_fakes import are_plain_fakes, detached, is_ruled_in_python, plain_view
from graphopt._compat.process_groups import (
    companion_group,
    default_store,
    device_of,
    fake_world_size,
    gloo_channel,
    group_named,
    group_of_ranks,
    group_or_default,
    in_process_group,
    maximum,
    rank_among_several,
    ranks_of_group,
    start_fake_group,
)
from graphopt._compat.settings import (
    autocast_regions,
    global_settings,
    is_profiling,
    without_dispatch,
    without_modes,
)
from graphopt._compat.tensor_writes import storage_key as storage_key
from graphopt._compat.tensors import (
    as_parameter,
    attributes_changed,
    base_of,
    copy_attributes,
    copy_hooks,
    deepcopied,
    described_tensor,
    functions_of_hooks,
    hooks_of,
    is_transformed,
    made_by_legacy,
    may_be_written,
    read_as,
    results_are_plain,
    storage_key_of_value,
    strided_parts,
    version_kept,
    version_of,
)
from graphopt._compat.torch_functions import function_asked, reads_metadata, runs_mode
from graphopt._compat.tracers import (
    asking_for_tracers,
    backward_sequence_number,
    current_tracer,
    forget_constant,
    forward_sequence_number,
    is_constant,
    is_recording,
    is_traced,
    make_fx,
    named_in_profile,
    node_of,
    rebind,
    record_call,
    record_integer,
    record_known,
    record_number,
    record_truth,
)
from graphopt._compat.trees import (
    ONE_VALUE,
    flatten_arguments,
    flatten_results,
    is_applied,
    leaf_names,
    open_nest,
    result_parts,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from graphopt._compat.user_modes import unwatched, watches_functions
