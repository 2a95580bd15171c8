"""Agents for `agents.py`: their turns, tools and lengths are decided by a seed, so that a random model does."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

# What the environment says; any tokens of the vocabulary.
TOOL_TOKENS = 16
SHORTEST_S, LONGEST_S = 0.001, 2.0


def latencies(index: int, sample: int, calls: int) -> list[float]:
    """Seconds of each tool call of a trajectory."""
    draw = random.Random(f"{index}/{sample}")
    return [draw.uniform(SHORTEST_S, LONGEST_S) for _ in range(calls)]


class _Scripted(AgentLoopBase):
    """Turns of `tokens` sampled tokens with tools between them that answer after so many seconds."""

    async def converse(self, sampling: dict[str, Any], row: dict[str, Any], tokens: int, waits: list[float]) -> Any:
        prompt, response, mask, waited = list(row["prompt_ids"]), [], [], 0.0
        sampling = {**sampling, "max_new_tokens": tokens}
        for number in range(len(waits) + 1):
            name = f"{row['uid']}/{row['sample_index']}"
            said = await self.server_manager.generate(
                request_id=name, prompt_ids=[*prompt, *response], sampling_params=sampling
            )
            response += said.token_ids
            mask += [1] * len(said.token_ids)
            if number < len(waits):
                start = time.monotonic()
                await asyncio.sleep(waits[number])
                waited += time.monotonic() - start
                response += range(100, 100 + TOOL_TOKENS)
                mask += [0] * TOOL_TOKENS
        metrics = AgentLoopMetrics(tool_calls=waited, tool_call_counts=len(waits))
        return AgentLoopOutput(prompt, response, mask, num_turns=2 * len(waits) + 1, metrics=metrics)


class SlowTools(_Scripted):
    """`AGENTS_CALLS` calls of 1 ms to 2 s each, `AGENTS_TOKENS` tokens a turn."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        waits = latencies(int(row["index"]), int(row["sample_index"]), int(os.environ["AGENTS_CALLS"]))
        return await self.converse(sampling_params, row, int(os.environ["AGENTS_TOKENS"]), waits)


class TwoTurns(_Scripted):
    """Half of the tokens, a tool that answers at once, the other half."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        return await self.converse(sampling_params, row, int(os.environ["AGENTS_TOKENS"]) // 2, [0.0])


class OneTurn(AgentLoopBase):
    """One answer of the model and no tool: what the agent path costs by itself."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = list(row["prompt_ids"])
        output = await self.server_manager.generate(
            request_id=f"{row['uid']}/{row['sample_index']}", prompt_ids=prompt, sampling_params=sampling_params
        )
        metrics = AgentLoopMetrics(tool_calls=0.0, tool_call_counts=0)
        return AgentLoopOutput(prompt, output.token_ids, [1] * len(output.token_ids), num_turns=1, metrics=metrics)
