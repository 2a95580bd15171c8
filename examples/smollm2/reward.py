"""The reward of two-step arithmetic: 1 if the last number of a response is correct."""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score.gsm8k import extract_solution


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return 1.0 if the last number of the response equals `ground_truth`, else 0.0."""
    answer = extract_solution(solution_str, method="flexible")
    return float(answer is not None and float(answer) == float(ground_truth))
