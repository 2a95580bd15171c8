"""The scoring API of a sequence classifier: /v1/rewards returns one number, /classify probabilities."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from verl.inference.classifier import Classifier
from verl.inference.serving.api import ApiError, create_model_app
from verl.inference.serving.openai_requests import ModelInfo
from verl.inference.serving.parsers import Parsers
from verl.inference.serving.scoring_requests import CLASSIFY, REWARDS, ParsedScoreRequest
from verl.utils.http_server.app import json_response, request_body

__all__ = ["ScoringServer"]

_ENTRY_BYTES = 64  # approximate JSON size of one label


class ScoringServer:
    """Serves a classifier; inputs of concurrent requests are batched."""

    def __init__(self, classifier: Classifier, model_info: ModelInfo, parsers: Parsers[ParsedScoreRequest]) -> None:
        self._classifier, self._model_info, self._parsers = classifier, model_info, parsers

    def app(self, max_body_bytes: int, api_key: str | None = None) -> ASGIApp:
        routes = [Route(REWARDS, self._rewards, methods=["POST"])]
        routes += [Route(path, self._classify, methods=["POST"]) for path in (CLASSIFY, f"/v1{CLASSIFY}")]
        return create_model_app(
            routes, lambda: self._model_info, lambda: self._classifier.unfinished, max_body_bytes, api_key
        )

    async def _rewards(self, request: Request) -> Response:
        labels = self._classifier.num_labels
        if labels != 1:
            raise ApiError(f"this model has {labels} labels; a reward is one number. Use {CLASSIFY}.", status=404)
        parsed, logits = await self._score(request)
        return await _response("reward", parsed, [{"object": "reward", "reward": row[0]} for row in logits])

    async def _classify(self, request: Request) -> Response:
        parsed, logits = await self._score(request)
        return await _response("classify", parsed, [self._class_probs(row) for row in logits])

    async def _score(self, request: Request) -> tuple[ParsedScoreRequest, list[list[float]]]:
        parsed = await self._parsers.parse(request.scope["path"], request_body(request), self._model_info)
        futures = self._classifier.submit(parsed.inputs)
        try:
            return parsed, await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                future.cancel()

    def _class_probs(self, logits: list[float]) -> dict[str, Any]:
        """The most likely label and the probabilities of all labels: softmax, or a sigmoid if there is only one."""
        if len(logits) == 1:
            probs = [1 / (1 + math.exp(-logits[0])) if logits[0] > -700 else 0.0]
        else:
            powers = [math.exp(value - max(logits)) for value in logits]
            probs = [power / sum(powers) for power in powers]
        label = self._classifier.labels[probs.index(max(probs))]
        return {"label": label, "probs": probs, "logits": logits, "num_classes": len(probs)}


async def _response(kind: str, parsed: ParsedScoreRequest, entries: list[dict[str, Any]]) -> Response:
    tokens = sum(map(len, parsed.inputs))
    content = {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": parsed.model,
        "data": [{"index": index, **entry} for index, entry in enumerate(entries)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return await json_response(
        lambda: content, sum(_ENTRY_BYTES * (1 + len(entry.get("probs", ()))) for entry in entries)
    )
