"""The rows of operators against what kernels do: memory that results share, arguments that change,
random numbers that are drawn, and what in-place forms compute."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from graphopt.branches.drawn_generators import DrawnStates, drawn_generators
from graphopt.ir.families import METADATA_ONLY, SAME_ELEMENTS, SPLITS, collective_kind
from graphopt.ir.generators import generators_used
from graphopt.ir.inplace import INPLACE
from graphopt.ir.operators import draws, is_copy, is_list_operator, may_alias, row, written
from observed import Observer, run, same_bits, storage
from operators import cloned, database, list_arguments, list_operators
from sketch import Sketch

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore")

RNNS = (nn.RNN, nn.GRU, nn.LSTM)


def observe_database(
    names: list[str],
    count: int,
    dtypes: tuple[torch.dtype, ...],
    observer: Observer,
    *,
    seed: int = 0,
    shares: int = 1,
) -> None:
    """Run operators of torch's database, forward, backward, in place and as one composed call; of
    each kind of numbers one in `shares` of the first `count` samples, others for the next kind."""
    for first, name in enumerate(names, seed):
        entry = database()[name]
        for turn, dtype in enumerate(dtypes, first):
            if not entry.supports_dtype(dtype, "cpu"):
                continue
            grad = entry.supports_autograd and dtype.is_floating_point
            try:
                made = islice(entry.sample_inputs_func(entry, "cpu", dtype, grad), count)
                samples = list(made)
                samples = samples[turn % shares :: shares] or samples[:1]
            except ImportError:  # the database wants a package that is not installed
                continue
            for sample in samples:
                _observe(entry, sample, grad, observer)


def _observe(entry: Any, sample: Any, grad: bool, observer: Observer) -> None:
    given = sample.input, *sample.args
    run(lambda: entry.op(*given, **sample.kwargs), observer, grad)
    if not isinstance(sample.input, Tensor):
        return
    given = sample.input.detach(), *sample.args
    inplace = entry.get_inplace()
    if inplace is not None:
        run(lambda: inplace(given[0].clone(), *given[1:], **sample.kwargs), observer)
    for overload in _composed(entry.aten_name):
        try:
            observer.call(overload, given, sample.kwargs)
        except Exception:
            continue


def _composed(name: str) -> Iterator[Any]:
    """The overloads of an operator that the dispatcher takes apart before a mode sees them."""
    packet = getattr(aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        try:
            key = "CompositeImplicitAutograd"
            composed = torch._C._dispatch_has_kernel_for_dispatch_key(found.name(), key)
        except RuntimeError:
            continue
        if composed and not found._schema.is_mutable:
            yield found


def assert_known(observer: Observer) -> None:
    assert not observer.problems, "\n".join(
        f"{name}: {sorted(problems)}" for name, problems in sorted(observer.problems.items())
    )


def test_rows_say_what_kernels_do() -> None:
    observer = Observer()
    observe_database(sorted(database())[::2], 1, (torch.float32,), observer)
    assert_known(observer)
    assert len(observer.seen) > 250


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_rows_say_what_kernels_do_in_all_samples(part: int, seed: int) -> None:
    torch.manual_seed(seed)
    observer = Observer()
    kinds = torch.float32, torch.complex64, torch.int64, torch.bool, torch.bfloat16
    names = sorted(database())[part::4]
    observe_database(names, 12, kinds, observer, seed=seed, shares=3)
    assert_known(observer)


def test_rows_of_list_operators() -> None:
    """Also: their entries are independent."""
    observer = Observer()
    tensors = [torch.rand(3, 2) + 0.5, torch.rand(4) + 0.5]
    others = [torch.rand(3, 2) + 0.5, torch.rand(4) + 0.5]
    for func, args in product(list_operators(), list_arguments(tensors, others)):
        try:
            observer.call(func, cloned(args), {})
        except RuntimeError:
            continue  # it takes other arguments
        assert _entries_are_independent(func, args), func
    assert_known(observer)
    assert len(observer.seen) > 60


def _entries_are_independent(func: Any, args: tuple[Any, ...]) -> bool:
    def entry(index: int, changed: float) -> Tensor:
        given = cloned(args)
        given[0][1 - index] += changed
        result = func(*given)
        return (given[0] if result is None else result)[index]

    return all(same_bits(entry(i, 0.0), entry(i, 1.0)) for i in (0, 1))


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_rows_of_fused_optimizers(kind: str, amsgrad: bool) -> None:
    """They write the same lists that rows say, and gradients only with a `grad_scale`."""
    settings = {"amsgrad": amsgrad} if kind.startswith("Adam") else {}
    if kind == "SGD":
        settings = {"momentum": 0.9}
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, fused=True, **settings)
    observer = Observer()
    with observer:
        for maximize in (False, True):
            optimizer.param_groups[0]["maximize"] = maximize
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
            optimizer.step()
            optimizer.grad_scale = optimizer.found_inf = None
    assert_known(observer)
    assert f"aten::_fused_{kind.lower()}_" in observer.seen


@pytest.mark.parametrize("kind", RNNS)
def test_rows_of_recurrent_operators(kind: type[nn.Module]) -> None:
    observer = Observer()
    for bias in (False, True):
        module = kind(4, 6, 2, bias=bias, batch_first=True)
        run(
            lambda module=module: module(torch.randn(2, 3, 4, requires_grad=True))[0],
            observer,
            True,
        )
    assert_known(observer)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norms_write_statistics_only_while_training(training: bool) -> None:
    observer = Observer()
    values, mean, variance = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    observer.call(
        aten.native_batch_norm.default,
        (values, None, None, mean, variance, training, 0.1, 1e-5),
        {},
    )
    assert_known(observer)
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("x", "mean", "variance")]
    args = inputs[0], None, None, *inputs[1:], training, 0.1, 1e-5
    node = graph.call_function(aten.native_batch_norm.default, args)
    assert written(node) == (inputs[1:] if training else [])


COMPOSED: dict[str, Any] = {
    "dropout.default": lambda x: [(x, 0.3, False), (x, 0.0, True), (x, 0.5, True)],
    "alpha_dropout.default": lambda x: [(x, 0.3, False), (x, 0.5, True)],
    "feature_dropout.default": lambda x: [(x, 0.3, False), (x, 0.5, True)],
    "feature_alpha_dropout.default": lambda x: [(x, 0.3, False), (x, 0.5, True)],
    "type_as.default": lambda x: [(x, x), (x, x.double())],
    "sum_to_size.default": lambda x: [(x, [3, 4]), (x, [1, 4])],
    "einsum.default": lambda x: [("ij->ji", [x]), ("ij,ij->i", [x, x])],
    "cartesian_prod.default": lambda x: [([x[0]],), ([x[0], x[1]],)],
    "to_dense.default": lambda x: [(x,)],
    "broadcast_tensors.default": lambda x: [([x, x[0]],)],
    "meshgrid.default": lambda x: [([x[0], x[1]],)],
    "lift.default": lambda x: [(x,)],
    "data.default": lambda x: [(x,)],
    "_cast_Float.default": lambda x: [(x,), (x.double(),)],
    "_cast_Double.default": lambda x: [(x,), (x.double(),)],
    "_reshape_from_tensor.default": lambda x: [(x, torch.tensor([12]))],
    "conj_physical.default": lambda x: [(x,), (torch.complex(x, x),)],
    "contiguous.default": lambda x: [(x,), (x.t(),)],
    "reshape.default": lambda x: [(x, [12]), (x.t(), [12])],
    "reshape_as.default": lambda x: [(x, x.flatten()), (x.t(), x.flatten())],
    "flatten.using_ints": lambda x: [(x,), (x.t(),)],
    "ravel.default": lambda x: [(x,), (x.t(),)],
    "resolve_conj.default": lambda x: [(x,), (torch.complex(x, x).conj(),)],
    "to.dtype": lambda x: [(x, torch.float32), (x, torch.float64)],
}


@pytest.mark.parametrize("name", COMPOSED)
def test_rows_of_composed_operators(name: str) -> None:
    """Graphs from above the dispatcher have them; some return their argument and do not say so."""
    packet, _, overload = name.partition(".")
    observer = Observer()
    for args in COMPOSED[name](torch.randn(3, 4)):
        observer.call(getattr(getattr(aten, packet), overload), args, {})
    assert_known(observer)


def test_items_of_a_view_are_views() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert may_alias(graph.call_function(aten.split.Tensor, (x, 2)))
    assert may_alias(graph.call_function(aten.unsafe_split.Tensor, (x, 2)))
    assert not may_alias(graph.call_function(aten.sin.default, (x,)))


def test_attention_without_dropout_does_not_draw() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    quiet = graph.call_function(attention, (q, q, q))
    assert not draws(quiet)
    assert draws(graph.call_function(aten.bernoulli.p, (q, 0.5)))


def test_functional_twins_of_operators_that_draw_draw() -> None:
    random = {twin: row(inplace).random for twin, inplace in INPLACE.items()}
    assert random == {twin: row(twin).random for twin in INPLACE}
    assert sum(random.values()) > 8


def test_norms_of_all_elements_are_no_list_operators() -> None:
    """Their names begin as those of list operators do."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert not is_list_operator(
        graph.call_function(aten._fused_rms_norm.default, (x, [4], None, 1e-5))
    )
    assert is_list_operator(graph.call_function(aten._foreach_add.List, ([x], [x])))


