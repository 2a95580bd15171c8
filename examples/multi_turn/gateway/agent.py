"""Black-box agents: they play a guessing game with whoever answers at an address, and know nothing of training.

The secret is a number from 1 to 7, and there are three guesses. After a wrong one the agent says `higher` or `lower`:
who halves what is left always finds it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

GUESSES = 3
# One set of connections for all sessions.
CLIENT = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1")


async def run_agent(
    base_url: str, prompt: list[Any], request_kwargs: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """With the `openai` client."""
    client, messages = CLIENT.with_options(base_url=f"{base_url}/v1"), list(prompt)
    secret = int(metadata["reward_model"]["ground_truth"])
    for guesses in range(1, GUESSES + 1):
        answer = await client.chat.completions.create(model="policy", messages=messages, **request_kwargs)
        said = answer.choices[0].message
        number = int(said.content) if (said.content or "").strip().isdecimal() else None
        if number == secret:
            return {"reward": 1.0, "guesses": guesses}
        if number is None:
            break
        messages += [said, {"role": "user", "content": "higher" if secret > number else "lower"}]
    return {"reward": 0.0, "guesses": guesses}


async def run_node(
    base_url: str, prompt: list[Any], request_kwargs: dict[str, Any], metadata: dict[str, Any], program: str
) -> None:
    """The same game in JavaScript, in a process of its own, which posts its reward itself."""
    secret = metadata["reward_model"]["ground_truth"]
    environment = {**os.environ, "BASE_URL": base_url}
    process = await asyncio.create_subprocess_exec("node", str(Path(program)), secret, env=environment)
    try:
        if await process.wait():
            raise RuntimeError(f"{program} ended with exit code {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
