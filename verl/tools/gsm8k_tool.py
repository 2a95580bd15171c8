"""Gsm8kTool: the model submits an answer to a GSM8K question, reads whether it is right, and may try again."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score.gsm8k import answer_of, compute_score


class Gsm8kTool(BaseTool):
    """`create_kwargs: {ground_truth: …}` of the row contains the correct answer. The reward is the best score."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._truths: dict[str, str] = {}
        self._best: dict[str, float] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        answer = {"type": "string", "description": "The answer to the question: a number."}
        function = {
            "name": "calc_gsm8k_reward",
            "description": "Hand in an answer to the question and hear whether it is right.",
            "parameters": {"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
        }
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            raise ValueError(f"extra_info.tools_kwargs.{self.name}.create_kwargs.ground_truth is missing in the row")
        instance_id = instance_id or str(uuid4())
        self._truths[instance_id], self._best[instance_id] = str(ground_truth), 0.0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, dict[str, Any]]:
        answer = str(parameters["answer"]).removeprefix("####").strip()
        score = compute_score(answer_of(answer), self._truths[instance_id])
        self._best[instance_id] = max(score, self._best[instance_id])
        return ToolResponse(text=f"{answer} is {'right' if score else 'wrong'}."), None, {"score": score}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._best[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._truths[instance_id], self._best[instance_id]
