"""`graphopt.rewrite`: what it finds, leaves alone, keeps and refuses; and `fuse_attention`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from graphopt.graph_utils import find_nodes, is_operator
from graphopt.manager import PassRegistry
from graphopt.passes import fuse_attention
from graphopt.rewriting import RewriteError
from graphopt.testing import check_pass
from registry import isolate

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "rewriting.md").read_text()
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Attention(nn.Module):
    """Attention as people write it out."""

    def __init__(self, scaling: str, masking: str, layout: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.scaling, self.masking, self.layout, self.p = scaling, masking, layout, dropout
        self.register_buffer("keep", torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6))
        self.register_buffer("bias", torch.triu(torch.full((6, 6), -math.inf), 1))

    def heads(self, x: Tensor) -> Any:
        size = (x.shape[0], x.shape[1], 2, 8)
        if self.layout == "split":
            return (t.view(size).transpose(1, 2) for t in self.qkv(x).split(16, dim=2))
        if self.layout == "contiguous":
            parts = self.qkv(x).chunk(3, -1)
            return (t.reshape(size).permute(0, 2, 1, 3).contiguous() for t in parts)
        return self.qkv(x).view(*size[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.scaling == "mul":
            return (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(8))
        if self.scaling == "div":
            return torch.matmul(q, k.transpose(2, 3)) / math.sqrt(8)
        if self.scaling == "query":
            return (q * 8**-0.5) @ k.transpose(-2, -1)
        return q @ k.transpose(-1, -2)

    def masked(self, scores: Tensor) -> Tensor:
        if self.masking == "fill":
            return scores.masked_fill(self.keep == 0, -math.inf)
        if self.masking == "add":
            return scores + self.bias
        return self.bias[None, None] + scores if self.masking == "added to" else scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = F.dropout(F.softmax(self.masked(self.scores(q, k)), dim=-1), self.p)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


def attention_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = (x + model(x)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def attention_arguments(*options: Any, layers: int = 1) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(*options) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(2, 6, 16)


@pytest.mark.parametrize(
    "options",
    [
        ("mul", "fill", "split"),
        ("div", "add", "contiguous"),
        pytest.param(("query", "", "permuted"), marks=pytest.mark.full),
        pytest.param(("none", "added to", "split"), marks=pytest.mark.full),
    ],
)
def test_attention_is_fused(options: Any) -> None:
    arguments = attention_arguments(*options, layers=2)
    record = check_pass(attention_step, arguments, fuse_attention, changes=2)
    assert record.changed


def test_attention_keeps_its_metadata() -> None:
    arguments = attention_arguments("mul", "fill", "split")
    gm = graphopt.capture(attention_step, *arguments).graph_module
    fuse_attention(gm)
    assert not find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::_softmax", "aten::bmm"))
    (fused,) = find_nodes(gm.graph, lambda n: is_operator(n.target, FUSED))
    (back,) = find_nodes(gm.graph, lambda n: is_operator(n.target, f"{FUSED}_backward"))
    assert (fused.meta["phase"], back.meta["phase"]) == ("forward", "backward")
    assert list(fused.meta["nn_module_stack"].values())[-1][0] == "0"
    assert fused.meta["provenance"][-1] == "fuse_attention"
    assert "weights @ v" in fused.meta["source"].code


def test_attention_with_dropout_stays() -> None:
    arguments = attention_arguments("mul", "fill", "split", 0.1)
    check_pass(attention_step, arguments, fuse_attention, changes=0)


P = 0.25
KEPT = torch.empty(4, 4, dtype=torch.bool, device="meta")


class Dropped(nn.Module):
    """Attention with dropout, and a mask that is filled in or learned."""

    def __init__(self, masking: str, dropout: float) -> None:
        super().__init__()
        self.qkv, self.masking, self.p = nn.Linear(16, 48), masking, dropout
        self.register_buffer("hidden", torch.triu(torch.ones(6, 6, dtype=torch.bool), 1))
        self.bias = nn.Parameter(torch.randn(1, 2, 6, 6)) if masking == "learned" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(2, 6, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * 8**-0.5
        if self.bias is not None:
            scores = scores + self.bias
        if self.masking == "fill":
            scores = scores.masked_fill(self.hidden, -math.inf)
        weights = F.dropout(torch.softmax(scores, -1), self.p) if self.p else scores.softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(x.shape)


def dropped(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.dropout(torch.softmax(q @ k.transpose(-2, -1) * scale, -1), P) @ v


def dropped_and_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = (q @ k.transpose(-2, -1) * scale).masked_fill(mask, -math.inf)
    return F.dropout(torch.softmax(scores, -1), P) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * scale + mask, -1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=scale, **more)


def fused_dropped(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, dropout_p=P)


def other_share(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, dropout_p=2 * P)


def without_dropout(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return sdpa(q, k, v, scale)


def dropped_twice(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.dropout(sdpa(q, k, v, scale, dropout_p=P), P)


def fused_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, dropout_p=P, attn_mask=~mask)


def turned_round(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, dropout_p=P, attn_mask=mask)


def fused_biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, attn_mask=mask)


def scaled_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, attn_mask=mask * 1.01)


def bias_cut_off(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, attn_mask=mask.detach())


def half_the_gradient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, attn_mask=(mask + mask.detach()) / 2)


@pytest.mark.parametrize(
    ("masking", "pattern", "replacement", "message"),
    [
        ("", dropped, fused_dropped, None),
        ("", dropped, other_share, r"result 0 of the replacement of dropped differs on random"),
        ("", dropped, without_dropout, r"the random numbers of %bernoulli are not drawn any more"),
        ("", dropped, dropped_twice, r"draws random numbers that were not drawn before"),
        ("fill", dropped_and_masked, fused_masked, None),
        ("fill", dropped_and_masked, turned_round, r"differs on random inputs"),
        ("learned", biased, fused_biased, None),
        (
            "learned",
            biased,
            scaled_bias,
            r"the gradient of mask of the replacement of biased differs",
        ),
        (
            "learned",
            biased,
            half_the_gradient,
            r"the gradient of mask of the replacement of biased",
        ),
        ("learned", biased, bias_cut_off, r"no gradient flows to 'mask' in bias_cut_off"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dropout_and_masks_are_compared(
    masking: str, pattern: Any, replacement: Any, message: str | None
) -> None:
    """Values and gradients, with the same random numbers drawn."""
    torch.manual_seed(0)
    model = Dropped(masking, 0.0 if pattern is biased else P)
    arguments = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 6, 16)
    learned = ("mask",) if masking == "learned" else ()
    examples: dict[str, Any] = {"q": 4, "k": 4, "v": 4, "mask": 4 if learned else KEPT}

    @graphopt.graph_optimization_pass(registry=PassRegistry(), changes_numerics=True)
    def exchange(gm: Any) -> int:
        names = {name: examples[name] for name in examples if name != "mask" or masking}
        given = ("q", "k", "v", *learned)
        return graphopt.rewrite(gm, pattern, replacement, gradients=given, examples=names)

    if message is None:
        check_pass(attention_step, arguments, exchange, changes=1, idempotent=False)
        return
    with pytest.raises(graphopt.GraphOptError, match=message):
        check_pass(attention_step, arguments, exchange)


def test_attention_without_backward_is_fused() -> None:
    def evaluate(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    model, _, x = attention_arguments("mul", "fill", "split")
    assert check_pass(evaluate, (model, x), fuse_attention).changes == 1


# ------------------------------------------------------------------------------------ rewriting


def captured(function: Callable[..., Any], *args: Any) -> Any:
    """The graph of a step, or of a function of tensors."""
    if isinstance(args[0], nn.Module):
        return graphopt.capture(function, *args).graph_module

    def step(model: nn.Module, *tensors: Tensor) -> Tensor:
        return function(*tensors)

    return graphopt.capture(step, nn.Identity(), *args).graph_module


def relu_twice(x: Tensor) -> Tensor:
    return x.relu().relu()


def relu(x: Tensor) -> Tensor:
    return x.relu()


def scaled(x: Tensor, y: Tensor, s: float) -> Tensor:
    return (x + y) * s


def scaled_apart(x: Tensor, y: Tensor, s: float) -> Tensor:
    return x * s + y * s


@pytest.mark.parametrize(
    ("function", "places"),
    [
        (lambda x: x.relu().relu() + 1, 1),
        (lambda x: x.relu().relu().relu().relu() + 1, 2),
        (lambda x: x.relu().relu().relu() + 1, 1),  # two that overlap
        (lambda x: (lambda r: r.relu() + r)(x.relu()), 0),  # a value within is read outside
        (lambda x: x.relu() + 1, 0),
        (lambda x: x.T.relu().relu().sum(0), 1),
    ],
)
def test_places(function: Callable[[Tensor], Tensor], places: int) -> None:
    gm = captured(function, torch.randn(3, 4))
    x = torch.randn(3, 4)
    before = gm(x)
    assert graphopt.rewrite(gm, relu_twice, relu) == places
    gm.recompile()
    assert torch.equal(gm(x)[0][0], before[0][0])


def test_numbers_stand_for_any() -> None:
    gm = captured(lambda x, y: (y + x) * 3 + (x + y) * 0.5, torch.randn(3), torch.randn(3))
    found: list[Any] = []

    def where(match: Any) -> bool:
        found.append(match.inputs["s"])
        return match.inputs["s"] == 3

    assert graphopt.rewrite(gm, scaled, scaled_apart, where=where) == 1
    assert found == [3, 0.5]


def test_results_lie_as_before() -> None:
    gm = captured(lambda x: (x.t() * 2.0).view(-1), torch.randn(4, 3).t().contiguous().t())

    def doubled(x: Tensor) -> Tensor:
        return x * 2.0

    def doubled_otherwise(x: Tensor) -> Tensor:
        return (x.t().contiguous() * 2.0).t()

    (node,) = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::mul"))
    stride = node.meta["val"].stride()
    assert graphopt.rewrite(gm, doubled, doubled_otherwise, examples={"x": 2}) == 1
    (view,) = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::view"))
    assert view.args[0].meta["val"].stride() == stride
    gm.recompile()
    x = torch.randn(4, 3)
    assert torch.equal(gm(x)[0][0], (x.t() * 2.0).reshape(-1))


@pytest.mark.parametrize(
    ("pattern", "replacement", "options", "message"),
    [
        (relu, lambda x: x.double(), {}, "is torch.float64 of shape"),
        (relu, lambda x, y: x, {}, "both take the same parameters"),
        (relu, lambda y: y, {}, "name the parameters"),
        (relu, lambda x: (x, x), {}, "returns 2 tensors, and the pattern 1"),
        (relu, lambda x: x * torch.tensor(2.0), {}, "makes a constant of its own"),
        (relu, lambda x: x.no_such(), {}, "cannot be traced for %relu: AttributeError"),
        (lambda x: x.no_such(), relu, {}, "cannot be traced: AttributeError"),
        (lambda x: x, relu, {}, "computes nothing"),
        (relu, relu, {"gradients": ["z"]}, "'z' is no tensor among the parameters"),
        (relu, lambda x: 3, {}, "it has to return tensors"),
        ("relu", relu, {}, "a pattern is a function"),
    ],
)
def test_what_cannot_be_used(pattern: Any, replacement: Any, options: Any, message: str) -> None:
    gm = captured(lambda x: x.relu() + 1, torch.randn(3))
    text = str(gm.graph)
    with pytest.raises(RewriteError, match=re.escape(message)):
        graphopt.rewrite(gm, pattern, replacement, **options)
    assert str(gm.graph) == text


def declared(function: Any, **options: Any) -> Any:
    return graphopt.graph_optimization_pass(registry=PassRegistry(), **options)(function)


def half(x: Tensor) -> Tensor:
    return x * 0.5


def halved(x: Tensor) -> Tensor:
    return x / 2.0


def linear_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = (model(x) * 0.5).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def linear_arguments() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4)


def test_backward_comes_along() -> None:
    def divide(gm: Any) -> int:
        return graphopt.rewrite(gm, half, halved, gradients=["x"])

    record = check_pass(linear_step, linear_arguments(), declared(divide, changes_numerics=True))
    assert record.changes == 1


def test_wrong_gradients_are_refused() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x * 0.25 + (x * 0.25).detach()

    def pass_(gm: Any) -> int:
        return graphopt.rewrite(gm, half, wrong, gradients=["x"])

    gm = captured(linear_step, *linear_arguments())
    with pytest.raises(
        graphopt.VerificationError, match=r"the gradient of x of the replacement of"
    ):
        declared(pass_, changes_numerics=True)(gm)


def test_other_changes_in_the_same_pass_are_refused() -> None:
    def pass_(gm: Any) -> int:
        found = graphopt.rewrite(gm, half, halved, gradients=["x"])
        (mean,) = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::mean"))
        with gm.graph.inserting_after(mean):
            double = graphopt.graph_utils.call_function_with_meta(
                gm.graph, torch.ops.aten.mul.Tensor, (mean, 2.0), like=mean
            )
        mean.replace_all_uses_with(double, delete_user_cb=lambda user: user is not double)
        return found

    gm = captured(linear_step, *linear_arguments())
    with pytest.raises(graphopt.VerificationError, match="result 0 is not what it was"):
        declared(pass_, changes_numerics=True)(gm)


def test_undeclared_changes_are_refused() -> None:
    def pass_(gm: Any) -> int:
        return graphopt.rewrite(gm, half, lambda x: x * 0.25 + x * 0.25, gradients=["x"])

    gm = captured(linear_step, *linear_arguments())
    with pytest.raises(graphopt.VerificationError, match="changes_numerics=True"):
        declared(pass_)(gm)


def test_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    isolate(monkeypatch)
    namespace: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
    for number, (language, code) in enumerate(blocks):
        if language == "text":
            printed = re.sub(r"\d+\.\d{3} s", "0.001 s", capsys.readouterr().out)
            assert printed.rstrip() == code.rstrip()
            continue
        path = tmp_path / f"block_{number}.py"
        path.write_text(code)
        exec(compile(code, str(path), "exec"), namespace)
