"""Seven passes as users write them, and the mistakes that one makes with each: every one is found
out, by a message that says what is wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.comm import get_all_comm_blocks, replace_collective
from graphopt.graph_utils import get_output, get_outputs, move_before, set_outputs
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import Pass, PassRegistry
from graphopt.optim import gradients_of
from graphopt.testing import StepUnderTest, fake_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import seven_passes as seven

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
NUMERICS = {"changes_numerics": True}


@pytest.fixture(scope="module")
def step() -> Iterator[StepUnderTest]:
    with fake_ranks(2):
        yield StepUnderTest(seven.train_step, seven.arguments())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("pass_", "options"), seven.PASSES, ids=lambda p: getattr(p, "name", ""))
def test_pass(step: StepUnderTest, pass_: Pass, options: dict[str, Any]) -> None:
    assert step.check(pass_, **options).changed


def last(gm: fx.GraphModule) -> Any:
    return get_all_comm_blocks(gm, "all_reduce")[-1]


def half(gm: Any, block: Any) -> Any:
    return seven.new(
        gm, block.comm_node, aten._to_copy.default, block.inputs[0], dtype=torch.bfloat16
    )


def sent(gm: Any, block: Any, value: Any) -> Any:
    return seven.received(gm, seven.launched(gm, block, value))


def whole(gm: Any, block: Any, value: Any) -> Any:
    return seven.new(gm, block.comm_node, aten._to_copy.default, value, dtype=torch.float32)


def compress(gm: fx.GraphModule) -> None:
    seven.compress_bf16.function(gm)


def compress_beside(gm: fx.GraphModule) -> None:
    block = last(gm)
    with gm.graph.inserting_before(block.wait_nodes[0]):
        new = whole(gm, block, sent(gm, block, half(gm, block)))
    block.wait_nodes[0].replace_all_uses_with(new)


def compress_and_divide(gm: fx.GraphModule) -> None:
    block = last(gm)
    with gm.graph.inserting_before(block.wait_nodes[0]):
        new = whole(gm, block, sent(gm, block, half(gm, block)))
        new = seven.new(gm, block.comm_node, aten.div.Tensor, new, 2)
        replace_collective(gm, block, new)


def joined(gm: fx.GraphModule, parts: Callable[[int], list[tuple[int, int]]]) -> None:
    """Send slices of the largest gradient, and join what comes back."""
    block = max(get_all_comm_blocks(gm, "all_reduce"), key=lambda b: torch.Size(b.shape).numel())
    like, size = block.comm_node, torch.Size(block.shape).numel()
    with gm.graph.inserting_before(block.wait_nodes[0]):
        row = seven.new(gm, like, aten.reshape.default, block.inputs[0], [-1])
        found = [
            sent(gm, block, seven.new(gm, like, aten.slice.Tensor, row, 0, *part))
            for part in parts(size)
        ]
        new = seven.new(gm, like, aten.cat.default, found)
        new = seven.new(gm, like, aten.view.default, new, list(block.shape))
        replace_collective(gm, block, new)


def split_first_half_twice(gm: fx.GraphModule) -> None:
    joined(gm, lambda size: [(0, size // 2), (0, size // 2)])


def split_swapped(gm: fx.GraphModule) -> None:
    joined(gm, lambda size: [(size // 2, size), (0, size // 2)])


def split_one_row_too_few(gm: fx.GraphModule) -> None:
    joined(gm, lambda size: [(0, size // 2), (size // 2, size - 1)])


def launch_at_the_end(gm: fx.GraphModule) -> None:
    move_before([last(gm).comm_node], get_output(gm.graph))


def wait_first(gm: fx.GraphModule) -> None:
    block = last(gm)
    move_before(block.wait_nodes, block.comm_node)


def do_not_wait(gm: fx.GraphModule) -> None:
    block = last(gm)
    block.wait_nodes[0].replace_all_uses_with(block.comm_node)


def norms_in_python(gm: fx.GraphModule) -> None:
    gradient = max(gradients_of(gm).values())
    with gm.graph.inserting_after(gradient):
        seven.new(gm, gradient, lambda g: print(g.norm()), gradient)


def norms_returned(gm: fx.GraphModule) -> None:
    gradient = max(gradients_of(gm).values())
    with gm.graph.inserting_before(get_output(gm.graph)):
        norm = seven.new(gm, gradient, aten.linalg_vector_norm.default, gradient)
    outputs = get_outputs(gm.graph)
    set_outputs(gm.graph, outputs._replace(results=[*outputs.results, norm]))


def norms_unread(gm: fx.GraphModule) -> int:
    gradient = max(gradients_of(gm).values())
    with gm.graph.inserting_before(get_output(gm.graph)):
        seven.new(gm, gradient, aten.linalg_vector_norm.default, gradient)
    return 1


def attention(gm: fx.GraphModule, replacement: Any) -> None:
    graphopt.rewrite(
        gm,
        seven.attention,
        replacement,
        gradients=["q", "k", "v"],
        examples={"q": 4, "k": 4, "v": 4},
    )


def no_scale(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def attention_without_scale(gm: fx.GraphModule) -> None:
    attention(gm, no_scale)


def attention_causal(gm: fx.GraphModule) -> None:
    attention(gm, causal)


def attention_undeclared(gm: fx.GraphModule) -> None:
    attention(gm, seven.fused)


def chunks_without_the_rest(gm: fx.GraphModule) -> None:
    block = last(gm)
    with gm.graph.inserting_before(block.wait_nodes[0]):
        row = seven.new(gm, block.comm_node, aten.reshape.default, block.inputs[0], [-1])
        short = seven.new(gm, block.comm_node, aten.slice.Tensor, row, 0, 0, 4)
        replace_collective(gm, block, sent(gm, block, short))


def chunks_backwards(gm: fx.GraphModule) -> None:
    joined(gm, lambda size: [(start, start + 64) for start in range(size - 64, -1, -64)])


def chunks_maximum(gm: fx.GraphModule) -> None:
    for block in get_all_comm_blocks(gm, "all_reduce"):
        block.comm_node.update_arg(1, "max")


def late_wait_alone(gm: IterGraphModule) -> None:
    gm.graph.move_to_next_iter_before(last(gm).tail)


def late_behind_the_read(gm: IterGraphModule) -> None:
    block = last(gm)
    nodes = [*block.tail, *seven.updates_of(gm, block)]
    gm.graph.move_to_next_iter_before(nodes, get_outputs(gm.graph).updates[0])


def late_loss(gm: IterGraphModule) -> None:
    (loss,) = get_outputs(gm.graph).results
    gm.graph.move_to_next_iter_before([loss])


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (
        compress,
        {},
        r"the dtype of 3216 elements that are sent changed: .* of torch.bfloat16 now, before it was"
        r" .* of torch.float32 \(the pass edited %\w+ and \d+ others\)\n"
        r"(.*\n)*.*hint: .* changes_numerics=True may send another dtype",
    ),
    (
        compress_beside,
        NUMERICS,
        r"nobody reads the result of the collective %all_reduce_7, which still runs\n"
        r"(.*\n)*.*hint: .*graphopt.comm.replace_collective",
    ),
    (compress_and_divide, NUMERICS, "an average over 2 ranks is divided by 2 twice"),
    (
        split_first_half_twice,
        {},
        r"the update of %mlp_2_weight .* element 0 of %all_reduce_1 where element 512 was(.*\n)*"
        r".*also: element 0 of %\w+ goes through all_reduce 2 times, before it was 1\n(.*\n)*"
        r".*hint: .*look at where slices begin",
    ),
    (
        split_swapped,
        {},
        r"the update of %mlp_2_weight .* element 512 of %all_reduce_1 where element 0 was(.*\n)*"
        r".*hint: .*the order in which they are joined",
    ),
    (
        split_one_row_too_few,
        {},
        r"aten.view.default does not take these arguments: shape '\[16, 64\]' is invalid for input"
        r" of size 1023\n.*\n +%cat_default is torch.float32 of shape \[1023\] on cpu\n"
        r" +at: .*test_examples_seven_passes.py:\d+ ",
    ),
    (
        launch_at_the_end,
        {},
        r"it moved %all_reduce_7 behind %wait_tensor_7, which reads it\n(.*\n)*"
        r".*hint: .*move the readers of a node as well",
    ),
    (
        wait_first,
        {},
        r"it moved a read before the value exists\n.*> %wait_tensor_7 .*\n +%all_reduce_7 ",
    ),
    (
        do_not_wait,
        {},
        r"%add_3 reads %all_reduce_7 without waiting for it(.*\n)*.*let %add_3 read %wait_tensor_7",
    ),
    (
        norms_in_python,
        {},
        r"is a Python function, of which nothing is known(.*\n)*.*hint: .*insert_callback",
    ),
    (
        norms_returned,
        {},
        r"the step returned 1 result, now 2\n.*> %linalg_vector_norm(.*\n)*"
        r".*hint: .*insert_callback",
    ),
    (norms_unread, {}, r"nobody reads %linalg_vector_norm(.*\n)*.*hint: .*insert_callback"),
    (
        attention_without_scale,
        NUMERICS,
        r"result 0 of the replacement of attention differs on random inputs by [0-9.]+, where",
    ),
    (
        attention_causal,
        NUMERICS,
        r"result 0 of the replacement of attention differs on random inputs by [0-9.]+, where",
    ),
    (
        attention_undeclared,
        {},
        r"_scaled_dot_product_\w+.default in place of aten.bmm.default\n(.*\n)*"
        r".*hint: .*declare changes_numerics=True",
    ),
    (
        chunks_without_the_rest,
        {},
        r"of shape \[4\] on cpu, and cannot stand for %wait_tensor_7, .* of shape \[48, 16\](.*\n)*"
        r".*hint: .*all 768 elements, and these are 4: join the parts with aten.cat",
    ),
    (
        chunks_backwards,
        {},
        r"the update of %mlp_2_weight .* element 960 of %all_reduce_1 where element 0 was",
    ),
    (
        chunks_maximum,
        {},
        r"the reduction of 3216 elements that are sent changed: all_reduce\(max, .* now, before it"
        r" was all_reduce\(sum, ",
    ),
    (
        late_wait_alone,
        {},
        r"%add_3 \(.*\) needs %wait_tensor_7 in this iteration: move it as well, or leave both",
    ),
    (
        late_behind_the_read,
        {},
        r"the destination %copy__default \(.*\) is itself moved: name a node that stays",
    ),
    (late_loss, {}, r"%mean \(.*\) would run one iteration late, but the step returns it"),
]


@pytest.mark.parametrize(
    ("function", "options", "message"), WRONG, ids=[entry[0].__name__ for entry in WRONG]
)
def test_wrong_pass(step: StepUnderTest, function: Any, options: Any, message: str) -> None:
    pass_ = graphopt.graph_optimization_pass(registry=PassRegistry(), **options)(function)
    with pytest.raises((graphopt.GraphOptError, AssertionError)) as caught:
        step.check(pass_)
    assert re.search(message, str(caught.value)), caught.value
