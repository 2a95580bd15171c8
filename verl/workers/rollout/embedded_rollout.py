"""EmbeddedRollout: what engines of this process share: a thread for requests, weights in place, memory given back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from verl.config import RolloutConfig
from verl.inference.async_engine import AsyncEngine
from verl.inference.tensor_parallel import FollowingEngine
from verl.types.request import Output, Request
from verl.types.weights import Bucket, Manifest, Wanted
from verl.workers.rollout.base import KV_MODES, PAUSE_MODES, RELEASE_TAGS, BaseRollout, Load

__all__ = ["EmbeddedRollout", "KVStore", "WeightStore"]

logger = logging.getLogger(__name__)


class WeightStore(Protocol):
    """An engine's weights. Its methods are called while no step runs, by one thread at a time."""

    def check_manifest(self, manifest: Manifest | None) -> None:
        """Refuse a trainer whose model is another one, before anything is overwritten; None: nothing is known of it."""

    def wanted(self) -> Wanted | None:
        """The rows of each weight that this engine takes. None: it takes all, and whole tensors only."""

    def begin(self) -> None:
        """An update begins: nothing has come of it."""

    def load(self, tensors: Bucket) -> None:
        """Take these. They are there during the call only: their memory is the next bucket's."""

    def verify(self, expected: Mapping[str, int]) -> None:
        """Every weight has come, and the fingerprints of what was received are these, or WeightMismatchError.

        An engine that has something to do at the end of an update does it here.
        """

    def offload(self) -> None:
        """Give the device's memory back."""

    def onload(self) -> None:
        """Take it again."""

    @property
    def held_bytes(self) -> int:
        """Memory of the device that they take now."""


class KVStore(Protocol):
    """An engine's KV memory, given back and taken again while no step runs and nothing in it is needed."""

    def release(self) -> None: ...

    def restore(self) -> None: ...

    @property
    def held_bytes(self) -> int:
        """Memory of the device that it takes now."""


