"""Does an engine of other make report log-probs of what it draws from? Found out by asking it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

__all__ = ["PROBED_TOKENS", "PROBE_PROMPT", "require_log_probs_as_drawn"]

PROBED_TOKENS = 20
PROBE_PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)
_TEMPERATURES = (1.0, 0.5, 0.05)
_TOP_K = 5
# Of differences of log-probs, relative.
_TOLERANCE = 0.02
# Engines compute them in float32 from logits in their dtype, which round otherwise from one request to the next: by so
# many of its steps at 1.
_ROUNDING = 16

Top = Callable[[float, int], Mapping[int, float]]
"""(temperature, top_k or -1) → log-probs of (at least) the `PROBED_TOKENS` likeliest tokens after `PROBE_PROMPT`."""


def require_log_probs_as_drawn(engine: str, top: Top, vocab: int, after_truncation: bool, dtype: torch.dtype) -> bool:
    """Raise RuntimeError unless what `engine` (name and version), which computes in `dtype`, reports is at the
    temperature asked for.

    And, with top-k, of what top-k leaves if it reports `after_truncation`, else of everything. False: the model's
    weights cannot tell, for its next tokens are all alike or not even numbers.
    """
    noise = _ROUNDING * torch.finfo(dtype).eps
    found = {temperature: _likeliest(top(temperature, -1)) for temperature in _TEMPERATURES}
    warm = found[1.0]
    if not all(math.isfinite(value) for value in warm.values()) or _spread(warm) < 0.01 + noise:
        return False
    for temperature, values in found.items():
        _require_scaled(engine, warm, values, temperature, noise)
        _require_normalised(engine, values, vocab, f"temperature {temperature}")
    kept = {token: value for token, value in _likeliest(top(1.0, _TOP_K)).items() if value > -1e4}
    if after_truncation:
        _require_normalised(engine, kept, len(kept), f"top_k {_TOP_K}")
    elif any(abs(value - warm[token]) > _TOLERANCE + noise for token, value in kept.items() if token in warm):
        _refuse(engine, f"top_k {_TOP_K} changes them, and it is said to be left out of them")
    return True


def _likeliest(values: Mapping[int, float]) -> dict[int, float]:
    """Engines tell the drawn token too, which may be any."""
    return dict(sorted(values.items(), key=lambda told: -told[1])[:PROBED_TOKENS])


def _spread(values: Mapping[int, float]) -> float:
    return max(values.values()) - min(values.values())


def _require_scaled(
    engine: str, warm: Mapping[int, float], values: Mapping[int, float], temperature: float, noise: float
) -> None:
    """A log-prob is logit / temperature − a constant: differences grow as 1 / temperature."""
    shared = sorted(warm.keys() & values.keys(), key=warm.__getitem__)
    low, high = shared[0], shared[-1]
    expected, here = (warm[high] - warm[low]) / temperature, values[high] - values[low]
    if abs(here - expected) > _TOLERANCE * max(1.0, expected) + noise / temperature:
        _refuse(engine, f"two tokens {expected:.4f} apart at temperature {temperature} are reported {here:.4f} apart")


def _require_normalised(engine: str, values: Mapping[int, float], candidates: int, where: str) -> None:
    """Probabilities of all candidates add up to 1; of those that are not told, each is at most the least told one."""
    told = sum(math.exp(value) for value in values.values())
    rest = (candidates - len(values)) * math.exp(min(values.values()))
    if not 1 - rest - _TOLERANCE <= told <= 1 + _TOLERANCE:
        _refuse(engine, f"at {where} the probabilities of the {len(values)} likeliest tokens add up to {told:.4f}")


def _refuse(engine: str, found: str) -> None:
    raise RuntimeError(
        f"rollout: {engine} does not report the log-probs of what it draws from: {found}. Ratios against them would be"
        " wrong. Use a tested version (docs/engines.md), or rollout.name=native."
    )
