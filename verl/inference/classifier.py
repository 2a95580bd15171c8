"""Classifier: batches token sequences from any thread and returns the logits of a sequence classifier."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

__all__ = ["Classifier"]

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
