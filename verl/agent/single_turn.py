"""SingleTurnAgentLoop: one model call per trajectory.

The trainer sends rows of this loop directly to the engines, with the same columns (`WorkerGroups.is_single_turn`). The
loop itself runs with a user's loop worker class, and in `AgentLoopWorker.generate_sequences`.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.agent.loop import AgentLoopBase, AgentLoopOutput, register_agent_loop

__all__ = ["SingleTurnAgentLoop"]


@register_agent_loop("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Generates a response to the tokenized prompt of the dataset."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt_ids = list(row["prompt_ids"])
        output = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
        )
