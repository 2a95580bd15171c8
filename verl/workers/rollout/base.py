"""BaseRollout: the interface of rollout engines: requests, weight updates, memory."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.types.request import Output, Request
from verl.types.weights import Bucket, Manifest, Wanted
from verl.utils.calling import also_spelled
from verl.utils.process_tree import watch_workers
from verl.utils.weight_fingerprint import tensor_fingerprint
from verl.workers.rollout.engine_host import EngineHost
from verl.workers.rollout.errors import EngineBrokenError, EngineDiedError

__all__ = ["KV_MODES", "PAUSE_MODES", "RELEASE_TAGS", "BaseRollout", "EngineBrokenError", "EngineDiedError", "Load"]

PAUSE_MODES = ("finish", "keep", "abort")
KV_MODES = ("keep", "recompute")
RELEASE_TAGS = ("weights", "kv_cache")


def _counted(meaning: str) -> Any:
    return field(default=None, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine does now and has done so far; None where it does not say."""

    requests_running: int | None = _counted("Requests that have their first token and are not finished.")
    requests_waiting: int | None = _counted("Requests without a token yet.")
    generated_tokens_total: int | None = _counted("Tokens sampled since the engine was started.")
    kv_cache_bytes: int | None = _counted("Device memory of the KV cache now; 0 while it is given back.")
    kv_cache_used: float | None = _counted("Share of the KV cache that holds tokens of requests under way.")
    weight_bytes: int | None = _counted("Device memory of the weights now; 0 while they are given back.")
    weight_version: int | None = _counted("Version of the weights that generate.")


class BaseRollout(ABC):
    """A rollout engine. Engines implement the request primitive and the weight hand-over; the rest is here.

    Every method may be called from any thread.
    """

    config: RolloutConfig
    weight_dtype: torch.dtype
    """Floating-point type of the engine's weights; fingerprints are taken in it."""
    eos_token_ids: frozenset[int]
    pad_token_id: int
    leads: bool = True
    """False: requests go to the first of the ranks that share an engine, and this is another one."""

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

    def since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        """Of those of these requests that are under way: their tokens from a position on, where there are any.

        An engine that does not tell before the end says nothing.
        """
        return {}

    @abstractmethod
    def pause_generation(self, mode: str = "keep", kv: str = "recompute") -> None:
        """Stop sampling, and return when it has stopped; later requests wait for `resume_generation`.

        `finish` completes what was submitted before, `keep` leaves it where it is, `abort` ends it with what there is.
        What is left goes on after an update of the weights with its KV computed again, or, with kv="keep", with that
        of the old weights: cheaper, and another distribution. Released KV is always computed again.
        """

    @abstractmethod
    def resume_generation(self) -> None:
        """Go on after a pause."""

    @abstractmethod
    def rest(self) -> None:
        """Return when no step is under way. Ranks that share an engine call it together."""

    # ---------------------------------------------------------------- batches

    def generate_sequences(self, prompts: DataProto, **sampling_overrides: Any) -> DataProto:
        """Generate one answer per row, rows in order. `pad_to_max=True` pads responses to max_new_tokens.

        Reads `input_ids`, `attention_mask` [batch, prompt]; `uid`, `sample_index`; and of meta_info `step`, `seed`,
        `validate`, `eos_token_id`, `pad_token_id`, `pad_to_max` and sampling parameters. Of ranks that share an engine
        the first one returns the rows, the others nothing.
        """
        try:
            return EngineHost(self).generate_batch(prompts, sampling_overrides) if self.leads else DataProto()
        finally:
            if self.config.tensor_model_parallel_size > 1:
                self.rest()  # the following ranks wait for the leader

    def stream(self, prompts: DataProto, **sampling_overrides: Any) -> Iterator[tuple[int, DataProto]]:
        """(row, its sample as a batch of one) as each is finished. Closing the iterator aborts what is left."""
        return EngineHost(self).stream_batch(prompts, sampling_overrides)

    # ---------------------------------------------------------------- weights

    @abstractmethod
    def begin_update(self, version: int, manifest: Manifest | None) -> None:
        """Sampling stands still from here to `finish_update`. A manifest that does not fit the model is refused."""

    def wanted(self) -> Wanted | None:
        """The rows of each weight that this rank's engine takes; it then takes `TensorSlice`s too. None: all, whole."""
        return None

    @abstractmethod
    def load_bucket(self, tensors: Bucket) -> None:
        """Copy these HF-named tensors, or rows of them, into place."""

    @abstractmethod
    def finish_update(self, fingerprint: Mapping[str, int]) -> None:
        """Check that every weight arrived and is the trainer's, bit for bit; then sampling goes on with `version`.

        `fingerprint`, by name, is of what was sent here: of a whole tensor, or of those rows of it that are `wanted`.

        Sequences that were under way continue; a pause says what becomes of their KV. Raises WeightMismatchError.
        """

    @abstractmethod
    def fail_update(self, error: Exception) -> None:
        """Instead of `finish_update`, where what was begun has failed: nobody may wait for an answer in vain."""

    @also_spelled(iterator="weights")
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int | None = None) -> None:
        """All weights as (HF name, tensor) pairs; the version counts up unless it is given."""
        self.begin_update(self.version + 1 if version is None else version, None)
        sums: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            self.load_bucket({name: tensor})
            sums[name] = tensor_fingerprint(tensor, self.weight_dtype)
        self.finish_update({name: int(total) for name, total in sums.items()})

    # ---------------------------------------------------------------- memory and life

    def load(self) -> Load:
        """What there is to do, for whoever watches."""
        return Load(weight_version=self.version)

    @abstractmethod
    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Give device memory back while training: `kv_cache`, `weights`. With `rollout.free_weights` the weights are
        gone, and a hand-over must come before the next request."""

    @abstractmethod
    def resume(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Take it again."""

    def watch_processes(self, on_end: Callable[[str], None]) -> None:
        """Tell of the first of the processes that the engine has started that ends, in a thread of its own."""
        watch_workers(on_end)

    def revive(self) -> bool:
        """After an EngineDiedError: start the engine anew. False: it lives, as one in this process always does."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End the engine; waiting requests fail."""

    def __enter__(self) -> BaseRollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
