"""Gsm8kInteraction: a teacher that scores the answer to a GSM8K question and asks for another one if it is wrong."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score.gsm8k import compute_score


class Gsm8kInteraction(BaseInteraction):
    """`interaction_kwargs: {name: gsm8k, ground_truth: …}` of the row contains the correct answer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, str] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        if ground_truth is None:
            raise ValueError("extra_info.interaction_kwargs.ground_truth is missing in the row")
        instance_id = instance_id or str(uuid4())
        self._truths[instance_id] = str(ground_truth)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answer = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        score = compute_score(str(answer or ""), self._truths[instance_id], method="flexible")
        if score:
            return True, "Your answer is right.", score, {}
        return False, "Your answer is wrong. Think it through again and give another one.", score, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._truths[instance_id]
