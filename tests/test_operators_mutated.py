"""The tests of rows can fail: for each kind of fact a row is made wrong, and one of them does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import test_operators as rows
from graphopt.ir import inplace
from graphopt.ir.operators import table as operators
from observed import Observer

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore")


def database(*names: str) -> Callable[[], None]:
    """What torch's database of operators says of some."""

    def check() -> None:
        observer = Observer()
        rows.observe_database(list(names), 3, (torch.float32,), observer)
        rows.assert_known(observer)

    return check


def composed(name: str) -> Callable[[], None]:
    return lambda: rows.test_rows_of_composed_operators(name)


def called(target: Any, *args: Any) -> Callable[[], None]:
    def check() -> None:
        observer = Observer()
        observer.call(target, args, {})
        rows.assert_known(observer)

    return check


def collective(name: str) -> Callable[[], None]:
    def check() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            rows.test_rows_of_collectives(name, None)
        finally:
            dist.destroy_process_group()

    return check


ALL_REDUCE = "_c10d_functional::all_reduce"

# which row, what it says instead, and which test sees it
MUTATIONS: list[tuple[str, dict[str, Any], Callable[[], None]]] = [
    ("aten::transpose", {"view": False, "aliases": ((),)}, database("transpose")),
    ("aten::select", {"view": False, "aliases": ((),)}, database("select")),
    ("aten::split", {"aliases": ((),)}, database("split")),
    ("aten::sin", {"view": True, "aliases": ((0,),)}, database("sin")),
    ("aten::reshape", {"view": True}, composed("reshape.default")),
    ("aten::lift", {"aliases": ((),)}, composed("lift.default")),
    ("aten::contiguous", {"aliases": ((),)}, composed("contiguous.default")),
    ("aten::add_", {"writes": ()}, database("add")),
    ("aten::index_add_", {"writes": ()}, database("index_add")),
    ("aten::add_", {"copies": True}, called(aten.add_.Tensor, torch.ones(3), torch.ones(3))),
    ("aten::bernoulli_", {"random": False}, called(aten.bernoulli_.float, torch.ones(3), 0.5)),
    ("aten::cumsum", {"pointwise": True}, database("cumsum")),
    ("aten::_softmax", {"pointwise": True}, database("softmax")),
    (
        "aten::_foreach_add",
        {"listed": False},
        rows.test_norms_of_all_elements_are_no_list_operators,
    ),
    (
        "aten::_fused_rms_norm",
        {"listed": True},
        rows.test_norms_of_all_elements_are_no_list_operators,
    ),
    ("aten::_foreach_mul_", {"writes": ()}, rows.test_rows_of_list_operators),
    (
        "aten::_fused_adamw_",
        {"writes": (0,)},
        lambda: rows.test_rows_of_fused_optimizers("AdamW", False),
    ),
    (
        "aten::native_batch_norm",
        {"writes": ()},
        lambda: rows.test_batch_norms_write_statistics_only_while_training(True),
    ),
    (ALL_REDUCE, {"collective": False}, collective("all_reduce")),
    (f"{ALL_REDUCE}_", {"aliases": ((),)}, collective("all_reduce_")),
    ("_c10d_functional::wait_tensor", {"aliases": ((),)}, collective("all_reduce")),
]


@pytest.fixture
def rows_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_ROWS", {})
    inplace._inplace_form.cache_clear()


@pytest.mark.parametrize(
    ("name", "facts", "check"),
    MUTATIONS,
    ids=lambda value: str(value) if not callable(value) else "",
)
def test_a_wrong_row_is_seen(
    name: str,
    facts: dict[str, Any],
    check: Callable[[], None],
    rows_made_anew: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = operators._row

    def wrong(target: Any) -> operators.Operator:
        made = make(target)
        return replace(made, **facts) if target._schema.name == name else made

    monkeypatch.setattr(operators, "_row", wrong)
    with pytest.raises(AssertionError):
        check()
    inplace._inplace_form.cache_clear()


def test_a_wrong_twin_is_seen(rows_made_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inplace, "INPLACE", {aten.add.Tensor: aten.sub_.Tensor})
    with pytest.raises(AssertionError, match="its in-place form gives other bits"):
        called(aten.add.Tensor, torch.ones(3), torch.ones(3))()
    inplace._inplace_form.cache_clear()


def test_a_wrong_member_of_a_family_is_seen() -> None:
    """The tests of `SAME_ELEMENTS` and `METADATA_ONLY` go through all members."""
    with pytest.raises(AssertionError):
        rows.test_elements_keep_their_order("aten::t")
    with pytest.raises(AssertionError):
        rows.test_what_reads_metadata_gives_the_same_for_other_values("aten::relu")


def test_right_rows_pass() -> None:
    for _, _, check in MUTATIONS:
        check()
