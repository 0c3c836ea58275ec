"""Stages of a model that was divided by hand: modules that run as they are.

    received ──► receive ──► module ──► send ──► sent

What passes between two such stages is said by their examples, and compared before the first step.
All floating-point tensors between them carry gradients, so that both sides know it without asking:
a tensor that nothing trainable went into is given one that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _compat
from graphopt._compat import pipelining as _private
from graphopt.errors import PartitionError
from graphopt.pipelining.pipe.boundary import give_back, receive, send
from graphopt.pipelining.pipe.calling_convention import OutputNest, OutputSpec
from graphopt.pipelining.stage.stage import Stage
from graphopt.pipelining.stage.value_flow import described, is_differentiable

Tensors = tuple[torch.Tensor, ...]
Shapes = list[tuple[tuple[int, ...], str]]
"""Shapes and dtypes."""


class HandCutStage(_private.BeforeForwards, Stage):
    """A stage whose module was divided from a model by hand; `Stage.from_module` makes it."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        input_args: Any,
        output_args: Any,
        group: dist.ProcessGroup | None,
    ) -> None:
        _check_place(module, index, num_stages)
        where = f"stage {index}"
        examples = _tensors(input_args, f"input_args of {where}")
        module.to(device)
        received = tuple(described(t, index > 0 or t.requires_grad) for t in examples)
        self._body = _StageBody(module, index, index == num_stages - 1)
        result = self._body.result_on(received, output_args, device)
        leaves, spec = _compat.tree_flatten(result)
        sent = tuple(
            described(leaf, leaf.requires_grad or index < num_stages - 1)
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
        )
        super().__init__(
            module,
            index,
            num_stages,
            device,
            group,
            received=received,
            sent=sent,
            divides=index == 0,  # which parameters meet what is received is not known
            output=OutputNest(tuple(_places(leaves)), OutputSpec(spec)),
        )
        self._body.sent = sent

    def _captured(self) -> nn.Module:
        return self._body

    def _inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.is_first:
            args = _tensors(args, f"the arguments of stage {self.stage_index}")
            _compare(args, self._received, f"what stage {self.stage_index} is called with")
        if kwargs and self._compiled is not None:
            raise self._refusal(
                f"it is called with {', '.join(kwargs)}",
                "pass tensors by position, from stage to stage: a compiled stage takes no keyword"
                " arguments",
            )
        return args, kwargs

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the forward of one microbatch; called by `forward_one_chunk`."""
        if not self.is_first:
            _compare(args, self._received, f"what stage {self.stage_index} receives")
        if self._compiled is not None:
            return super().forward_maybe_with_nosync(*args, **kwargs)
        entered = self._body.enter(args)
        return self._body.leave(super().forward_maybe_with_nosync(*entered, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Runs the backward of one microbatch; called by schedules."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_first:
            # The previous stage waits for a gradient also of what this one has not read.
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(like, device=self.device)
                if gradient is None and like.requires_grad
                else gradient
                for gradient, like in zip(self.bwd_cache[bwd_chunk_id], self._received, strict=True)
            )

    def before_first_forward(self) -> None:
        """Compares the tensors sent with those that the next stage expects, on both ranks."""
        problem: str | None = None
        before, after = self.stage_index - 1, self.stage_index + 1
        if not self.is_first and not self._is_here(before):
            sent = self._hear(before)
            problem = sent if isinstance(sent, str) else self._mismatch(sent)
            self._tell(before, problem)
        if not self.is_last and not self._is_here(after):
            self._tell(after, problem or _shapes(self._sent))
            problem = self._hear(after) or problem
        if problem is not None:
            raise PartitionError(problem)

    def _mismatch(self, sent: Shapes) -> str | None:
        own, index = _shapes(self._received), self.stage_index
        if sent == own:
            return None
        return (
            f"stage {index - 1} sends {_listed(sent)}; stage {index} was made for {_listed(own)}"
            " (input_args)"
        )

    def _is_here(self, stage: int) -> bool:
        ranks = self.stage_index_to_group_rank
        return ranks[stage] == ranks[self.stage_index]

    def _tell(self, stage: int, value: str | Shapes | None) -> None:
        rank = self.stage_index_to_group_rank[stage]
        dist.send_object_list([value], group_dst=rank, group=self.group, device=self.device)

    def _hear(self, stage: int) -> Any:
        rank, heard = self.stage_index_to_group_rank[stage], [None]
        dist.recv_object_list(heard, group_src=rank, group=self.group, device=self.device)
        return heard[0]


class _StageBody(nn.Module):
    """The module of a stage, with the conversions of received and sent tensors.

    Attributes:
        sent: descriptions of what it sends, once they are known.
    """

    def __init__(self, module: nn.Module, index: int, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self.sent: Tensors | None = None
        self._structure: tuple[Any, list[Any]] | None = None
        self._index, self._is_last = index, is_last

    def forward(self, *received: torch.Tensor) -> Tensors:
        return self.leave(self.module(*self.enter(received)))

    def enter(self, received: Sequence[Any]) -> list[Any]:
        """Converts received tensors to the module's arguments."""
        return [receive(v) if self._index and v.requires_grad else v for v in received]

    def leave(self, result: Any) -> Tensors:
        """The tensors of the module's result that the stage sends; on the last stage, all."""
        tensors, structure = _parted(result)
        if self.sent is not None and not self._is_last:
            _compare(tensors, self.sent, f"what stage {self._index} sends")
        if self.sent is not None and structure != self._structure:
            raise PartitionError(
                f"what the module of stage {self._index} returns differs from what it returned when"
                " the stage was made, in more than the values of tensors:"
                f" {structure[0]} {structure[1]}"
            )
        self._structure = structure
        if self._is_last:
            return tuple(map(give_back, tensors))
        return tuple(send(_with_gradient(tensor)) for tensor in tensors)

    def result_on(self, received: Tensors, expected: Any, device: torch.device) -> Any:
        """The module's result on fake tensors, or `expected` if it does not run on them.

        The module stays as it is.
        """
        try:
            mode = _compat.new_fake_mode()
            module = _private.fake_copy(self.module, mode)
            with torch.enable_grad(), mode:
                result = module(*(described(t, t.requires_grad, device) for t in received))
        except Exception as error:
            if expected is None:
                raise PartitionError(
                    f"the module of stage {self._index} does not run on fake tensors like"
                    f" input_args ({type(error).__name__}: {error}); pass output_args, an example"
                    " of what it returns"
                ) from error
            result = expected
        self._check_result(result, expected)
        _, self._structure = _parted(result)
        return result

    def _check_result(self, result: Any, expected: Any) -> None:
        where = f"what the module of stage {self._index} returns"
        if not self._is_last:
            _tensors(result, where)
        if expected is not None:
            like = _tensors(expected, f"output_args of stage {self._index}")
            _compare(_parted(result)[0], like, where)


