"""Experts of the tokens of a row [tokens, layers, k], kept per sampled token like log-probs and versions.

The entry of a sampled token holds the experts of the input tokens of the forward pass that sampled it: the whole prompt
for the first token, the previous token for each later one. So row i of the joined entries belongs to the pass that
sampled token i + 1, under the weights of that token's version, even if its KV was recomputed later with newer weights.
No torch; numpy is imported inside functions, because the scheduler must import without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ExpertEntry", "combine_calls", "join_entries", "join_pieces", "split_entries", "unknown_experts"]

ExpertEntry: TypeAlias = "np.ndarray | None"
"""The entry of one sampled token [tokens, layers, k]; None: not known."""


def unknown_experts(like: np.ndarray, count: int) -> np.ndarray:
    """[count, layers, k] in the type of `like`, filled with its largest value, which is no expert's id."""
    import numpy as np

    return np.full((count, *like.shape[1:]), np.iinfo(like.dtype).max, dtype=like.dtype)


def split_entries(experts: np.ndarray | None, prompt: int, tokens: int) -> list[ExpertEntry]:
    """The entries of `tokens` sampled tokens after a prompt of `prompt` tokens; None for those beyond `experts`."""
    if experts is None:
        return [None] * tokens
    ends = range(prompt, prompt + tokens)
    return [experts[0 if end == prompt else end - 1 : end] if end <= len(experts) else None for end in ends]


def join_entries(entries: Sequence[ExpertEntry], prompt: int, first: int = 0) -> np.ndarray | None:
    """The rows of consecutive entries, beginning with that of sampled token `first`; None if no entry is known."""
    import numpy as np

    like = next((entry for entry in entries if entry is not None), None)
    if like is None:
        return None
    sizes = (prompt if first + place == 0 else 1 for place in range(len(entries)))
    rows = [unknown_experts(like, n) if entry is None else entry for entry, n in zip(entries, sizes, strict=True)]
    return np.concatenate(rows)


def join_pieces(first: np.ndarray | None, count: int, then: np.ndarray | None) -> np.ndarray | None:
    """`first`, filled up with unknown experts to `count` rows, followed by `then`; None if both are None."""
    import numpy as np

    if first is None and then is None:
        return None
    like = then if first is None else first
    assert like is not None
    known = like[:0] if first is None else first[:count]
    rows = [known, unknown_experts(like, count - len(known)), like[:0] if then is None else then]
    return np.concatenate(rows)


def combine_calls(earlier: np.ndarray | None, later: np.ndarray | None, start: int) -> np.ndarray | None:
    """Experts of a row after a call whose first sampled token is at `start`.

    From row `start - 1` on, the later call's rows are used. Before that, the earlier rows are kept, as they were when
    their tokens were sampled; the later call only adds rows that no earlier call has.
    """
    import numpy as np

    if earlier is None or later is None:
        return earlier if later is None else later
    return np.concatenate([earlier[: start - 1], later[min(len(earlier), start - 1) :]])
