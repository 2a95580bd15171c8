"""Agent loops of `agents.py`; turns, tools and lengths depend on a seed only, so a random model is sufficient."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

# Length of a tool output; its tokens are arbitrary.
TOOL_TOKENS = 16
MIN_LATENCY_S, MAX_LATENCY_S = 0.001, 2.0


def latencies(index: int, sample: int, calls: int) -> list[float]:
    """Seconds of each tool call of a trajectory."""
    rng = random.Random(f"{index}/{sample}")
    return [rng.uniform(MIN_LATENCY_S, MAX_LATENCY_S) for _ in range(calls)]


class _Scripted(AgentLoopBase):
    """Turns of `tokens` sampled tokens with tool calls in between that take `waits` seconds."""

    async def converse(self, sampling: dict[str, Any], row: dict[str, Any], tokens: int, waits: list[float]) -> Any:
        prompt, response, mask, waited = list(row["prompt_ids"]), [], [], 0.0
        sampling = {**sampling, "max_new_tokens": tokens}
        for number in range(len(waits) + 1):
            name = f"{row['uid']}/{row['sample_index']}"
            output = await self.server_manager.generate(
                request_id=name, prompt_ids=[*prompt, *response], sampling_params=sampling
            )
            response += output.token_ids
            mask += [1] * len(output.token_ids)
            if number < len(waits):
                start = time.monotonic()
                await asyncio.sleep(waits[number])
                waited += time.monotonic() - start
                response += range(100, 100 + TOOL_TOKENS)
                mask += [0] * TOOL_TOKENS
        metrics = AgentLoopMetrics(tool_calls=waited, tool_call_counts=len(waits))
        return AgentLoopOutput(prompt, response, mask, num_turns=2 * len(waits) + 1, metrics=metrics)


class SlowTools(_Scripted):
    """`AGENTS_CALLS` tool calls of 1 ms to 2 s, `AGENTS_TOKENS` tokens per turn."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        waits = latencies(int(row["index"]), int(row["sample_index"]), int(os.environ["AGENTS_CALLS"]))
        return await self.converse(sampling_params, row, int(os.environ["AGENTS_TOKENS"]), waits)


class TwoTurns(_Scripted):
    """Two turns of half of the tokens each, with an instantaneous tool call in between."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        return await self.converse(sampling_params, row, int(os.environ["AGENTS_TOKENS"]) // 2, [0.0])


class OneTurn(AgentLoopBase):
    """One turn without tools: measures the overhead of agent loops."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = list(row["prompt_ids"])
        output = await self.server_manager.generate(
            request_id=f"{row['uid']}/{row['sample_index']}", prompt_ids=prompt, sampling_params=sampling_params
        )
        metrics = AgentLoopMetrics(tool_calls=0.0, tool_call_counts=0)
        return AgentLoopOutput(prompt, output.token_ids, [1] * len(output.token_ids), num_turns=1, metrics=metrics)
