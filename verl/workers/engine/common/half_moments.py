"""AdamW's moments kept in bfloat16: half of their memory, while the update stays AdamW's own in float32.

With beta2 = 0.999 a step changes the second moment by about 0.1 %, less than half of bfloat16's spacing (0.4 %):
rounded to the nearest value it would never move again. So moments are rounded up or down at random, in proportion to
how near each is: right on average, with a noise of about 2 % in the step's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements whose moments are in float32 at a time (a larger tensor comes alone).
PORTION = 1 << 25


def portions(sizes: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Names in order, cut into runs of at most `PORTION` elements."""
    run: list[str] = []
    total = 0
    for name, size in sizes:
        if run and total + size > PORTION:
            yield run
            run, total = [], 0
        run.append(name)
        total += size
    if run:
        yield run


def working_bytes(elements: int, largest: int) -> int:
    """What a step takes beside moments of so many elements, of which the largest tensor has `largest`: both moments of
    a portion in float32, and as many random numbers to round them with."""
    return 16 * min(elements, max(largest, PORTION))


class WorkingMoments:
    """The moments of some parameters, in float32 for one step; `states` hold them in between."""

    def __init__(self, states: list[dict[str, Any]]) -> None:
        self._states = states
        self._kept = [state[key] for state in states for key in MOMENTS]
        ends = list(accumulate((value.numel() for value in self._kept), initial=0))
        self._all = torch.empty(ends[-1], dtype=torch.float32, device=self._kept[0].device)
        self._working = [
            self._all[start:end].view_as(value)
            for value, start, end in zip(self._kept, ends[:-1], ends[1:], strict=True)
        ]
        torch._foreach_copy_(self._working, self._kept)
        self._place(self._working)

    def put_back(self, noise: torch.Generator) -> None:
        """Round to bfloat16 in place of what was there before the step."""
        round_at_random(self._all, noise)
        torch._foreach_copy_(self._kept, self._working)
        self._place(self._kept)

    def _place(self, moments: list[torch.Tensor]) -> None:
        values = iter(moments)
        for state in self._states:
            for key in MOMENTS:
                state[key] = next(values)


def round_at_random(values: torch.Tensor, noise: torch.Generator) -> None:
    """float32 `values` to one of their two neighbours in bfloat16, in place: the nearer, the likelier.

    bfloat16 is float32 without its last 16 bits; a random number added to those carries with the right probability.
    """
    bits = values.view(torch.int32)
    bits.add_(torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=noise))
    bits.bitwise_and_(-(1 << 16))
