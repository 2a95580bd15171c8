"""EmbeddedRollout: base class of engines in this process: requests, in-place weight updates, memory release."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.inference.async_engine import AsyncEngine
from verl.inference.engine import StepEngine
from verl.inference.tensor_parallel import FollowerEngine
from verl.types.request import Output, Request
from verl.types.weights import Bucket, Manifest, RequestedRows
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import KV_MODES, PAUSE_MODES, RELEASE_TAGS, BaseRollout, Load

logger = logging.getLogger(__name__)


class WeightStore(Protocol):
    """An engine's weights. Its methods are called while no step runs, by one thread at a time."""

    def check_manifest(self, manifest: Manifest | None) -> None:
        """Raise WeightMismatchError if the trainer's model does not match. Called before weights are overwritten; None:
        the trainer's model is unknown."""

    def requested_rows(self) -> RequestedRows | None:
        """See `BaseRollout.requested_rows`."""

    def begin(self) -> None:
        """Begin an update."""

    def load(self, tensors: Bucket) -> None:
        """Copy these tensors. They are valid during the call only: the next bucket reuses their memory."""

    def verify(self, expected: Mapping[str, int]) -> None:
        """Raise WeightMismatchError unless all weights arrived with these fingerprints.

        The last call of an update: engines that post-process their weights do it in this call.
        """

    def offload(self) -> None:
        """Release the device memory."""

    def onload(self) -> None:
        """Allocate the device memory again."""

    @property
    def held_bytes(self) -> int:
        """Device memory in use."""


class KVStore(Protocol):
    """An engine's KV memory. It is released and restored while no step runs and no request needs its contents."""

    def release(self) -> None: ...

    def restore(self) -> None: ...

    @property
    def held_bytes(self) -> int:
        """Device memory in use."""


