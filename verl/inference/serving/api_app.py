"""ApiApp: what the APIs of served models share: the key, /health, /v1/models, limits on bodies, errors in JSON."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from verl.inference.serving.fields import ApiError
from verl.inference.serving.openai_requests import ModelFacts
from verl.utils.http_server.asgi import Gone, Receive, Response, Send, headers_of, read_body, while_there

__all__ = ["ApiApp"]

logger = logging.getLogger(__name__)


class ApiApp(ABC):
    """An ASGI app that answers what is posted to `posts`. With an `api_key`, only who sends it is answered."""

    posts: ClassVar[tuple[str, ...]]

    def __init__(self, facts: ModelFacts, max_body: int, api_key: str | None) -> None:
        self._facts, self._max_body, self._api_key = facts, max_body, api_key
        self._since = int(time.time())

    @abstractmethod
    async def _post(self, path: str, body: bytes, response: Response) -> None:
        """Answer a body that was sent to one of `posts`."""

    @property
    @abstractmethod
    def _unfinished(self) -> int:
        """Requests that wait or are worked on."""

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        response = Response(send)
        try:
            await self._answer(scope["method"], scope["path"].rstrip("/"), headers, receive, response)
        except Gone:
            return
        except ApiError as error:
            await response.whole(error.status, error.content)
        except asyncio.CancelledError:
            logger.info("a request was cut off: the server stops")
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if response.begun:
                raise
            failed = ApiError("the server failed; its log says how.", status=500)
            await response.whole(failed.status, failed.content)

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], receive: Receive, response: Response
    ) -> None:
        if path == "/health" and method == "GET":
            return await response.whole(200, {"status": "ok", "unfinished_requests": self._unfinished})
        self._check_key(headers)
        if path in self.posts:
            _check_method(method, path, "POST")
            _check_type(headers.get("content-type", ""))
            too_large = ApiError(f"the body is larger than {self._max_body} bytes (--max-body-mb).", status=413)
            body = await read_body(headers, receive, self._max_body, too_large)
            return await while_there(self._post(path, body, response), receive)
        if path == "/v1/models" or path.startswith("/v1/models/"):
            _check_method(method, path, "GET")
            return await response.whole(200, self._models(path.removeprefix("/v1/models").lstrip("/")))
        known = ", ".join(("/health", "/v1/models", *self.posts))
        raise ApiError(f"there is no {method} {path}. There are {known}.", status=404)

    def _check_key(self, headers: dict[str, str]) -> None:
        if self._api_key is None:
            return
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise ApiError("Incorrect API key provided.", status=401, code="invalid_api_key")

    def _models(self, name: str) -> dict[str, Any]:
        told = {"object": "model", "created": self._since, "owned_by": "verl"}
        told["max_model_len"] = self._facts.max_model_len
        entries = [{"id": known, **told} for known in self._facts.names]
        if not name:
            return {"object": "list", "data": entries}
        found = next((entry for entry in entries if entry["id"] == name), None)
        if found is None:
            raise ApiError(f"The model {name!r} does not exist.", "model", 404, "model_not_found")
        return found


def _check_method(method: str, path: str, wanted: str) -> None:
    if method != wanted:
        raise ApiError(f"{method} {path}: use {wanted}.", status=405)


def _check_type(content_type: str) -> None:
    # A page in somebody's browser can send a form to this address, but not JSON.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(f"Content-Type is {content_type!r}. Send the request as application/json.")
