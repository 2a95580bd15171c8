"""Black-box agents that play a guessing game with the model at an OpenAI endpoint, independent of training.

The secret is a number from 1 to 7, and there are three guesses. After a wrong guess the agent says `higher` or `lower`,
so binary search always succeeds.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

GUESSES = 3
# One connection pool for all sessions.
CLIENT = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1")


async def run_agent(
    base_url: str, prompt: list[Any], request_kwargs: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Play the game with the `openai` client."""
    client, messages = CLIENT.with_options(base_url=f"{base_url}/v1"), list(prompt)
    secret = int(metadata["reward_model"]["ground_truth"])
    for guesses in range(1, GUESSES + 1):
        completion = await client.chat.completions.create(model="policy", messages=messages, **request_kwargs)
        reply = completion.choices[0].message
        number = int(reply.content) if (reply.content or "").strip().isdecimal() else None
        if number == secret:
            return {"reward": 1.0, "guesses": guesses}
        if number is None:
            break
        messages += [reply, {"role": "user", "content": "higher" if secret > number else "lower"}]
    return {"reward": 0.0, "guesses": guesses}


async def run_node(
    base_url: str, prompt: list[Any], request_kwargs: dict[str, Any], metadata: dict[str, Any], program: str
) -> None:
    """Play the game with a JavaScript program in its own process, which posts its reward itself."""
    secret = metadata["reward_model"]["ground_truth"]
    environment = {**os.environ, "BASE_URL": base_url}
    process = await asyncio.create_subprocess_exec("node", str(Path(program)), secret, env=environment)
    try:
        if await process.wait():
            raise RuntimeError(f"{program} ended with exit code {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
