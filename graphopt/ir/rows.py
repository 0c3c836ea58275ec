"""Division of a tensor into rows, of which each rank owns some.

A tensor is cut into rows, as DTensor cuts it: the first rank *owns* the first rows, and so on, and
the last one may own fewer. What a rank *holds* is a window of the flattened tensor, with its rows
in it, that begins at a multiple of 64 elements, and ends at one or at the tensor's end: kernels
round the elements behind the last full vector otherwise, so that only at such cuts elementwise
operators give the bits that they give of the whole tensor.

    whole      0 ············ 330 ············ 660 ············ 990     990 elements, 3 rows
    owned      [ rank 0      )[ rank 1       )[ rank 2        )
    windows    [ 0 ········ 414)
                       [ 320 ············· 734)                          all of one length
                                      [ 576 ················· 990)

Where rows end at multiples of 64 anyway, windows are what the ranks own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

ALIGNED = 64
"""The multiple of elements at which tensors are cut."""


@dataclass(frozen=True)
class RowShards:
    """The division of a tensor into rows over ranks.

    Attributes:
        shape: of the whole tensor.
        ranks: how many there are.
    """

    shape: tuple[int, ...]
    ranks: int

    @cached_property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def row(self) -> int:
        """The number of elements of a row."""
        return math.prod(self.shape[1:])

    @cached_property
    def rows(self) -> int:
        """The number of rows that each rank owns; the last ranks may own fewer."""
        return -(-self.shape[0] // self.ranks)

    @cached_property
    def is_even(self) -> bool:
        """True if all windows are adjacent and equal what the ranks own."""
        return self.shape[0] % self.ranks == 0 and self.rows * self.row % ALIGNED == 0

    @cached_property
    def owns(self) -> tuple[range, ...]:
        """The range of elements that each rank owns."""
        cuts = [min(rank * self.rows, self.shape[0]) * self.row for rank in range(self.ranks + 1)]
        return tuple(range(a, b) for a, b in pairwise(cuts))

    @cached_property
    def length(self) -> int:
        """The number of elements of a window."""
        size = self.rows * self.row
        if self.is_even:
            return size
        tail = self.numel % ALIGNED
        return min(tail - (-(size + ALIGNED - 1) // ALIGNED) * ALIGNED, self.numel)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first element of each rank's window."""
        last = self.numel - self.length
        return tuple(min(owns.start // ALIGNED * ALIGNED, last) for owns in self.owns)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first owned element of each rank, relative to its window."""
        pairs = zip(self.owns, self.starts, strict=True)
        return tuple(min(owns.start - start, self.length) for owns, start in pairs)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of elements that each rank owns."""
        return tuple(map(len, self.owns))

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of the rows that a rank owns."""
        return (self.lengths[rank] // self.row if self.row else 0, *self.shape[1:])
