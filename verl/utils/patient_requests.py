"""Requests to servers of models, which may be away or have too much to do for a moment."""

from __future__ import annotations

import asyncio
import os
from typing import Any

_TRIES = 5
_FIRST_PAUSE_S = 0.5
_NOT_NOW = (429, 502, 503, 504)


def api_headers() -> dict[str, str]:
    """With $VERL_API_KEY, where it is set."""
    key = os.environ.get("VERL_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def replied(http: Any, key: str, url: str, body: Any = None, remedy: str = "") -> Any:
    """What the JSON of a reply says; asked again a few times. Without `body` it is a GET.

    `key` is where the address was configured. ConnectionError: it stays silent. ValueError: it refuses.
    """
    import httpx

    failure = ""
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            reply = await http.request("GET" if body is None else "POST", url, json=body, headers=api_headers())
        except httpx.TransportError as error:
            failure = repr(error)
            continue
        if reply.status_code == 200:
            return reply.json()
        failure = f"status {reply.status_code}: {reply.text[:500]}"
        if reply.status_code not in _NOT_NOW:
            raise ValueError(f"{key}: {url} refuses the request: {failure}")
    raise ConnectionError(f"{key}: {url} does not answer ({_TRIES} tries): {failure}{remedy}")
