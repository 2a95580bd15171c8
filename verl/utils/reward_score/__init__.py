"""Rule-based rewards: one file per task, selected by the `data_source` of a row. Scorer processes import this package,
so it imports nothing slow."""

from verl.utils.reward_score import code, countdown, gsm8k, math, math_dapo, multiple_choice, qa_em
from verl.utils.reward_score.extraction import last_boxed_only_string, remove_boxed
from verl.utils.reward_score.registry import (
    _select_rm_score_fn,
    default_compute_score,
    known_data_sources,
    register_score,
    score_function,
)

__all__ = [
    "_select_rm_score_fn",
    "code",
    "countdown",
    "default_compute_score",
    "gsm8k",
    "known_data_sources",
    "last_boxed_only_string",
    "math",
    "math_dapo",
    "multiple_choice",
    "qa_em",
    "register_score",
    "remove_boxed",
    "score_function",
]
