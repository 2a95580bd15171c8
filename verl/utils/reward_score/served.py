"""Scores of a reward model that lives behind a server: `reward_model.url` (docs/rewards.md)."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from verl.utils.network import request_json

# An event loop has connections of its own.
_clients: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


async def compute_score(solution_str: str, ground_truth: Any, raw_prompt: Any, reward_router_address: str) -> float:
    """What the classifier there says of the prompt's messages and this answer; a text too long loses its beginning."""
    conversation = [*required_prompt(raw_prompt), {"role": "assistant", "content": solution_str}]
    asked = {"input": [conversation], "truncate_prompt_tokens": -1}
    return (await post(reward_router_address, "/v1/rewards", asked))["data"][0]["reward"]


def required_prompt(raw_prompt: Any) -> list[dict[str, Any]]:
    """The messages that are answered, as plain objects."""
    if raw_prompt is None:
        raise ValueError("the row has no raw_prompt: let data.custom_cls keep the messages of its prompts there.")
    return [dict(message) for message in raw_prompt]


async def post(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request; a server that cannot be reached, or has too much to do, is asked again a few times.

    $VERL_API_KEY is sent where it is set. ConnectionError: it stays silent. ValueError: it refuses.
    """
    return await request_json(_client(), "reward_model.url", f"{base_url(address)}{path}", body)


def base_url(address: str) -> str:
    """host:port as a URL; a URL as it is."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def require_server(address: str) -> None:
    """ValueError if nobody answers there."""
    import httpx

    try:
        httpx.get(f"{base_url(address)}/health", timeout=10, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(
            f"reward_model.url: no server answers at {base_url(address)}/health ({error}). Start it"
            " (python -m verl.inference.server --model …), or correct the address."
        ) from error


def _client() -> Any:
    """Of the running loop. Time limits are the reward manager's."""
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False)
    return _clients[loop]
