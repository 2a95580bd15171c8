"""SingleTurnAgentLoop: one question, one answer; with `rollout.mode=async` what `sync` does with a whole batch."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.agent.loop import AgentLoopBase, AgentLoopOutput

__all__ = ["SingleTurnAgentLoop"]


class SingleTurnAgentLoop(AgentLoopBase):
    """Answers the prompt as the dataset has tokenised it."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt_ids = list(row["prompt_ids"])
        answer = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=answer.token_ids,
            response_mask=[1] * len(answer.token_ids),
            response_logprobs=answer.log_probs,
            num_turns=2,
        )
