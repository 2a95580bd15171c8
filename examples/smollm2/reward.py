"""The reward of two-step arithmetic: 1 if the last number of an answer is the right one."""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score.gsm8k import extract_solution


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 or 0."""
    found = extract_solution(solution_str, method="flexible")
    return float(found is not None and float(found) == float(ground_truth))
