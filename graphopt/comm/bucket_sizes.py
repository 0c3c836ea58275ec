"""After how many bytes a bucket of gradients closes.

Where each bucket has an update of its own, which can wait until the next forward wants it, all
buckets are of one size. Where all updates wait for the last gradient, as with clipping by the norm
of all, communication ends with the step; the link idles before the first bucket and compute after
the last, so these are small, and those between them may be larger:

    one size    ███ ███ ███ ███ ███ ███ ███ ███ ███
    growing     ███ ████ ██████ ██████ ████ ███
"""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_BUCKET_BYTES = 2**18
"""Below that the time of a collective no longer depends on its size."""

GROWTH = 1.5
"""How many times as large as the one before a bucket may be. A link that needs for all gradients
so many times what the backward takes never idles: the next bucket is full before it has sent the
one before. That is one as fast as the whole step, whose backward takes two thirds."""


@dataclass(frozen=True)
class BucketSizes:
    """Limits of buckets, in bytes.

    Attributes:
        first: after which the first bucket closes at the latest.
        ends: after which others do; if they grow, the first and the last.
        most: after which the largest does.
        growth: how many times as large as the one before a bucket may be, and as the one after.
    """

    first: int
    ends: int
    most: int
    growth: float = 1.0

    def at(self, before: int, left: int) -> int:
        """Of a bucket that begins where so many bytes have gone by and so many are left."""
        if self.growth == 1.0:
            return min(self.ends, self.most)
        step = self.growth - 1.0
        size = min(self.ends + step * before, (self.ends + step * left) / self.growth)
        return min(max(SMALLEST_BUCKET_BYTES, int(size)), self.most)