class EmbeddedRollout(BaseRollout):
    """An engine in this process, from its parts. Sampling stands still for updates, and while memory is given back."""

    def __init__(
        self,
        config: RolloutConfig,
        device: torch.device,
        weight_dtype: torch.dtype,
        loop: AsyncEngine | FollowingEngine,
        weights: WeightStore,
        kv: KVStore | None,
        eos_token_ids: frozenset[int],
        pad_token_id: int | None,
    ) -> None:
        self.config, self.device, self.weight_dtype = config, device, weight_dtype
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = min(eos_token_ids, default=0) if pad_token_id is None else pad_token_id
        self._loop = loop
        self._weights = weights
        self._kv = kv
        self._released: set[str] = set()
        # Why no token may be sampled: no weights yet, or weights that are not the trainer's.
        self._unfit: str | None = None
        if config.load_format == "dummy":
            self._unfit = "load_format=dummy: the first weights come from the trainer, by an update."
        self._pending_version: int | None = None
        """Version of the weight update in progress; None: no update is in progress."""
        self._keep_kv = False

    @property
    def version(self) -> int:
        return self._loop.version

    @property
    def leads(self) -> bool:  # type: ignore[override]
        return not isinstance(self._loop, FollowingEngine)

    # ---------------------------------------------------------------- requests

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        self._require_ready()
        return self._loop.submit(requests)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        self._loop.abort(ids)

    def since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        return {} if isinstance(self._loop, FollowingEngine) else self._loop.since(positions)

    def pause_generation(self, mode: str = "keep", kv: str = "recompute") -> None:
        for name, value, known in (("mode", mode, PAUSE_MODES), ("kv", kv, KV_MODES)):
            if value not in known:
                raise ValueError(f"pause_generation: {name} {value!r} is unknown. Use one of {known}.")
        self._loop.pause(mode)
        self._keep_kv = kv == "keep"

    def resume_generation(self) -> None:
        self._keep_kv = False
        self._loop.unpause()

    def rest(self) -> None:
        self._loop.halt("rest")
        self._loop.go("rest")

    def _require_ready(self) -> None:
        if self._pending_version is not None:
            return  # the loop is halted: the request waits for the new weights, or fails with the update
        if self._unfit:
            raise RuntimeError(f"rollout: the engine has no weights to generate with. {self._unfit}")
        if "weights" in self._released and self.config.free_weights:
            if isinstance(self._loop, AsyncEngine) and self._loop.paused:
                return  # whoever asks waits for what ends the pause, after a hand-over
            raise RuntimeError(
                "rollout: the weights were let go (rollout.free_weights). Hand them over again before generating."
            )
        if self._released:
            raise RuntimeError(f"rollout: {sorted(self._released)} are released. Call resume() before generating.")

    # ---------------------------------------------------------------- weights

    def begin_update(self, version: int, manifest: Manifest | None) -> None:
        self._weights.check_manifest(manifest)
        self._loop.halt("update")
        self._take({"weights"})
        self._pending_version = version
        try:
            self._weights.begin()
        except Exception as error:
            self.fail_update(error)
            raise

    def wanted(self) -> Wanted | None:
        return self._weights.wanted()

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
        assert self._pending_version is not None, "begin_update comes first"
        self._loop.recompute(running=not self._keep_kv)
        self._loop.version, self._pending_version = self._pending_version, None
        self._unfit = None
        self._loop.go("update")

    def fail_update(self, error: Exception) -> None:
        """Half of the weights may be new: whoever waits for an answer gets the error instead."""
        self._unfit = f"The update to version {self._pending_version} failed: {error}"
        self._pending_version = None
        self._loop.fail(error)
        self._loop.go("update")

    # ---------------------------------------------------------------- memory and life

    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Give memory back; weights wait in host memory, or are gone until the next update (`free_weights`).

        What was under way goes on afterwards.
        """
        new = _known(tags) - self._released
        self._loop.halt("release")
        if "kv_cache" in new:
            self._loop.recompute()
            if self._kv is not None:
                self._kv.release()
        # Host memory is where a CPU's weights are already.
        if "weights" in new and (self.config.free_weights or self.device.type != "cpu"):
            self._weights.offload()
        self._released |= new
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.debug("rollout: gave back %s; it holds %s", sorted(new), self.held_bytes())

    def resume(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """Take it again, but for weights that were let go: those come with an update."""
        self._take(_known(tags) - ({"weights"} if self.config.free_weights else set()))

    def _take(self, tags: set[str]) -> None:
        here = tags & self._released
        if "weights" in here:
            self._weights.onload()
        if "kv_cache" in here and self._kv is not None:
            self._kv.restore()
        self._released -= here
        if here and self.device.type == "cuda" and not self.config.free_cache_engine:
            torch.cuda.current_stream(self.device).synchronize()  # steps run on another stream than this thread's
        if not self._released:
            self._loop.go("release")

    def held_bytes(self) -> dict[str, int]:
        """Device memory of the engine by what it is for. Tables and captured graphs come on top, and stay for life."""
        return {"weights": self._weights.held_bytes, "kv_cache": 0 if self._kv is None else self._kv.held_bytes}

    def load(self) -> Load:
        held = self.held_bytes()
        memory = {"kv_cache_bytes": held["kv_cache"], "weight_bytes": held["weights"], "weight_version": self.version}
        if isinstance(self._loop, FollowingEngine):
            return Load(**memory)
        running, waiting, tokens = self._loop.counts()
        return Load(
            requests_running=running,
            requests_waiting=waiting,
            generated_tokens_total=tokens,
            kv_cache_used=self._kv_used(),
            **memory,
        )

    def _kv_used(self) -> float | None:
        """The share that requests under way hold, where the engine says it."""
        return None

    def close(self) -> None:
        self._loop.close()


def _known(tags: Iterable[str]) -> set[str]:
    if isinstance(tags, str) or not set(tags) <= set(RELEASE_TAGS):
        raise ValueError(f"release/resume: tags {tags!r}; give a list out of {RELEASE_TAGS}.")
    return set(tags)