@pytest.mark.parametrize("name", sorted(METADATA_ONLY))
def test_what_reads_metadata_gives_the_same_for_other_values(name: str) -> None:
    packet = getattr(aten, name.removeprefix("aten::"))
    rest = {"new_empty": ([2],), "new_empty_strided": ([2], [1]), "new_full": ([2], 3.0)}
    rest |= {"new_ones": ([2],), "new_zeros": ([2],), "full_like": (3.0,)}
    args = rest.get(name.removeprefix("aten::"), ())
    one, other = packet(torch.zeros(2, 3), *args), packet(torch.ones(2, 3), *args)
    assert one.shape == other.shape and one.stride() == other.stride()
    assert "empty" in name or torch.equal(one, other)


@pytest.mark.parametrize("name", sorted(SAME_ELEMENTS | SPLITS))
def test_elements_keep_their_order(name: str) -> None:
    namespace, short = name.split("::")
    args = {"flatten": (0, 1), "reshape": ([12],), "view": ([12],), "_unsafe_view": ([12],)}
    args |= {"unsqueeze": (1,), "unflatten": (1, [2, 2])}
    args |= dict.fromkeys(("split", "unsafe_split", "chunk", "unsafe_chunk"), (2,))
    args |= dict.fromkeys(
        ("split_with_sizes", "unsafe_split_with_sizes", "split_with_sizes_copy", "take_apart"),
        ([1, 2],),
    )
    x = torch.arange(12.0).reshape(3, 4)
    result = getattr(getattr(torch.ops, namespace), short)(x, *args.get(short, ()))
    parts = result if isinstance(result, (list, tuple)) else [result]
    assert torch.equal(torch.cat([part.flatten() for part in parts]), x.flatten())


