"""Level "dependencies", and random wrong and right edits of captured steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
from torch import fx

import graphopt
from edit_tools import Edit
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_operator
from graphopt.manager.snapshot import Snapshot
from illegal_edits import ILLEGAL
from legal_edits import LEGAL, LEGAL_IN_PLACE
from mutation_trials import CASES, DIALECTS, Case, Verdict, case, trial, two_ranks
from sketch import Sketch

aten = torch.ops.aten


c10d = torch.ops._c10d_functional


def step() -> fx.GraphModule:
    """Two gradients of five elements, reduced, and their sum times a constant of the module."""
    s = Sketch()
    first, second = (s.input(name, 5) for name in ("a", "b"))
    reduced = [s.wait(s.all_reduce(s.call(aten.neg.default, g))) for g in (first, second)]
    total = s.call(aten.add.Tensor, *reduced)
    gm = s.step([s.call(aten.mul.Tensor, total, 0.5)])
    gm.register_buffer("scale", torch.full((5,), 2.0))
    with gm.graph.inserting_before(total):
        scale = gm.graph.get_attr("scale")
    scale.meta["val"] = reduced[0].meta["val"]
    total.update_arg(1, scale)
    total.update_arg(0, reduced[0])
    with gm.graph.inserting_after(total):
        more = call_function_with_meta(gm.graph, aten.add.Tensor, (total, reduced[1]))
    more.meta["phase"] = "forward"
    for user in [u for u in total.users if u is not more]:
        user.replace_input_with(total, more)
    gm.recompile()
    return gm


def node(gm: fx.GraphModule, name: str, index: int = 0) -> fx.Node:
    return find_nodes(gm.graph, lambda n: is_operator(n.target, name))[index]


def sent_again(gm: fx.GraphModule) -> None:
    launch = node(gm, "_c10d_functional::all_reduce")
    wait = node(gm, "_c10d_functional::wait_tensor")
    with gm.graph.inserting_after(launch):
        again = call_function_with_meta(gm.graph, launch.target, launch.args, like=launch)
    with gm.graph.inserting_after(wait):
        call_function_with_meta(gm.graph, c10d.wait_tensor.default, (again,), like=wait)


def unread(gm: fx.GraphModule) -> None:
    wait = node(gm, "_c10d_functional::wait_tensor", 1)
    wait.replace_all_uses_with(wait.args[0].args[0])


def other_number(gm: fx.GraphModule) -> None:
    node(gm, "aten::mul").update_arg(1, 0.25)


def reshaped(gm: fx.GraphModule) -> None:
    result = node(gm, "aten::mul")
    with gm.graph.inserting_after(result):
        new = call_function_with_meta(gm.graph, aten.view.default, (result, [5, 1]), like=result)
    new.graph.output_node().args = (([new], [], []),)


def other_constant(gm: fx.GraphModule) -> None:
    gm.scale = torch.full((5,), 3.0)
    node(gm, "aten::neg").meta["touched"] = True


def changed_constant(gm: fx.GraphModule) -> None:
    gm.scale.mul_(2.0)
    node(gm, "aten::neg").meta["touched"] = True


@pytest.mark.parametrize("verify", ["dependencies", "equivalence"])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (sent_again, "nobody reads the result of the collective"),
        (unread, "nobody reads the result"),
        (other_number, "gets other"),
        (reshaped, "result 0 is float32"),
        (other_constant, "the constant scale"),
        (changed_constant, "the constant scale"),
    ],
)
def test_refused(edit: Callable[[fx.GraphModule], None], message: str, verify: str) -> None:
    gm = step()

    @graphopt.graph_optimization_pass(registry=graphopt.PassRegistry())
    def wrong(gm: fx.GraphModule) -> None:
        edit(gm)

    with pytest.raises(graphopt.VerificationError, match=message):
        graphopt.PassManager([wrong], verify=verify).run(gm)


def test_another_constant_is_seen() -> None:
    gm = step()
    before = Snapshot(gm)
    assert not before.module_state.changed_constants()
    gm.scale.add_(1.0)
    assert before.module_state.changed_constants()


FEW = 12


MANY = 24
"""Edits of each model in each dialect, of either sort; all dialects together have every kind."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs edits that shape rules refuse
    with two_ranks():
        yield
    logger.setLevel(level)


def verdicts(of: Case, edits: dict[str, Edit], count: int, seed: object) -> list[Verdict]:
    """One kind after the other; every third time a pair. The dialects of a model share the kinds:
    each goes on where the one before it has ended."""
    draw, names = Random(str(seed)), list(edits)
    draw.shuffle(names)
    first, found = count * DIALECTS.index(of.dialect), []
    for number in range(count):
        chosen = [names[(first + number) % len(names)]]
        if number % 3 == 2:
            chosen.append(draw.choice(names))
        found.append(trial(of, [(name, edits[name]) for name in chosen], draw))
    return [verdict for verdict in found if verdict.outcome != "none"]


def all_is_well(of: Case, count: int, seed: object) -> None:
    wrong = verdicts(of, ILLEGAL, count, seed)
    assert wrong and not [v for v in wrong if v.differs or v.outcome == "crash"]
    legal = LEGAL_IN_PLACE if of.dialect == "finalized" else LEGAL
    right = verdicts(of, legal, count, seed)
    assert right and not [v for v in right if v.differs or v.outcome != "accepted"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_slice(dialect: str) -> None:
    all_is_well(case("shared-storage", "adamw-fused", dialect, trials=1), FEW, 0)


@pytest.mark.full
@pytest.mark.parametrize("names", CASES, ids="-".join)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_models(dialect: str, names: tuple[str, str], seed: int) -> None:
    all_is_well(case(*names, dialect), MANY, (seed, names))
