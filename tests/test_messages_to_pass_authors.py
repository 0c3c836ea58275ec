"""What an author of passes is told: the mistake itself, and a command that shows it once more."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_operator
from graphopt.manager import PassRegistry
from graphopt.testing import check_pass, fake_ranks
from registry import isolate

aten = torch.ops.aten


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _folder(without_settings: None) -> None:
    """Files that appear are in a folder of the test."""


def arguments(make: Callable[..., Any] = torch.optim.SGD, **options: Any) -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    return model, make(model.parameters(), lr=0.1, **options), torch.randn(3, 4)


def calls(gm: fx.GraphModule, *names: str) -> list[fx.Node]:
    return find_nodes(gm.graph, lambda node: is_operator(node.target, *names))


def refusal(function: Any, args: Any, step: Any = train_step, **declared: Any) -> str:
    pass_ = graphopt.graph_optimization_pass(registry=PassRegistry(), **declared)(function)
    with pytest.raises(graphopt.GraphOptError) as caught:
        check_pass(step, args, pass_)
    return str(caught.value)


@pytest.mark.parametrize("numerics", [False, True])
@pytest.mark.parametrize("dropped", [0, 1, 3])
def test_a_norm_that_is_lost_is_named(numerics: bool, dropped: int) -> None:
    def lose_one(gm: fx.GraphModule) -> None:
        (stack,) = calls(gm, "aten::stack")
        norms = list(stack.args[0])  # type: ignore[arg-type]
        del norms[dropped]
        stack.args = (norms, *stack.args[1:])

    text = refusal(lose_one, arguments(), clipped_step, changes_numerics=numerics)
    item = "%getitem" + (f"_{dropped}" if dropped else "")
    assert f"%stack read 4 values, and reads 3 now: {item} is missing\n" in text
    assert f"{item} = getitem(%_foreach_norm, {dropped})" in re.sub(" +", " ", text)


@pytest.mark.parametrize("name", ["gelu", "gelu_backward"])
def test_arguments_by_name_are_shown_where_they_differ(name: str) -> None:
    def approximate(gm: fx.GraphModule) -> None:
        for node in calls(gm, f"aten::{name}"):
            node.kwargs = {"approximate": "tanh"}

    text = refusal(approximate, arguments())
    assert f"aten.{name}.default gets approximate='tanh', before it was 'none'" in text
    before, after = (
        next(line for line in text.splitlines() if line.startswith(f"  {word}:"))
        for word in ("before", "after")
    )
    assert "approximate='none')" in before and "approximate='tanh')" in after


def test_numbers_that_differ_are_shown() -> None:
    def scale(gm: fx.GraphModule) -> None:
        for node in calls(gm, "aten::addmm"):
            node.kwargs = {"alpha": 2}

    assert "aten.addmm.default gets alpha=2, before it was 1" in refusal(scale, arguments())


def square_arguments(make: Callable[..., Any] = torch.optim.SGD, **options: Any) -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    return model, make(model.parameters(), lr=0.1, **options), torch.randn(4, 4)


@pytest.mark.parametrize("numerics", [False, True])
def test_operands_that_are_exchanged_are_shown(numerics: bool) -> None:
    edited: list[str] = []

    def exchange(gm: fx.GraphModule) -> None:
        node = calls(gm, "aten::mm")[0]
        node.args = node.args[1], node.args[0]
        edited.append(node.name)

    message = said(exchange, square_arguments(), numerics)
    assert f"the pass edited %{edited[0]}" in message
    now, before = re.findall(rf"%{edited[0]} = aten.mm.default\((.*?)\)", message)[-2:]
    assert now.split(", ") == before.split(", ")[::-1]


@pytest.mark.parametrize("numerics", [False, True])
def test_a_slice_of_a_bucket_that_is_another_is_named(numerics: bool) -> None:
    """Both weights have the same shape."""
    edited: list[str] = []

    def take_another(gm: fx.GraphModule) -> None:
        (split,) = calls(gm, "aten::split_with_sizes")
        slices = {node.meta["val"].shape: node for node in split.users}
        for node in split.users:
            other = slices[node.meta["val"].shape]
            if other is not node:
                node.args = split, other.args[1]
                edited.append(node.name)
                return

    with fake_ranks(2):
        message = said(take_another, square_arguments(), numerics, after="comm_fusion_with_concat")
    assert f"%{edited[0]}" in message


def test_a_copy_to_itself_is_named() -> None:
    def copy_itself(gm: fx.GraphModule) -> None:
        node = calls(gm, "aten::copy_")[0]
        node.args = node.args[0], node.args[0]

    args = arguments(torch.optim.AdamW, foreach=False)
    assert said(copy_itself, args).splitlines()[0].count("%copy__default") == 1


@pytest.mark.parametrize("numerics", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_gradients_that_are_averaged_twice_are_said_to_be(make: Any, numerics: bool) -> None:
    def average_again(gm: fx.GraphModule) -> None:
        for block in get_all_comm_blocks(gm, "all_reduce"):
            (wait,) = block.wait_nodes
            with gm.graph.inserting_after(wait):
                half = call_function_with_meta(gm.graph, aten.div.Tensor, (wait, 2), like=wait)
            wait.replace_all_uses_with(half, delete_user_cb=lambda user, h=half: user is not h)

    with fake_ranks(2):
        message = said(average_again, arguments(make), numerics)
    assert "%div_tensor" in message and "aten.div.Tensor(%wait_tensor" in message
    if numerics:
        assert "an average over 2 ranks is divided by 2 twice?" in message


def said(function: Any, args: Any, numerics: bool = False, **options: Any) -> str:
    """What `check_pass` says of a pass; numbers decide where it changes them."""
    pass_ = graphopt.graph_optimization_pass(registry=PassRegistry(), changes_numerics=numerics)(
        function
    )
    with pytest.raises((graphopt.GraphOptError, AssertionError)) as caught:
        check_pass(train_step, args, pass_, idempotent=False, **options)
    return str(caught.value)


def test_an_operator_that_works_in_place_is_named() -> None:
    def in_place(gm: fx.GraphModule) -> None:
        (node,) = calls(gm, "aten::gelu")
        with gm.graph.inserting_before(node):
            copy = call_function_with_meta(gm.graph, aten.clone.default, node.args, like=node)
            relu = call_function_with_meta(gm.graph, aten.relu_.default, (copy,), like=node)
        node.args = (relu,)

    text = refusal(in_place, arguments(), changes_numerics=True)
    assert re.search(r"it put in %relu_\w*, which works in place: aten.relu_.default", text), text


def test_the_state_of_adamw_does_not_depend_on_its_weight_decay() -> None:
    def no_decay(gm: fx.GraphModule) -> None:
        (node,) = calls(gm, "aten::_fused_adamw")
        node.kwargs = {**node.kwargs, "weight_decay": 0.0}

    args = arguments(torch.optim.AdamW, fused=True, weight_decay=0.1)
    text = refusal(no_decay, args, changes_numerics=True)
    assert text.count("weight_decay any more") == 4, "the parameters, and nothing else"


def test_numbers_that_are_wrong_are_no_reason_to_declare_that_they_change() -> None:
    def halve(gm: fx.GraphModule) -> None:
        (node,) = calls(gm, "aten::gelu")
        with gm.graph.inserting_after(node):
            half = call_function_with_meta(gm.graph, aten.mul.Tensor, (node, 0.5), like=node)
        node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)

    text = refusal(halve, arguments())
    assert "trial:     different on random inputs" in text
    assert "changes_numerics" not in text


def test_fake_ranks_put_back_how_errors_are_shown() -> None:
    def shown(*args: Any) -> None:
        """As a debugger or a notebook shows errors."""

    before, sys.excepthook = sys.excepthook, shown
    try:
        with fake_ranks(2):
            pass
        assert sys.excepthook is shown
    finally:
        sys.excepthook = before


def test_a_step_whose_pipeline_has_no_order_is_refused_before_it_runs() -> None:
    with pytest.raises(graphopt.PassOrderError, match=r"needs 'remove_copy_from_optimizer'"):
        graphopt.compile(train_step, pipeline="iter_move_grads_and_optimizers")
    with pytest.raises(graphopt.PassOrderError, match="comes too late"):
        graphopt.compile(train_step, pipeline="schedule_comm_wait -> comm_fusion_with_concat")
    with pytest.raises(graphopt.PassOrderError, match="not repeatable"):
        graphopt.compile(train_step, pipeline="schedule_comm_wait -> schedule_comm_wait")


@pytest.mark.parametrize("decorated", [False, True])
def test_an_option_that_is_written_wrong_is_named_with_the_one_that_is_meant(
    decorated: bool,
) -> None:
    wrong: dict[str, Any] = {"pipline": "none"}
    with pytest.raises(TypeError, match="no option 'pipline'; did you mean 'pipeline'"):
        graphopt.compile(**wrong) if decorated else graphopt.compile(train_step, **wrong)


@pytest.mark.parametrize("where", ["apply_after", "apply_before"])
def test_a_name_that_is_no_pass_is_warned_of_where_it_is_declared(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(gm: fx.GraphModule) -> int:
        return 0

    isolate(monkeypatch)
    declare = graphopt.graph_optimization_pass(name="look", **{where: ["schedule_com_wait"]})
    with pytest.warns(UserWarning, match=r"'schedule_com_wait', .*mean 'schedule_comm_wait'"):
        declare(look)
    graphopt.graph_optimization_pass(name="look_on", **{where: ["schedule_comm_wait", "look"]})(
        look
    )


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """A folder with a pass that imports what stands beside it and asks for the size of a group."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside.py").write_text("FACTOR = 2\n")
    (folder / "wrong_scale.py").write_text(
        textwrap.dedent(
            """
            import graphopt, torch
            from graphopt.comm import get_all_comm_blocks
            from graphopt.graph_utils import call_function_with_meta
            from beside import FACTOR

            @graphopt.graph_optimization_pass()
            def wrong_scale(gm) -> int:
                \"\"\"Divide averages by twice the number of ranks.\"\"\"
                for block in get_all_comm_blocks(gm, "all_reduce"):
                    (wait,) = block.wait_nodes
                    with gm.graph.inserting_after(wait):
                        new = call_function_with_meta(
                            gm.graph, torch.ops.aten.div.Tensor, (wait, FACTOR * block.group_size)
                        )
                    wait.replace_all_uses_with(new, delete_user_cb=lambda u, n=new: u is not n)
                return 1
            """
        )
    )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in ("beside", "wrong_scale"):
        sys.modules.pop(name, None)


