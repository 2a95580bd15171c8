"""A sequence classifier and its scoring API: /v1/rewards returns one number, /classify probabilities."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from torch import nn

from verl.inference.serving.api import ApiError, create_model_app
from verl.inference.serving.openai_requests import ModelInfo
from verl.inference.serving.parsers import Parsers
from verl.inference.serving.scoring_requests import CLASSIFY, REWARDS, ParsedScoreRequest
from verl.utils.http_server.app import json_response, request_body

__all__ = ["Classifier", "ScoringServer"]

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


# Interval at which the thread checks for `close` while the model is offloaded.
_CLOSE_POLL_S = 0.2
_Item = tuple[list[int], "Future[list[float]]"]


class Classifier:
    """A Hugging Face sequence classifier with its own thread, which computes batches of at most `max_tokens` tokens,
    padding included."""

    def __init__(self, model: nn.Module, max_tokens: int) -> None:
        self._model: Any = model.eval()
        config = self._model.config
        self.num_labels: int = config.num_labels
        self.labels: list[str] = [str(config.id2label.get(label, label)) for label in range(config.num_labels)]
        self._pad = getattr(config.get_text_config(), "pad_token_id", None) or 0
        self._max_tokens = max_tokens
        self._waiting: list[_Item] = []
        self._num_running = 0
        self._changed = threading.Condition()
        self._closing = False
        # Held while a batch is computed, and while the model is offloaded.
        self._model_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="classifier", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Number of waiting and running sequences."""
        return len(self._waiting) + self._num_running

    def submit(self, sequences: Sequence[list[int]]) -> list[Future[list[float]]]:
        """Queue sequences; returns a future of the logits [labels] for each.

        A sequence whose future is cancelled before its batch starts is not computed.
        """
        added: list[_Item] = [(sequence, Future()) for sequence in sequences]
        with self._changed:
            if self._closing:
                raise RuntimeError("the classifier is closed.")
            self._waiting += added
            self._changed.notify()
        return [future for _, future in added]

    def offload(self) -> None:
        """Free the device memory; requests wait until `onload`."""
        self._model_lock.acquire()
        self._device = self._model.device
        self._model.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move the model back to its device."""
        self._model.to(self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the classifier's thread uses another stream
        self._model_lock.release()

    def close(self) -> None:
        """Stop the thread; waiting sequences fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        for _, future in self._waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError("the classifier was closed before this sequence was scored."))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting)
                if self._closing:
                    return
                batch = self._next_batch()
                self._num_running = len(batch)
            if not self._acquire_model():
                self._waiting += batch
                return
            try:
                self._score([item for item in batch if item[1].set_running_or_notify_cancel()])
            finally:
                self._model_lock.release()
            self._num_running = 0

    def _acquire_model(self) -> bool:
        """Lock the model once it is on its device; False if the classifier is closed first."""
        while not self._model_lock.acquire(timeout=_CLOSE_POLL_S):
            if self._closing:
                return False
        return True

    def _next_batch(self) -> list[_Item]:
        """Remove and return a batch: the oldest sequence, and others of similar length to limit padding."""
        first = len(self._waiting[0][0])
        by_similarity = sorted(self._waiting, key=lambda item: abs(len(item[0]) - first))
        batch: list[_Item] = []
        longest = 0
        for item in by_similarity:
            longest = max(longest, len(item[0]))
            if batch and longest * (len(batch) + 1) > self._max_tokens:
                break
            batch.append(item)
        chosen = {id(future) for _, future in batch}
        self._waiting = [item for item in self._waiting if id(item[1]) not in chosen]
        return batch

    def _score(self, batch: list[_Item]) -> None:
        if not batch:
            return
        try:
            logits = self._logits([sequence for sequence, _ in batch]).tolist()
        except Exception as error:  # noqa: BLE001 - raised in the waiting callers
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), row in zip(batch, logits, strict=True):
            future.set_result(row)

    @torch.inference_mode()
    def _logits(self, sequences: list[list[int]]) -> torch.Tensor:
        """[sequences, labels] float32."""
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        width = int(lengths.max())
        ids = torch.tensor([sequence + [self._pad] * (width - len(sequence)) for sequence in sequences])
        mask = torch.arange(width) < lengths[:, None]
        device = self._model.device
        if not hasattr(self._model, "score"):  # an encoder: every token attends to all others, so padding is masked
            return self._model(input_ids=ids.to(device), attention_mask=mask.long().to(device)).logits.float().cpu()
        # A decoder: the last token attends to all others, and not to the padding after it.
        hidden = self._model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(sequences), device=device), (lengths - 1).to(device)]
        return self._model.score(last).float().cpu()
