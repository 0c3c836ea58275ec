"""English text that comes with Python: the help topics of `pydoc`, as character numbers."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor


class Text:
    """The text and its alphabet.

    Attributes:
        alphabet: every character that occurs, sorted; a character's number is its position.
        numbers: the whole text, int64, one number per character.
    """

    def __init__(self) -> None:
        content = "\n\n".join(topics[name] for name in sorted(topics))
        self.alphabet = "".join(sorted(set(content)))
        number_of = {character: number for number, character in enumerate(self.alphabet)}
        self.numbers = torch.tensor([number_of[character] for character in content])

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and next-character targets, both int64 of shape (size, length)."""
        starts = torch.randint(len(self.numbers) - length, (size,), generator=generator)
        windows = torch.stack([self.numbers[start : start + length + 1] for start in starts])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def decode(self, numbers: Tensor) -> str:
        """The characters of a one-dimensional tensor of numbers."""
        return "".join(self.alphabet[number] for number in numbers.tolist())