def test_the_command_works_for_groups_and_for_files_that_import_their_siblings(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    isolate(monkeypatch)
    module = importlib.import_module("wrong_scale")
    with fake_ranks(3), pytest.raises(graphopt.VerificationError) as caught:
        check_pass(train_step, arguments(), module.wrong_scale)
    (command,) = re.findall("reproduce: graphopt (.*)", str(caught.value))
    done = subprocess.run(
        [sys.executable, "-m", "graphopt", *shlex.split(command)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    first = str(caught.value).splitlines()[0]
    assert done.returncode == 1 and first in done.stderr, done.stderr


@pytest.mark.parametrize("said", [None, "mine"])
def test_where_the_graph_of_a_failed_pass_is_kept(
    said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GRAPHOPT_REPRO")
    if said is not None:
        monkeypatch.setenv("GRAPHOPT_REPRO", said)

    def unfinished(gm: fx.GraphModule) -> None:
        raise ValueError("not yet")

    text = refusal(unfinished, arguments())
    (file,) = re.findall(r"reproduce: graphopt optimize (\S+)", text)
    assert Path(file).is_file()
    assert not (tmp_path / "graphopt-repro").exists()
    assert Path(file).parent.name == said if said else Path(file).is_absolute()


def test_the_size_of_a_group_is_kept_with_the_graph(tmp_path: Path) -> None:
    from graphopt.commands.fake_groups import groups_present
    from graphopt.saved import load_graph, save_graph

    with fake_ranks(4):
        gm = graphopt.capture(train_step, *arguments()).graph_module
        save_graph(gm, tmp_path / "step.pt")
    loaded = load_graph(tmp_path / "step.pt")
    save_graph(loaded, tmp_path / "again.pt")  # by a process that has no groups
    loaded = load_graph(tmp_path / "again.pt")
    with groups_present(loaded):
        assert {block.group_size for block in get_all_comm_blocks(loaded)} == {4}
    assert not torch.distributed.is_initialized()
