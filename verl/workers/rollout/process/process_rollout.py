"""ProcessRollout: an engine in a process of its own. Requests and answers go by a channel, in batches; weights through
memory that both processes have."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from verl.single_controller.base.errors import Failure
from verl.types.request import Output, Request
from verl.types.weights import Bucket, Manifest, TensorSpec, Wanted
from verl.workers.rollout.base import RELEASE_TAGS, BaseRollout, Load
from verl.workers.rollout.bucket_layout import bucket_layout, end_of
from verl.workers.rollout.process.engine_process import EngineProcess
from verl.workers.rollout.process.messages import Recipe
from verl.workers.rollout.process.shared_buffer import SharedBuffer, buffer_of_both

__all__ = ["ProcessRollout"]


class ProcessRollout(BaseRollout):
    """What the engine's own class answers, it answers, for a process that it starts and ends."""

    def __init__(self, recipe: Recipe, environment: Mapping[str, str], device: torch.device) -> None:
        """`environment` is all of the process's. Buckets are handed over on `device`, its first one."""
        self.config = recipe.config
        self._recipe, self._environment, self._device = recipe, dict(environment), device
        # The last one is in use. An engine's processes may still have the others open.
        self._buffers: list[SharedBuffer] = []
        self._start()

    def _start(self) -> None:
        self._engine = EngineProcess(self._recipe, self._environment)
        facts = self._engine.facts
        self.weight_dtype, self._wanted = facts.weight_dtype, facts.wanted
        self.eos_token_ids, self.pad_token_id = facts.eos_token_ids, facts.pad_token_id
        self._version = self._pending_version = facts.version
        self._loading: Future[None] | None = None
        # A rollout that nobody holds any more leaves no process behind.
        self._end = weakref.finalize(self, self._engine.discard)

    @property
    def version(self) -> int:
        return self._version

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._engine.pid

    # ---------------------------------------------------------------- requests

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        return self._engine.submit(list(requests))

    def abort(self, ids: Iterable[str] | None = None) -> None:
        self._engine.tell("abort", None if ids is None else list(ids))

    def since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        return self._engine.ask("since", dict(positions)) if positions else {}

    def pause_generation(self, mode: str = "keep", kv: str = "recompute") -> None:
        self._engine.ask("pause_generation", mode, kv)

    def resume_generation(self) -> None:
        self._engine.ask("resume_generation")

    def wait_idle(self) -> None:
        self._engine.ask("wait_idle")

    # ---------------------------------------------------------------- weights

    def begin_update(self, version: int, manifest: Manifest | None) -> None:
        self._loading = None
        specs = {name: TensorSpec(tuple(spec.shape), spec.dtype) for name, spec in (manifest or {}).items()}
        self._engine.ask("begin_update", version, None if manifest is None else specs)
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self._pending_version, self._expected = version, _bucket_size(specs, self.weight_dtype, limit)

    def wanted(self) -> Wanted | None:
        return self._wanted

    def load_bucket(self, tensors: Bucket) -> None:
        """Returns when they are in the shared memory; the engine takes them while the next ones are made."""
        if not tensors:
            return
        self._wait_for_loading()
        size, room = end_of(bucket_layout(tensors)), self._buffers[-1].handle.size if self._buffers else 0
        if size > room:
            self._buffers.append(self._new_buffer(max(size, self._expected, 2 * room)))
        self._loading = self._engine.begin("load_bucket", self._buffers[-1].put(tensors))

    def _new_buffer(self, size: int) -> SharedBuffer:
        buffer = buffer_of_both(size, self._device, partial(self._engine.ask, "open_buffer"))
        self._device = buffer.flat.device
        return buffer

    def finish_update(self, fingerprint: Mapping[str, int]) -> None:
        self._wait_for_loading()
        self._engine.ask("finish_update", dict(fingerprint))
        self._version = self._pending_version

    def fail_update(self, error: Exception) -> None:
        self._loading = None
        if self._engine.death is None:
            self._engine.ask("fail_update", Failure.of(error))

    def _wait_for_loading(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()

    # ---------------------------------------------------------------- memory and life

    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        self._engine.ask("release", tags)

    def resume(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        self._engine.ask("resume", tags)

    def held_bytes(self) -> dict[str, int]:
        """Device memory of the engine by what it is for."""
        return self._engine.ask("held_bytes")

    def load(self) -> Load:
        return self._engine.ask("load")

    def restart_if_dead(self) -> bool:
        if self._engine.death is None:
            return False
        self._close_buffers()
        self._start()
        return True

    def close(self) -> None:
        self._end.detach()
        try:
            self._engine.close()
        finally:
            self._close_buffers()

    def _close_buffers(self) -> None:
        """Only when no process of the engine's is left."""
        while self._buffers:
            self._buffers.pop().close()


def _bucket_size(manifest: Manifest, dtype: torch.dtype, limit: int) -> int:
    """What the largest bucket of these weights takes: one tensor, or as many as fit into `limit`."""
    kinds = [dtype if spec.dtype.is_floating_point else spec.dtype for spec in manifest.values()]
    sizes = [math.prod(spec.shape) * kind.itemsize for spec, kind in zip(manifest.values(), kinds, strict=True)]
    return max([min(sum(sizes), limit), *sizes]) + 16 * len(sizes)