class _WithGradient(torch.autograd.Function):
    """Identity to a tensor that requires a gradient which nobody reads."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


def _with_gradient(value: torch.Tensor) -> torch.Tensor:
    if value.requires_grad or not is_differentiable(value) or not torch.is_grad_enabled():
        return value
    anchor = torch.empty(0, requires_grad=True)
    return _WithGradient.apply(value, anchor)  # type: ignore[no-any-return]


def _parted(result: Any) -> tuple[Tensors, tuple[Any, list[Any]]]:
    """The tensors of a nested result; its structure, and its other leaves."""
    leaves, spec = _compat.tree_flatten(result)
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), (spec, others)


def _places(leaves: Sequence[Any]) -> Iterator[tuple[int] | tuple[None, Any]]:
    count = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield (count,)
            count += 1
        else:
            yield None, leaf


def _tensors(value: Any, what: str) -> Tensors:
    values = value if isinstance(value, (tuple, list)) else (value,)
    for item in values:
        if not isinstance(item, torch.Tensor):
            raise PartitionError(
                f"{what}: a {type(item).__name__}; stages pass a tensor or a tuple of tensors"
            )
    return tuple(values)


def _shapes(tensors: Sequence[torch.Tensor]) -> Shapes:
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]


def _listed(shapes: Shapes) -> str:
    return ", ".join(f"{dtype} of shape {shape}" for shape, dtype in shapes) or "nothing"


def _compare(tensors: Sequence[Any], like: Sequence[torch.Tensor], what: str) -> None:
    now, expected = _shapes(tensors), _shapes(like)
    if now != expected:
        raise PartitionError(
            f"{what} is {_listed(now)}; the stage was made for {_listed(expected)}"
        )


def _check_place(module: Any, index: Any, num_stages: Any) -> None:
    if not isinstance(module, nn.Module):
        raise PartitionError(f"a stage is made of an nn.Module, not of {module!r}")
    if not isinstance(num_stages, int) or index not in range(num_stages):
        raise PartitionError(f"there is no stage {index!r} of {num_stages!r}")
