"""JSON form of node values (`meta["val"]`): tensors without data, and symbolic numbers.

Tensors that share a storage share one again after loading. A symbolic number becomes an unknown of
its own; equal expressions become the same unknown.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from graphopt import _compat
from graphopt.saved.arguments import decode, encode
from graphopt.saved.errors import SavedGraphError

_SYMBOLIC = {torch.SymFloat: "symfloat", torch.SymInt: "symint"}


class ValueEncoder:
    """Encodes the values of one graph.

    Attributes:
        storages: size in bytes of each storage, by the number that encoded tensors refer to.
    """

    def __init__(self) -> None:
        self.storages: list[int] = []
        self._numbers: dict[int, int] = {}
        self._symbols: dict[str, int] = {}

    def encode(self, value: Any) -> Any:
        """The JSON form of a node's value."""
        return encode(value, self._leaf)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, torch.Generator):
            return {"generator": str(value.device)}
        for kind, name in _SYMBOLIC.items():
            if isinstance(value, kind):
                return self._symbol(value, name)
        raise SavedGraphError(f"its value is a {type(value).__name__}, which cannot be saved")

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise SavedGraphError("its value is a sparse or quantized tensor")
        if _compat.has_symbolic_shape(tensor):
            raise SavedGraphError("its value has a shape that depends on data")
        key = _compat.storage_key(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self.storages)
            self.storages.append(tensor.untyped_storage().nbytes())
        described: dict[str, Any] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": str(tensor.device),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "storage": self._numbers[key],
        }
        if tensor.storage_offset():
            described["offset"] = int(tensor.storage_offset())
        flags = {
            "requires_grad": tensor.requires_grad,
            "conj": tensor.is_conj(),
            "neg": tensor.is_neg(),
        }
        described.update({name: True for name, value in flags.items() if value})
        return described

    def _symbol(self, value: Any, kind: str) -> Any:
        constant = _compat.known_number(value)
        if constant is not None:
            return constant
        key = f"{kind} {value.node.expr}"
        return {kind: self._symbols.setdefault(key, len(self._symbols))}


class ValueDecoder:
    """Decodes the values of one graph, in a new fake tensor mode."""

    def __init__(self, storages: list[int]) -> None:
        self._bases = [torch.empty(size, dtype=torch.uint8, device="meta") for size in storages]
        self._symbols: dict[int, Any] = {}

    @cached_property
    def _mode(self) -> Any:
        return _compat.new_fake_mode()

    def decode(self, data: Any) -> Any:
        """The value of a JSON form that `ValueEncoder.encode` returned."""
        return decode(data, self._leaf)

    def _leaf(self, kind: str, content: Any) -> Any:
        if kind == "tensor":
            return self._tensor(**content)
        if kind == "generator":
            return torch.Generator(content)
        if content not in self._symbols:
            self._symbols[content] = self._unknown(kind == "symint")
        return self._symbols[content]

    def _unknown(self, integer: bool) -> Any:
        return _compat.new_unknown(self._mode, integer)

    def _tensor(
        self,
        *,
        dtype: str,
        device: str,
        shape: list[int],
        stride: list[int],
        storage: int,
        offset: int = 0,
        requires_grad: bool = False,
        conj: bool = False,
        neg: bool = False,
    ) -> torch.Tensor:
        base = self._bases[storage].untyped_storage()
        kind = decode({"dtype": dtype}, self._leaf)
        plain = torch.empty(0, dtype=kind, device="meta").set_(base, offset, shape, stride)
        if base.nbytes() != len(self._bases[storage]):
            raise ValueError("a tensor is larger than its storage")
        made = self._made(plain, torch.device(device), conj=conj, neg=neg)
        return made.requires_grad_(requires_grad)

    def _made(
        self, plain: torch.Tensor, device: torch.device, *, conj: bool, neg: bool
    ) -> torch.Tensor:
        return _compat.fake_like(self._mode, plain, device, conj=conj, neg=neg)


class DescriptionDecoder(ValueDecoder):
    """Decodes values only to look at, without slow imports of torch: they cannot be computed
    with, and unknown numbers are zero."""

    def _unknown(self, integer: bool) -> Any:
        return 0 if integer else 0.0

    def _made(
        self, plain: torch.Tensor, device: torch.device, *, conj: bool, neg: bool
    ) -> torch.Tensor:
        return _compat.described_tensor(plain, device)
