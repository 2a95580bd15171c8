"""The reward: 1 for the right number after `####`, 0.1 for a wrong number in that format, 0 without one.

`custom_reward_function.path=reward.py` selects it. It is called with every finished response, in processes of its own:
an exception or a slow call affects only that response. `python test_reward.py` tests it.
"""

from __future__ import annotations

import re
from typing import Any

from verl.utils.reward_score import register_score

NUMBER = re.compile(r"####\s*(-?\d+)")


def right_answer(ground_truth: str) -> str:
    """A response with the full score: `verl check` tries the reward function with it."""
    return f"#### {ground_truth}"


@register_score("my_task", answer=right_answer)
def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return the score of a response. `solution_str`: its text, of all turns; `extra_info`: that column of the row."""
    numbers = NUMBER.findall(solution_str)
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1] == ground_truth else 0.1
