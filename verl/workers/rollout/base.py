"""BaseRollout: an engine answers requests; whole batches and streams of samples are written on top, once."""

from __future__ import annotations

import asyncio
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.types.request import Output, Request
from verl.types.weights import Manifest
from verl.utils.progress import counted
from verl.utils.weight_fingerprint import tensor_fingerprint
from verl.workers.rollout.output import assemble_outputs
from verl.workers.rollout.prompts import requests_from_prompts, sampling_params

__all__ = ["PAUSE_MODES", "RELEASE_TAGS", "BaseRollout"]

PAUSE_MODES = ("finish", "keep", "abort")
RELEASE_TAGS = ("weights", "kv_cache")


class BaseRollout(ABC):
    """A rollout engine. Engines implement the request primitive and the weight hand-over; the rest is here.

    Every method may be called from any thread.
    """

    config: RolloutConfig
    weight_dtype: torch.dtype
    """Floating-point type of the engine's weights; fingerprints are taken in it."""
    eos_token_ids: frozenset[int]
    pad_token_id: int

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights that generate now."""

    # ---------------------------------------------------------------- requests: the primitive

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        """Queue requests, all at once; a cancelled future aborts its request."""

    async def generate(self, request: Request) -> Output:
        """The answer to one request. Cancelling the awaiting task aborts it."""
        return await asyncio.wrap_future(self.submit([request])[0])

    @abstractmethod
    def abort(self, ids: Iterable[str] | None = None) -> None:
        """End these requests (None: all) at the next token; their outputs carry what there is, reason `abort`."""

    @abstractmethod
    def pause_generation(self, mode: str = "keep") -> None:
        """Stop sampling, and return when it has stopped; later requests wait for `resume_generation`.

        `finish` completes what was submitted before, `keep` leaves it where it is, `abort` ends it with what there is.
        """

    @abstractmethod
    def resume_generation(self) -> None:
        """Go on after a pause."""

    # ---------------------------------------------------------------- batches

    def generate_sequences(
        self, prompts: DataProto, on_finished: Callable[[int, Output], None] | None = None, **sampling_overrides: Any
    ) -> DataProto:
        """One answer per row, rows in order. `pad_to_max=True` pads responses to max_new_tokens.

        `on_finished(row, output)` is told of each as it is finished, in the engine's thread: it must be quick.

        Reads `input_ids`, `attention_mask` [batch, prompt]; `uid`, `sample_index`; and of meta_info `step`, `seed`,
        `validate`, `eos_token_id`, `pad_token_id`, `pad_to_max` and sampling parameters.
        """
        requests, shape = self._requests(prompts, sampling_overrides)
        futures = counted(self.submit(requests), len(requests))
        if on_finished is not None:
            for row, future in enumerate(futures):
                future.add_done_callback(partial(_tell, on_finished, row))
        try:
            outputs = [future.result() for future in futures]
        finally:
            # One that failed fails the call; the others must not go on for nobody.
            self.abort([request.id for request, future in zip(requests, futures, strict=True) if not future.done()])
        return assemble_outputs(prompts.batch["input_ids"], prompts.batch["attention_mask"], outputs, **shape)

    def stream(self, prompts: DataProto, **sampling_overrides: Any) -> Iterator[tuple[int, DataProto]]:
        """(row, its sample as a batch of one) as each is finished. Closing the iterator aborts what is left."""
        requests, shape = self._requests(prompts, sampling_overrides)
        futures = counted(self.submit(requests), len(requests))
        return self._as_finished(prompts, requests, futures, shape)

    def _as_finished(
        self, prompts: DataProto, requests: list[Request], futures: list[Future[Output]], shape: dict[str, Any]
    ) -> Iterator[tuple[int, DataProto]]:
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        for row, future in enumerate(futures):
            future.add_done_callback(partial(_put_row, finished, row))
        try:
            for _ in futures:
                row = finished.get()
                tensors, here = prompts.batch, slice(row, row + 1)
                output = futures[row].result()
                yield (
                    row,
                    assemble_outputs(tensors["input_ids"][here], tensors["attention_mask"][here], [output], **shape),
                )
        finally:
            self.abort([request.id for request, future in zip(requests, futures, strict=True) if not future.done()])

    def _requests(self, prompts: DataProto, overrides: dict[str, Any]) -> tuple[list[Request], dict[str, Any]]:
        """The rows as requests, and how their outputs are to be padded."""
        meta = prompts.meta_info
        pad_to_max = overrides.pop("pad_to_max", meta.get("pad_to_max", False))
        params = sampling_params(self.config, meta, self.eos_token_ids, **overrides)
        seed = self.config.seed if meta.get("seed") is None else int(meta["seed"])
        pad = self.pad_token_id if meta.get("pad_token_id") is None else int(meta["pad_token_id"])
        shape = {
            "pad_token_id": pad,
            "response_length": params.max_new_tokens if pad_to_max else None,
            # Nobody learns from validation's answers, and their parameters are others.
            "with_drawn": params.reshaped and not meta.get("validate"),
        }
        return requests_from_prompts(prompts, params, seed), shape

    # ---------------------------------------------------------------- weights

    @abstractmethod
    def begin_update(self, version: int, manifest: Manifest | None) -> None:
        """Sampling stands still from here to `finish_update`. A manifest that does not fit the model is refused."""

    @abstractmethod
    def load_bucket(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy these HF-named tensors into place."""

    @abstractmethod
    def finish_update(self, fingerprint: Mapping[str, int]) -> None:
        """Check that every weight arrived and is the trainer's, bit for bit; then sampling goes on with `version`.

        Sequences that were under way continue; their KV is computed again. Raises WeightMismatchError.
        """

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int | None = None) -> None:
        """All weights as (HF name, tensor) pairs; the version counts up unless it is given."""
        self.begin_update(self.version + 1 if version is None else version, None)
        sums: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            self.load_bucket({name: tensor})
            sums[name] = tensor_fingerprint(tensor, self.weight_dtype)
        self.finish_update({name: int(total) for name, total in sums.items()})

    # ---------------------------------------------------------------- memory and life

    @abstractmethod
    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Give device memory back while training: `kv_cache`, `weights`."""

    @abstractmethod
    def resume(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Take it again."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; waiting requests fail."""

    def __enter__(self) -> BaseRollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tell(on_finished: Callable[[int, Output], None], row: int, future: Future[Output]) -> None:
    """Of an answer, not of an error; nor of what was aborted, which is not the answer yet."""
    if not future.cancelled() and future.exception() is None and future.result().finish_reason != "abort":
        on_finished(row, future.result())


def _put_row(finished: queue.SimpleQueue[int], row: int, _: Future[Output]) -> None:
    finished.put(row)