class EmbeddedRollout(BaseRollout):
    """An engine in this process, composed of request loop, weights and KV memory. Sampling is halted during weight
    updates and while memory is released."""

    def __init__(
        self,
        config: RolloutConfig,
        device: torch.device,
        weight_dtype: torch.dtype,
        loop: AsyncEngine | FollowerEngine,
        weights: WeightStore,
        kv: KVStore | None,
        eos_token_ids: frozenset[int],
        pad_token_id: int | None,
    ) -> None:
        self.config, self.device, self.weight_dtype = config, device, weight_dtype
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = min(eos_token_ids, default=0) if pad_token_id is None else pad_token_id
        self.loop = loop
        self._weights = weights
        self.kv = kv
        self.released: set[str] = set()
        self._unusable_reason: str | None = None
        """Why the engine cannot generate with its weights: not loaded yet, or a failed update; None: it can."""
        if config.load_format == "dummy":
            self._unusable_reason = "load_format=dummy: a weight sync from the trainer must come first."
        self._pending_version: int | None = None
        """Version of the weight update in progress; None: no update is in progress."""
        self._keep_kv = False

    @property
    def version(self) -> int:
        return self.loop.version

    @property
    def is_leader(self) -> bool:  # type: ignore[override]
        return not isinstance(self.loop, FollowerEngine)

    # ---------------------------------------------------------------- requests

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        self._require_ready()
        return self.loop.submit(requests)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        self.loop.abort(ids)

    def tokens_since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        return {} if isinstance(self.loop, FollowerEngine) else self.loop.tokens_since(positions)

    def pause_generation(self, mode: str = "keep", kv: str = "recompute") -> None:
        for name, value, known in (("mode", mode, PAUSE_MODES), ("kv", kv, KV_MODES)):
            if value not in known:
                raise ValueError(f"pause_generation: {name} {value!r} is unknown. Use one of {known}.")
        self.loop.pause(mode)
        self._keep_kv = kv == "keep"

    def resume_generation(self) -> None:
        self._keep_kv = False
        self.loop.unpause()

    def wait_idle(self) -> None:
        self.loop.halt("wait_idle")
        self.loop.resume("wait_idle")

    def _require_ready(self) -> None:
        if self._pending_version is not None:
            return  # the loop is halted: the request waits for the new weights, or fails if the update fails
        if self._unusable_reason:
            raise RuntimeError(f"rollout: the engine has no weights to generate with. {self._unusable_reason}")
        if self.released and isinstance(self.loop, AsyncEngine) and self.loop.paused:
            return  # the request waits for the end of the pause, which follows a weight sync
        if "weights" in self.released and self.config.free_weights:
            raise RuntimeError(
                "rollout: the weights were discarded (rollout.free_weights). Update them before generating."
            )
        if self.released:
            raise RuntimeError(f"rollout: {sorted(self.released)} are released. Call resume() before generating.")

    # ---------------------------------------------------------------- weights

    def begin_update(self, version: int, manifest: Manifest | None) -> None:
        self._weights.check_manifest(manifest)
        self.loop.halt("update")
        self._pending_version = version
        try:
            self._restore({"weights"})
            self._weights.begin()
        except Exception as error:
            self.fail_update(error)
            raise

    def requested_rows(self) -> RequestedRows | None:
        return self._weights.requested_rows()

    def load_bucket(self, tensors: Bucket) -> None:
        try:
            self._weights.load(tensors)
        except Exception as error:
            self.fail_update(error)
            raise

    def finish_update(self, fingerprint: Mapping[str, int]) -> None:
        try:
            self._weights.verify(fingerprint)
        except Exception as error:
            self.fail_update(error)
            raise
        assert self._pending_version is not None, "requires begin_update"
        self.loop.invalidate_kv_cache(running=not self._keep_kv)
        self.loop.version, self._pending_version = self._pending_version, None
        self._unusable_reason = None
        self.loop.resume("update")

    def fail_update(self, error: Exception) -> None:
        """See `BaseRollout.fail_update`: some weights may be overwritten already. Repeated calls have no effect."""
        if self._pending_version is None:
            return
        self._unusable_reason = f"The update to version {self._pending_version} failed: {error}"
        self._pending_version = None
        self.loop.fail(error)
        self.loop.resume("update")

    # ---------------------------------------------------------------- memory and lifetime

    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Release memory. Weights move to host memory, or are discarded until the next update (`free_weights`).
        Unfinished requests continue after `resume`."""
        new = _checked_tags(tags) - self.released
        self.loop.halt("release")
        if "kv_cache" in new:
            self.loop.invalidate_kv_cache()
            if self.kv is not None:
                self.kv.release()
        # On a CPU, weights are in host memory already.
        if "weights" in new and (self.config.free_weights or self.device.type != "cpu"):
            self._weights.offload()
        self.released |= new
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.debug("rollout: released %s; in use: %s", sorted(new), self.held_bytes())

    def resume(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Allocate released memory again, except discarded weights (`free_weights`), which an update restores."""
        self._restore(_checked_tags(tags) - ({"weights"} if self.config.free_weights else set()))

    def _restore(self, tags: set[str]) -> None:
        restored = tags & self.released
        if "weights" in restored:
            self._weights.onload()
        if "kv_cache" in restored and self.kv is not None:
            self.kv.restore()
        self.released -= restored
        if restored and self.device.type == "cuda" and not self.config.free_cache_engine:
            torch.cuda.current_stream(self.device).synchronize()  # engine steps run on another stream
        if not self.released:
            self.loop.resume("release")

    def held_bytes(self) -> dict[str, int]:
        """Device memory of the engine by purpose. Tables and captured graphs, which are never released, are not
        included."""
        return {"weights": self._weights.held_bytes, "kv_cache": 0 if self.kv is None else self.kv.held_bytes}

    def load(self) -> Load:
        held = self.held_bytes()
        memory = {"kv_cache_bytes": held["kv_cache"], "weight_bytes": held["weights"], "weight_version": self.version}
        if isinstance(self.loop, FollowerEngine):
            return Load(**memory)
        running, waiting, tokens = self.loop.counts()
        return Load(
            requests_running=running,
            requests_waiting=waiting,
            generated_tokens_total=tokens,
            kv_cache_used=self._kv_used(),
            preemptions_total=self._preemptions(),
            cuda_graphs=self._cuda_graphs(),
            **memory,
        )

    def _kv_used(self) -> float | None:
        """Share of the KV cache that unfinished requests use; None if the engine does not report it."""
        return None

    def _preemptions(self) -> int | None:
        """Preemptions so far because the KV cache was full; None if the engine does not report them."""
        return None

    def _cuda_graphs(self) -> int | None:
        """Captured CUDA graphs; None if the engine does not report them."""
        return None

    def close(self) -> None:
        self.loop.close()


def _checked_tags(tags: Iterable[str]) -> set[str]:
    if isinstance(tags, str) or not set(tags) <= set(RELEASE_TAGS):
        raise ValueError(f"release/resume: tags {tags!r} are unknown. Use a list of {RELEASE_TAGS}.")
    return set(tags)


def request_loop(engine: StepEngine, model_path: str, model_config: ModelConfig) -> AsyncEngine:
    """The request loop of a step engine; it loads the model's tokenizer when a request needs it."""
    return AsyncEngine(engine, partial(hf_tokenizer, model_path, trust_remote_code=model_config.trust_remote_code))


def merge_engine_arguments(
    engine: str, config: RolloutConfig, defaults: Mapping[str, Any], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a third-party engine: `defaults`, overridden by `engine_kwargs.<engine>`, and `fixed` arguments,
    which a user cannot set."""
    overrides = dict(config.engine_kwargs[engine] if engine in config.engine_kwargs else {})
    conflicts = sorted(overrides.keys() & fixed.keys())
    if conflicts:
        name = conflicts[0]
        raise ValueError(
            f"engine_kwargs.{engine}.{name}: is always {fixed[name]!r} in a rollout and cannot be set. Leave it out."
        )
    return {**defaults, **overrides, **fixed}
