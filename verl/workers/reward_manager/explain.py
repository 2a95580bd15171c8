"""Rewards put into words: one sample as text, what could not be scored, and why a whole batch scored 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from verl.utils.reward_score import score_function
from verl.workers.reward_manager.scorer import Sample, Score

# `reward_model.on_error`
POLICIES = {"fail": "the run stops", "zero": "they score 0", "mask": "they score 0 and are not trained on"}

_SHOWN_CHARACTERS = 600


def describe_sample(sample: Sample) -> str:
    """Data source, answer (its end, where the result stands) and ground truth, on lines of their own."""
    text = sample.solution_str
    shown = text if len(text) <= _SHOWN_CHARACTERS else "…" + text[-_SHOWN_CHARACTERS:]
    return (
        f"  data_source: {sample.data_source}\n  answer: {shown!r}\n  ground_truth: {str(sample.ground_truth)[:200]!r}"
    )


def describe_failures(samples: Sequence[Sample], scores: Sequence[Score], on_error: str) -> str:
    """How many samples of a batch could not be scored, by kind, what becomes of them, and the first of them."""
    failed = [row for row, score in enumerate(scores) if score.error is not None]
    kinds = Counter(str(scores[row].kind) for row in failed)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    first = failed[0]
    return (
        f"reward: {len(failed)} of {len(scores)} samples could not be scored: {counts} (reward_model.on_error="
        f"{on_error}: {POLICIES[on_error]}). The first, row {first}: {scores[first].error}\n"
        f"{describe_sample(samples[first])}"
    )


def why_all_zero(samples: Sequence[Sample], own_function: bool) -> str:
    """Whether the answers could not be read, or were read and are wrong; with one sample."""
    if own_function:
        cause = "they come from custom_reward_function; try it on the sample below"
    else:
        extractors = [score_function(sample.data_source).extract for sample in samples]
        read = [
            extract is not None and extract(sample.solution_str) is not None
            for sample, extract in zip(samples, extractors, strict=True)
        ]
        if not any(extractors):
            cause = "the answers are wrong, or not in the format the reward function looks for"
        elif not any(read):
            cause = "no answer was found in any text: the model does not use the format that the prompt must ask for"
        else:
            cause = (
                f"answers were found in {sum(read)} texts, and all are wrong: the task may be too hard for the model"
            )
    return f"reward: all {len(samples)} scores are 0: {cause}. One sample:\n{describe_sample(samples[0])}"
