"""Console lines of a model server: an example request, and requests per second while requests arrive."""

from __future__ import annotations

import json
import logging
import shlex
import threading
from collections.abc import Callable
from types import TracebackType

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["ActivityLog", "activity_line", "example_request"]

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0


def example_request(model: str, has_template: bool | None, needs_key: bool, url: str) -> str:
    """Return a curl command for the server at `url` (`http://host:port/v1`).

    `has_template`: whether the model has a chat template; None: it is a classifier.
    """
    question = "What is 2 + 2?"
    body: dict[str, object]
    if has_template is None:
        path, body = "/classify", {"input": f"{question} 4"}
    elif has_template:
        path, body = "/chat/completions", {"messages": [{"role": "user", "content": question}]}
    else:
        path, body = "/completions", {"prompt": question}
    text = json.dumps({"model": model, **body})
    key = ' -H "Authorization: Bearer $VERL_API_KEY"' if needs_key else ""
    return f"curl -s {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(text)}"


def activity_line(requests: int, tokens: int, unfinished: int, seconds: float) -> str:
    """Return one line for the requests and generated tokens of the last `seconds`."""
    speed = f", {tokens / seconds:.0f} tokens/s" if tokens else ""
    return f"{requests} requests in {seconds:.0f} s ({requests / seconds:.3g}/s){speed}, {unfinished} unfinished"


class ActivityLog:
    """An application that counts POST requests. As a context, it logs a line every ten seconds in which requests
    arrived or tokens were generated."""

    def __init__(self, app: ASGIApp, tokens: Callable[[], int], unfinished: Callable[[], int]) -> None:
        """`tokens()`: generated so far. `unfinished()`: requests in progress. Both are called from a thread."""
        self._app, self._tokens, self._unfinished = app, tokens, unfinished
        self._requests = 0
        self._stopped = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            self._requests += 1
        await self._app(scope, receive, send)

    def __enter__(self) -> ActivityLog:
        threading.Thread(target=self._run, name="activity", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()

    def _run(self) -> None:
        before = self._requests, self._tokens()
        while not self._stopped.wait(_INTERVAL_S):
            now = self._requests, self._tokens()
            if now != before:
                requests, tokens = now[0] - before[0], now[1] - before[1]
                logger.info("%s", activity_line(requests, tokens, self._unfinished(), _INTERVAL_S))
            before = now