def test_a_copy_replaces_what_it_writes() -> None:
    source = torch.randn(3)
    assert torch.equal(torch.zeros(3).copy_(source), torch.full((3,), torch.nan).copy_(source))
    graph = fx.Graph()
    assert is_copy(graph.call_function(aten.copy_.default, (graph.placeholder("x"),) * 2))


COLLECTIVES: dict[str, tuple[Any, ...]] = {
    "all_reduce": ("sum",),
    "all_reduce_": ("sum",),
    "all_reduce_coalesced": ("sum",),
    "all_reduce_coalesced_": ("sum",),
    "broadcast": (0,),
    "broadcast_": (0,),
    "all_gather_into_tensor": (1,),
    "all_gather_into_tensor_coalesced": (1,),
    "reduce_scatter_tensor": ("sum", 1),
    "reduce_scatter_tensor_coalesced": ("sum", 1),
    "all_to_all_single": ([4], [4]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_rows_of_collectives(name: str, one_rank: None) -> None:
    """Of what launch and wait share and write; what works on a copy does so when it is launched."""
    observer = Observer()
    func = getattr(torch.ops._c10d_functional, name).default
    group = dist.group.WORLD.group_name
    several = "coalesced" in name
    sent = [torch.randn(4), torch.randn(4)]
    launched = observer.call(func, (sent if several else sent[0], *COLLECTIVES[name], group), {})
    for result in launched if several else [launched]:
        observer.call(torch.ops._c10d_functional.wait_tensor.default, (result,), {})
        if collective_kind(row(func).reduction).copies and not row(func).writes:
            assert storage(result) not in map(storage, sent)
    assert_known(observer)
    assert row(func).collective and not row(func).wait


DEFAULT = torch.random.default_generator


def test_generators_that_are_given() -> None:
    own = torch.Generator()
    assert generators_used(()) == [DEFAULT]
    assert generators_used([torch.ones(2), {"generator": own}, torch.device("cpu")]) == [
        DEFAULT,
        own,
    ]


def test_a_graph_puts_back_what_it_draws_from() -> None:
    own = torch.Generator()
    s = Sketch()
    x = s.input("x", 4)
    drawn = s.call(torch.ops.aten.bernoulli.default, x, generator=None)
    gm = s.step([drawn])
    drawn.kwargs = {"generator": cast(Any, own)}
    states = DrawnStates(drawn_generators(gm.graph))
    assert len(states.generators) == 2
    before, _ = own.get_state(), own.seed()
    states.restore()
    assert torch.equal(own.get_state(), before)
