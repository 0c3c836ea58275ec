"""Families of operators whose schemas say too little, or the wrong thing.

`graphopt.ir.operators` makes one row per operator of them. Names are those of schemas, without
overload. Each is tested against what kernels do (tests/test_operators.py): add a name here and the
test says whether it is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

COLLECTIVE_NAMESPACE = "_c10d_functional"

WAIT_FOR_SEVERAL = f"{COLLECTIVE_NAMESPACE}::wait_tensors"  # since torch 2.15
WAITS = (f"{COLLECTIVE_NAMESPACE}::wait_tensor", WAIT_FOR_SEVERAL)
"""The operators that wait for functional collectives; all others of their namespace launch."""


MARKERS = ("graphopt::reduce_gradient", "graphopt::sync_buffers")
"""Markers that a capture writes where communication belongs; see `graphopt.parallel.markers`."""


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


def _collective(*names: str) -> frozenset[str]:
    return frozenset(f"{COLLECTIVE_NAMESPACE}::{name}" for name in names)


_CASTS = _aten(
    *("_cast_Byte", "_cast_Char", "_cast_Double", "_cast_Float", "_cast_Half", "_cast_Int"),
    *("_cast_Long", "_cast_Short"),
)

_UNDECLARED_MAY_COPY = _CASTS | _aten(
    *("_reshape_from_tensor", "alpha_dropout", "atleast_1d", "atleast_2d", "atleast_3d"),
    *("broadcast_tensors", "cartesian_prod", "conj_physical", "dropout", "feature_alpha_dropout"),
    *("feature_dropout", "meshgrid", "sum_to_size", "to_dense", "type_as"),
)

UNDECLARED_ALIASES = {
    **dict.fromkeys(_UNDECLARED_MAY_COPY, (0,)),
    **dict.fromkeys(_aten("einsum", "histogramdd"), (1,)),
    **dict.fromkeys(
        _aten(
            *("_unpack_dual", "_unsafe_view", "data", "lift", "unsafe_chunk", "unsafe_split"),
            "unsafe_split_with_sizes",
        ),
        (0,),
    ),
    **dict.fromkeys(WAITS, (0,)),
    **dict.fromkeys(_collective("isend", "irecv"), (0,)),
    **dict.fromkeys(_collective("batch_p2p_ops"), (3,)),
    **dict.fromkeys(
        _aten("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"), (3, 4)
    ),
}
"""Positions of arguments whose memory a result may share, although the schema denies it."""

MAY_COPY = (
    _UNDECLARED_MAY_COPY
    | _aten(
        *("_autocast_to_full_precision", "_autocast_to_reduced_precision", "contiguous"),
        *("einsum", "flatten", "histogramdd", "ravel", "reshape", "reshape_as", "resolve_conj"),
        *("resolve_neg", "to"),
    )
    | _collective("isend", "irecv", "batch_p2p_ops")
)
"""Operators that return their argument, a view of it, or something else."""

DROPOUTS = _aten("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout")
"""Operators that return their argument itself exactly if they drop nothing."""

ONE_TENSOR_TWICE = _aten(
    "mkldnn_rnn_layer_backward",
    "_cudnn_rnn_backward",
    "_thnn_fused_lstm_cell_backward",
    "_thnn_fused_lstm_cell_backward_impl",
    "_thnn_fused_gru_cell_backward",
)
"""Operators that may return one tensor as several of their results."""

COPIES = _aten("copy_")
"""Operators that do not read the argument that they write, because they replace all of it."""

FUSED_OPTIMIZERS: dict[str, tuple[int, ...]] = {
    "_fused_adam": (0, 2, 3, 4),
    "_fused_adamw": (0, 2, 3, 4),
    "_fused_sgd": (0, 2),
    "_fused_adagrad": (0, 2),
}
"""Positions of the lists that a fused optimizer updates; results of the functional form stand at
the same positions. Gradients (1) are written only where a `grad_scale` is given."""

_SCALED = ("grad_scale", "found_inf")
_DECAYED = ("self", "weight_decay")  # a decay that is added to gradients
_GRADIENTS = {1: ("grads", *_SCALED)}


def _moments(*gradient: str) -> dict[int, tuple[str, ...]]:
    """Returns the dependencies of the state of Adam and AdamW on their arguments."""
    squares = ("exp_avg_sqs", "beta2", *gradient)
    return {
        **_GRADIENTS,
        2: ("exp_avgs", "beta1", *gradient),
        3: squares,
        4: ("max_exp_avg_sqs", *squares),
    }


STATE_NEEDS: dict[str, dict[int, tuple[str, ...]]] = {
    "_fused_adam": _moments("grads", *_DECAYED, *_SCALED),
    "_fused_adamw": _moments("grads", *_SCALED),
    "_fused_sgd": {
        **_GRADIENTS,
        2: ("grads", "momentum_buffer_list", "momentum", "dampening", *_DECAYED, *_SCALED),
    },
    "_fused_adagrad": {
        **_GRADIENTS,
        2: ("grads", "state_sums", *_DECAYED, *_SCALED),
        3: ("state_steps",),
    },
}
"""Arguments that gradients and state depend on in a fused optimizer, by the position of the list
among its results: neither its learning rate nor its step count, and of AdamW not its weight decay.
Parameters depend on all arguments. Flags are left out: they are no values of a graph."""

_WRITE_STATISTICS = _aten("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


def written_where(name: str) -> Mapping[int, str]:
    """Returns the arguments (positions) that an operator writes only if another argument (name) is
    set, such as the statistics of a batch norm."""
    if name in _WRITE_STATISTICS:
        return {3: "training", 4: "training"}
    updates = name.startswith("aten::_fused_") and name.endswith("_")
    fused = updates and name.removeprefix("aten::").removesuffix("_") in FUSED_OPTIMIZERS
    return {1: "grad_scale"} if fused else {}


WORKSPACES = {"aten::mkldnn_rnn_layer_backward": (22,)}
"""Positions of arguments that a kernel uses as scratch memory and leaves with meaningless
contents."""

UNDECLARED_WRITES = {
    **dict.fromkeys(_collective("irecv"), (0,)),
    **dict.fromkeys(_collective("batch_p2p_ops"), (3,)),
    **dict.fromkeys(
        _aten("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"), (3, 4)
    ),
}
"""Positions of arguments that are written, although the schema denies it."""

LISTED_FAMILIES = ("aten::_foreach_", "aten::_fused_")
"""Name prefixes of operators that apply one computation to each entry of lists."""


class CollectiveKind(NamedTuple):
    """The effects of one kind of collective besides sending; all its variants share them.

    Attributes:
        copies: it works on a copy of what it sends, or in its in-place form on the tensor itself.
            All others read what they send until their wait.
        by_element: element number i of what it gives depends on element number i of what is sent.
        same_on_all: it gives all ranks the same.
    """

    copies: bool = False
    by_element: bool = False
    same_on_all: bool = False


COLLECTIVE_KINDS = {
    "all_reduce": CollectiveKind(copies=True, by_element=True, same_on_all=True),
    "broadcast": CollectiveKind(copies=True, by_element=True, same_on_all=True),
    "all_gather_into_tensor": CollectiveKind(same_on_all=True),
}
"""The kinds of collectives, by operator name without variant suffixes. A kind without a row has
none of these properties."""


def collective_kind(name: str) -> CollectiveKind:
    """Returns the row of a kind of collective, such as "all_reduce"."""
    return COLLECTIVE_KINDS.get(name, CollectiveKind())


SAME_ELEMENTS = _aten(
    *("_to_copy", "_unsafe_view", "alias", "clone", "detach", "flatten", "reshape", "squeeze"),
    *("unflatten", "unsqueeze", "view"),
)
"""Operators whose result has the elements of the first argument in the same row-major order."""

SPLITS = _aten(
    *("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk"),
    *("unsafe_split_with_sizes", "split_with_sizes_copy"),
)

METADATA_ONLY = _aten(
    *("empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones"),
    *("new_zeros", "ones_like", "zeros_like"),
)
"""Operators that read only the shape, dtype and device of their argument."""

TWINS = _aten(
    *("bernoulli", "copy", "fill", "index_add", "index_copy", "index_put", "masked_fill"),
    *("scatter", "scatter_add", "zero"),
) | _collective("all_reduce", "broadcast")
"""Further operators, besides pointwise and list ones, whose in-place form computes the same
bits."""

HALF, COMPLEX = "half precision", "complex"

ROUNDS_IN_PLACE = {
    "aten::addcdiv_": (COMPLEX,),
    "aten::addcmul_": (COMPLEX,),
    "aten::addr_": (COMPLEX,),
    "aten::div_.Scalar": (COMPLEX,),
    "aten::div_.Tensor": (COMPLEX,),
    "aten::mul_.Scalar": (HALF, COMPLEX),
    "aten::mul_.Tensor": (COMPLEX,),
    "aten::true_divide_.Scalar": (COMPLEX,),
    "aten::true_divide_.Tensor": (COMPLEX,),
}
"""In-place operators, by name and overload, with the dtypes that they round differently than their
functional forms: they round a scalar factor to half precision first."""

LISTS_ROUND_IN_PLACE = {
    **dict.fromkeys(
        ("aten::_foreach_mul_.Scalar", "aten::_foreach_mul_.ScalarList"), (HALF, COMPLEX)
    ),
    **{
        f"aten::_foreach_{name}": (COMPLEX,)
        for name in (
            *("addcdiv_.Scalar", "addcdiv_.ScalarList", "addcmul_.Scalar", "addcmul_.ScalarList"),
            *("div_.List", "div_.Scalar", "div_.ScalarList", "div_.Tensor"),
            *("mul_.List", "mul_.Tensor"),
        )
    },
}
"""In-place list operators with that difference, on CPUs, where they call the in-place operator for
each entry."""

MAY_RAISE = _aten(
    *("_functional_assert_async", "_functional_assert_scalar", "_functional_sym_constrain_range"),
    *("_functional_sym_constrain_range_for_size", "sym_constrain_range"),
    *("_assert_tensor_metadata", "sym_constrain_range_for_size"),
    *("_ctc_loss", "_ctc_loss_backward", "_embedding_bag", "_embedding_bag_forward_only"),
    *("_embedding_bag_backward", "_embedding_bag_dense_backward"),
    *("_embedding_bag_per_sample_weights_backward", "_segment_reduce_backward"),
    *("_sparse_mm_reduce_impl_backward", "adaptive_max_pool2d_backward"),
    *("adaptive_max_pool3d_backward", "bincount", "embedding", "embedding_bag"),
    *("embedding_dense_backward", "fractional_max_pool2d_backward"),
    *("fractional_max_pool3d_backward", "gather", "grid_sampler_2d_backward", "index"),
    *("index_add", "index_copy", "index_fill", "index_put", "index_reduce", "index_select"),
    *("masked_scatter", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
    *("max_unpool2d", "max_unpool3d"),
    *("nll_loss_backward", "nll_loss_forward", "nll_loss2d_backward", "nll_loss2d_forward", "put"),
    *("repeat_interleave", "scatter", "scatter_add", "scatter_reduce", "segment_reduce"),
    *("select_backward", "take", "take_along_dim", "tensor_split"),
    *("div.Scalar_mode", "div.Tensor_mode", "floor_divide", "fmod", "remainder"),
    *("_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "bernoulli", "binary_cross_entropy"),
    *("histc", "histogram", "linspace.Scalar_Tensor", "linspace.Tensor_Scalar"),
    *("linspace.Tensor_Tensor", "multi_margin_loss", "multi_margin_loss_backward"),
    *("multilabel_margin_loss_backward", "multilabel_margin_loss_forward", "multinomial"),
    *("normal.Tensor_Tensor", "normal.float_Tensor"),
    *("cholesky", "cholesky_inverse", "cholesky_solve", "inverse", "linalg_cholesky"),
    *("linalg_eig", "linalg_eigh", "linalg_eigvals", "linalg_eigvalsh", "_linalg_eigh"),
    *("linalg_inv", "linalg_ldl_solve", "linalg_lstsq", "linalg_lu", "linalg_lu_factor"),
    *("linalg_lu_solve", "linalg_pinv", "linalg_solve", "lu_unpack"),
    *("_linalg_solve_ex", "linalg_svd", "_linalg_svd", "_linalg_check_errors"),
)
"""Operators that raise or crash for some values: indices out of range, zero divisors, invalid
probabilities, singular matrices. A name with an overload stands for that overload alone."""
