"""The scoring API on a sequence classifier: /v1/rewards tells a number for each input, /classify its labels."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from typing import Any

from verl.inference.classifier import Classifier
from verl.inference.serving.api_app import ApiApp
from verl.inference.serving.fields import ApiError
from verl.inference.serving.openai_requests import ModelFacts
from verl.inference.serving.parsers import Parsers
from verl.inference.serving.scoring_requests import CLASSIFY, REWARDS, ScoreAsk
from verl.utils.http_server.asgi import Response

__all__ = ["ScoringApp"]


class ScoringApp(ApiApp):
    """Answers with a classifier's logits; what is asked at once by many is computed together."""

    posts = (REWARDS, CLASSIFY, f"/v1{CLASSIFY}")

    def __init__(
        self,
        classifier: Classifier,
        facts: ModelFacts,
        parsers: Parsers[ScoreAsk],
        max_body: int,
        api_key: str | None = None,
    ) -> None:
        super().__init__(facts, max_body, api_key)
        self._classifier, self._parsers = classifier, parsers

    @property
    def _unfinished(self) -> int:
        return self._classifier.unfinished

    async def _post(self, path: str, body: bytes, response: Response) -> None:
        rewards = path == REWARDS
        if rewards and self._classifier.num_labels != 1:
            raise ApiError(
                f"this model has {self._classifier.num_labels} labels; a reward is one number. Use {CLASSIFY}.",
                status=404,
            )
        ask = await self._parsers.parse(path, body, self._facts)
        futures = self._classifier.submit(ask.inputs)
        try:
            logits = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                future.cancel()
        tokens = sum(map(len, ask.inputs))
        entry = self._reward if rewards else self._classes
        told = {
            "id": f"{'reward' if rewards else 'classify'}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": ask.model,
            "data": [{"index": index, **entry(row)} for index, row in enumerate(logits)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        await response.whole(200, told)

    def _reward(self, logits: list[float]) -> dict[str, Any]:
        return {"object": "reward", "reward": logits[0]}

    def _classes(self, logits: list[float]) -> dict[str, Any]:
        """The likeliest label, the probabilities of all (of the one there is: a sigmoid) and what they come from."""
        if len(logits) == 1:
            probs = [1 / (1 + math.exp(-logits[0])) if logits[0] > -700 else 0.0]
        else:
            powers = [math.exp(value - max(logits)) for value in logits]
            probs = [power / sum(powers) for power in powers]
        label = self._classifier.labels[probs.index(max(probs))]
        return {"label": label, "probs": probs, "logits": logits, "num_classes": len(probs)}
