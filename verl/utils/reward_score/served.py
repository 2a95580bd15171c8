"""Scores of a reward model on a server: `reward_model.url` (docs/guides/rewards.md)."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from verl.utils.network import request_json

# By event loop: connections cannot be shared between loops.
_clients: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


async def compute_score(solution_str: str, ground_truth: Any, raw_prompt: Any, reward_router_address: str) -> float:
    """The reward model's score of the prompt and this response; too long texts are truncated on the left."""
    conversation = [*required_prompt(raw_prompt), {"role": "assistant", "content": solution_str}]
    body = {"input": [conversation], "truncate_prompt_tokens": -1}
    return (await post(reward_router_address, "/v1/rewards", body))["data"][0]["reward"]


def required_prompt(raw_prompt: Any) -> list[dict[str, Any]]:
    """Return the messages of the prompt as dicts. ValueError: the row has none."""
    if raw_prompt is None:
        raise ValueError("the row has no raw_prompt (the prompt's messages). Return it in data.custom_cls.")
    return [dict(message) for message in raw_prompt]


async def post(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST a request and return the JSON response; retried if the server is unreachable or overloaded.

    $VERL_API_KEY is sent if it is set. ConnectionError: the server is unreachable. ValueError: it rejects the request.
    """
    return await request_json(_client(), "reward_model.url", f"{base_url(address)}{path}", body)


def base_url(address: str) -> str:
    """The URL of a host:port or of a URL, without trailing slash."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def require_server(address: str) -> None:
    """Raise ValueError if no server answers at the address."""
    import httpx

    try:
        httpx.get(f"{base_url(address)}/health", timeout=10, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(
            f"reward_model.url: no server answers at {base_url(address)}/health ({error}). Start it"
            " (python -m verl.inference.server --model …), or correct the address."
        ) from error


def _client() -> Any:
    """The client of the running event loop, without a timeout: the reward manager has one."""
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False)
    return _clients[loop]
