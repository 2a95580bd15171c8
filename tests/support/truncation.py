"""Reference implementation of top-k, top-p and min-p sampling in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence


def drawn_probs(scores: Sequence[float], top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> dict[int, float]:
    """Token → probability of the tokens that can be sampled; `scores` are logits divided by the temperature.

    Top-k is applied first. A remaining token is kept if the more likely ones have less than `top_p` in total and it has
    at least `min_p` times the highest probability. The most likely token is always kept.
    """
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    order = order[:top_k] if top_k > 0 else order
    weights = {token: math.exp(scores[token] - scores[order[0]]) for token in order}
    total, before, kept_weights = sum(weights.values()), 0.0, {}
    for token, weight in weights.items():
        if not kept_weights or ((top_p >= 1 or before < top_p * total) and weight >= min_p):
            kept_weights[token] = weight
        before += weight
    return {token: weight / sum(kept_weights.values()) for token, weight in kept_weights.items()}
