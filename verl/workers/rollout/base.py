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
from verl.types.weights import Bucket, Manifest, RequestedRows
from verl.utils.device import capture_gate
from verl.utils.process_tree import watch_child_processes
from verl.utils.py_functional import keyword_aliases
from verl.utils.weight_fingerprint import tensor_fingerprint
from verl.workers.rollout.engine_host import EngineHost

PAUSE_MODES = ("finish", "keep", "abort")
KV_MODES = ("keep", "recompute")
RELEASE_TAGS = ("weights", "kv_cache")


def _reported(meaning: str) -> Any:
    """A field of `Load`; `meaning`: its description for Prometheus."""
    return field(default=None, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Current load and totals of an engine; None where the engine does not report a value."""

    requests_running: int | None = _reported("Requests that have their first token and are not finished.")
    requests_waiting: int | None = _reported("Requests without a token yet.")
    generated_tokens_total: int | None = _reported("Tokens sampled since the engine was started.")
    kv_cache_bytes: int | None = _reported("Device memory of the KV cache now; 0 while it is released.")
    kv_cache_used: float | None = _reported("Share of the KV cache that holds tokens of unfinished requests.")
    preemptions_total: int | None = _reported("Preemptions so far because the KV cache was full; KV is recomputed.")
    cuda_graphs: int | None = _reported("CUDA graphs captured so far; each executes steps of one size.")
    weight_bytes: int | None = _reported("Device memory of the weights now; 0 while they are released.")
    weight_version: int | None = _reported("Version of the current weights.")


class BaseRollout(ABC):
    """A rollout engine: requests, weight updates, and release of device memory. All methods are thread-safe."""

    config: RolloutConfig
    weight_dtype: torch.dtype
    """Floating-point type of the engine's weights; fingerprints are computed in it."""
    eos_token_ids: frozenset[int]
    pad_token_id: int
    is_leader: bool = True
    """Whether this rank accepts requests: True on the first of the ranks that share an engine."""
    applies_adapters: bool = False
    """Whether the engine receives LoRA adapters and applies them; False: it receives merged weights."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the current weights."""

    # ---------------------------------------------------------------- requests

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        """Queue all requests; cancelling a future aborts its request. If a request is invalid, raises ValueError and
        queues none."""

    async def generate(self, request: Request) -> Output:
        """Return the output of one request. Cancelling the awaiting task aborts it."""
        return await asyncio.wrap_future(self.submit([request])[0])

    @abstractmethod
    def abort(self, ids: Iterable[str] | None = None) -> None:
        """Abort these requests (None: all) at the next token; their outputs have the tokens so far and finish reason
        `abort`."""

    def tokens_since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        """Return the new tokens of unfinished requests: `positions` maps request ids to the first token to return.

        Requests without new tokens are left out. Engines that only return finished outputs return nothing.
        """
        return {}

    @abstractmethod
    def pause_generation(self, mode: str = "keep", kv: str = "recompute") -> None:
        """Stop sampling, and return when it has stopped; later requests wait for `resume_generation`.

        `mode`, for requests submitted before: `finish` completes them, `keep` suspends them, `abort` ends them with
        their tokens so far. `kv`, for suspended requests after a weight update: `recompute` computes their KV with the
        new weights; `keep` continues with the KV of the old weights, which is cheaper but samples from the distribution
        of neither version. Released KV is always recomputed.
        """

    @abstractmethod
    def resume_generation(self) -> None:
        """Resume sampling after `pause_generation`."""

    @abstractmethod
    def wait_idle(self) -> None:
        """Block until no engine step is running. All ranks that share an engine must call it."""

    # ---------------------------------------------------------------- batches

    def generate_sequences(self, prompts: DataProto, **sampling_overrides: Any) -> DataProto:
        """Generate one response per row; rows keep their order. `pad_to_max=True` pads responses to `max_new_tokens`.

        Reads the columns `input_ids` and `attention_mask` [batch, prompt], `uid`, `sample_index`; and from `meta_info`
        `step`, `seed`, `validate`, `eos_token_id`, `pad_token_id`, `pad_to_max` and sampling parameters. Of the ranks
        that share an engine, the first returns the rows, the others an empty batch.
        """
        try:
            with capture_gate.waiting():
                return EngineHost(self).generate_batch(prompts, sampling_overrides) if self.is_leader else DataProto()
        finally:
            if self.config.tensor_model_parallel_size > 1:
                self.wait_idle()  # follower ranks wait for the leader

    def stream(self, prompts: DataProto, **sampling_overrides: Any) -> Iterator[tuple[int, DataProto]]:
        """Yield (row number, batch of one row) as rows finish. Closing the iterator cancels unfinished rows."""
        return EngineHost(self).stream_batch(prompts, sampling_overrides)

    # ---------------------------------------------------------------- weights

    @abstractmethod
    def begin_update(self, version: int, manifest: Manifest | None) -> None:
        """Begin a weight update: sampling pauses until `finish_update`. WeightMismatchError if the manifest does not
        match the model."""

    def requested_rows(self) -> RequestedRows | None:
        """The rows of each weight that this rank's engine needs in the next update; `load_bucket` then also accepts
        `TensorSlice`s. None: whole tensors of all weights."""
        return None

    @abstractmethod
    def load_bucket(self, tensors: Bucket) -> None:
        """Copy these tensors (by HF name), or slices of them, into the engine's weights."""

    @abstractmethod
    def finish_update(self, fingerprint: Mapping[str, int]) -> None:
        """Verify that all weights arrived and are bit-identical to the trainer's; then resume sampling with the new
        version. Raises WeightMismatchError.

        `fingerprint`: by name, the fingerprint of the whole tensor, or of its `requested_rows`. Running requests
        continue; `pause_generation` determines whether their KV is kept or recomputed.
        """

    @abstractmethod
    def fail_update(self, error: Exception) -> None:
        """End a failed update, instead of `finish_update`: unfinished requests fail with `error`."""

    def exchange_error(self, error: Exception | None) -> Exception | None:
        """Return this rank's error; if only other ranks that share the engine have failed, an error with theirs; None:
        no rank has failed. A collective of these ranks.

        `finish_update` contains one. A rank on which the update has failed calls this instead of `finish_update`.
        """
        return error

    @keyword_aliases(iterator="weights")
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int | None = None) -> None:
        """Update all weights from (HF name, tensor) pairs. `version` defaults to the current version plus 1."""
        self.begin_update(self.version + 1 if version is None else version, None)
        sums: dict[str, torch.Tensor] = {}
        try:
            for name, tensor in weights:
                self.load_bucket({name: tensor})
                sums[name] = tensor_fingerprint(tensor, self.weight_dtype)
        except Exception as error:
            self.exchange_error(error)
            self.fail_update(error)
            raise
        self.finish_update({name: int(total) for name, total in sums.items()})

    # ---------------------------------------------------------------- memory and lifetime

    @staticmethod
    def process_environment(config: RolloutConfig, device: torch.device | str) -> dict[str, str]:
        """Environment variables of a process that runs this engine, to be set before the engine is imported: required
        variables, and defaults of variables that the user has not set."""
        return {}

    def load(self) -> Load:
        """The current load, for monitoring."""
        return Load(weight_version=self.version)

    @abstractmethod
    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Release device memory (`kv_cache`, `weights`) during training. With `rollout.free_weights`, weights are
        discarded, and a weight update must precede the next request."""

    @abstractmethod
    def resume(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Allocate released memory again."""

    def watch_processes(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` in a background thread when the first of the engine's processes ends."""
        watch_child_processes(on_end)

    def restart_if_dead(self) -> bool:
        """After an EngineDiedError, make the engine usable again. Return whether it was restarted and has lost its
        weights; always False for engines in this process."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Shut down the engine; unfinished requests fail."""

    def __enter__(self) -> BaseRollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FollowerRollout(BaseRollout):
    """The rollout of a rank whose device is used by the engine of the first rank of its tensor-parallel group. It has
    no requests, weights or memory; its methods do nothing, so that all ranks can make the same calls."""

    version = 0
    is_leader = False

    def __init__(self, config: RolloutConfig, weight_dtype: torch.dtype) -> None:
        self.config, self.weight_dtype = config, weight_dtype
        self.eos_token_ids, self.pad_token_id = frozenset(), 0

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        raise RuntimeError("rollout: submit requests to the first of the ranks that share an engine, not to this rank.")

    def requested_rows(self) -> RequestedRows:
        return {}

    def abort(self, ids: Iterable[str] | None = None) -> None: ...
    def pause_generation(self, mode: str = "keep", kv: str = "recompute") -> None: ...
    def resume_generation(self) -> None: ...
    def wait_idle(self) -> None: ...
    def begin_update(self, version: int, manifest: Manifest | None) -> None: ...
    def load_bucket(self, tensors: Bucket) -> None: ...
    def finish_update(self, fingerprint: Mapping[str, int]) -> None: ...
    def fail_update(self, error: Exception) -> None: ...
    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None: ...
    def resume(self, tags: Sequence[str] = RELEASE_TAGS) -> None: ...
    def close(self) -> None: ...
