"""An engine that reports other log-probs than those of what it draws from is found out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from verl.workers.rollout.third_party_tokens import PROBE_TOP_TOKENS, check_reported_log_probs

VOCAB = 300
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))


def reporting(distribution: Callable[[float, int], torch.Tensor]) -> Callable[[float, int], dict[int, float]]:
    """An engine that tells log-softmax of these."""

    def top(temperature: float, top_k: int) -> dict[int, float]:
        told = distribution(temperature, top_k).log_softmax(-1)
        values, tokens = told.topk(PROBE_TOP_TOKENS)
        drawn = int(told.argmin())
        return {**dict(zip(tokens.tolist(), values.tolist(), strict=True)), drawn: float(told[drawn])}

    return top


def cut(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    return logits if top_k < 0 else logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)


processed = reporting(lambda temperature, top_k: cut(LOGITS / temperature, top_k))
untruncated = reporting(lambda temperature, top_k: LOGITS / temperature)
raw = reporting(lambda temperature, top_k: LOGITS)


def test_what_is_drawn_from_passes_before_and_after_truncation() -> None:
    assert check_reported_log_probs("e 1", processed, VOCAB, True, torch.float32)
    assert check_reported_log_probs("e 1", untruncated, VOCAB, False, torch.float32)


def test_what_rounds_otherwise_each_time_passes_in_its_own_dtype_alone() -> None:
    generator = torch.Generator().manual_seed(1)

    def rounded(temperature: float, top_k: int) -> torch.Tensor:
        """Between 4 and 8 the values of a bfloat16 are 1/32 apart."""
        return (2 * LOGITS + torch.randint(-1, 2, [VOCAB], generator=generator) / 32) / temperature

    for _ in range(20):
        assert check_reported_log_probs("e 1", reporting(rounded), VOCAB, False, torch.bfloat16)
    with pytest.raises(RuntimeError, match="does not report"):
        all(check_reported_log_probs("e 1", reporting(rounded), VOCAB, False, torch.float32) for _ in range(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("top", "after_truncation", "cause"),
    [
        (raw, True, "apart at temperature 0.5 are reported"),
        (untruncated, True, r"at top_k 5 the probabilities of the 20 .* add up to 0\.\d+"),
        (processed, False, "top_k 5 changes them"),
        (lambda t, k: {token: lp - 1 for token, lp in processed(t, k).items()}, True, "most likely tokens add up to"),
    ],
    ids=["raw", "before truncation", "after truncation", "not normalised"],
)
def test_what_is_not_is_refused_by_name(top: Callable, after_truncation: bool, cause: str, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=rf"^rollout: e 1 does not report .*{cause}"):
        check_reported_log_probs("e 1", top, VOCAB, after_truncation, dtype)


@pytest.mark.parametrize("logits", [torch.zeros(VOCAB), torch.full((VOCAB,), torch.nan)], ids=["alike", "broken"])
def test_weights_that_cannot_tell_are_asked_again_later(logits: torch.Tensor) -> None:
    assert not check_reported_log_probs("e 1", reporting(lambda temperature, top_k: logits), VOCAB, True, torch.float32)
