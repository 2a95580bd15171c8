"""search_agent: a model that searches between its turns until it answers; the last turn is without search."""

from __future__ import annotations

import logging
import time
from typing import Any, ClassVar
from uuid import uuid4

from verl.agent.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register_agent_loop
from verl.agent.search_protocol import STOPS, Action, Information, parse_action
from verl.config import PPOConfig
from verl.search.client import RetrieverError
from verl.search.searcher import Searcher, open_searcher

__all__ = ["SearchAgentLoop"]

TOOL = "search"

logger = logging.getLogger(__name__)


@register_agent_loop("search_agent")
class SearchAgentLoop(AgentLoopBase):
    """One trajectory. All of a process share the searcher: its memory, its connections, its circuit breaker."""

    searcher: ClassVar[Searcher]

    @classmethod
    def init_class(cls, config: PPOConfig, tokenizer: Any, processor: Any, **own: Any) -> None:
        """Open what is searched."""
        super().init_class(config, tokenizer, processor, **own)
        cls.searcher = open_searcher(config.retriever)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Turns until an answer, `max_turns` searches or the end of the room; a failed search costs its own turn."""
        markers, data = self.config.algorithm.state_masking, self.config.data
        told = Information(self.tokenizer, markers.start_state_marker, markers.end_state_marker, data.max_obs_length)
        output = AgentLoopOutput(list(row["prompt_ids"]), [], [], metrics=AgentLoopMetrics(tools={TOOL: _nothing()}))
        request_id = uuid4().hex
        room = self.rollout_config.max_model_len - len(output.prompt_ids)
        sampling_params = sampling_params | {"max_new_tokens": max(1, min(sampling_params["max_new_tokens"], room))}
        for left in range(self.config.max_turns, -1, -1):
            action, ended = await self._turn(request_id, output, sampling_params)
            if ended or action.kind == "answer" or left == 0:
                break
            reply = await self._reply(action, told, output.metrics)
            if len(output.response_ids) + len(reply) >= sampling_params["max_new_tokens"]:
                output.finish_reason = "length"  # no room for a turn that would have read it
                break
            output.response_ids += reply
            output.response_mask += [0] * len(reply)
            output.num_turns += 1
            output.extra_fields.setdefault("turn_names", []).append(action.kind)
        return output

    async def _turn(self, request_id: str, output: AgentLoopOutput, sampling: dict[str, Any]) -> tuple[Action, bool]:
        """The model's next turn, appended; what it does, and whether nothing can follow it."""
        room = sampling["max_new_tokens"] - len(output.response_ids)
        stops = dict.fromkeys([*(sampling.get("stop") or ()), *STOPS])
        answer = await self.server_manager.generate(
            request_id=request_id,
            prompt_ids=output.prompt_ids + output.response_ids,
            sampling_params=sampling
            | {"max_new_tokens": min(room, self.config.data.max_turn_length), "stop": list(stops)},
        )
        output.response_ids += answer.token_ids
        output.response_mask += [1] * len(answer.token_ids)
        output.num_turns += 1
        ended = answer.extra_fields["finish_reason"] == "abort" or not 0 < len(answer.token_ids) < room
        return parse_action(self.tokenizer.decode(answer.token_ids)), ended

    async def _reply(self, action: Action, told: Information, metrics: AgentLoopMetrics) -> list[int]:
        """What the model is told after a turn that was no answer."""
        if action.kind == "invalid":
            metrics.failures["invalid_action"] = metrics.failures.get("invalid_action", 0) + 1
            return told.invalid()
        counts, begin = metrics.tools[TOOL], time.monotonic()
        try:
            (hits,) = await self.searcher.retrieve([action.content], self.config.retriever.topk)
            return told.of(hits)
        except RetrieverError as error:
            logger.warning("a search failed: %s", error)
            metrics.failures[TOOL] = metrics.failures.get(TOOL, 0) + 1
            counts["errors"] += 1
            return told.failed()
        finally:
            seconds = time.monotonic() - begin
            counts["calls"] += 1
            counts["seconds"] += seconds
            metrics.tool_calls += seconds
            metrics.tool_call_counts += 1


def _nothing() -> dict[str, float]:
    return {"calls": 0, "errors": 0, "seconds": 0.0}
