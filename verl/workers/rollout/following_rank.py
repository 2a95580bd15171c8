"""FollowingRank: a rank without an engine, whose device is part of one that the first rank of its set has started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

import torch

from verl.config import RolloutConfig
from verl.types.request import Output, Request
from verl.types.weights import Bucket, Manifest, Wanted
from verl.workers.rollout.base import RELEASE_TAGS, BaseRollout

__all__ = ["FollowingRank"]


class FollowingRank(BaseRollout):
    """Takes part in what all ranks do together, and has nothing to do there: no requests, no weights, no memory."""

    version = 0
    is_leader = False

    def __init__(self, config: RolloutConfig, weight_dtype: torch.dtype) -> None:
        self.config, self.weight_dtype = config, weight_dtype
        self.eos_token_ids, self.pad_token_id = frozenset(), 0

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        raise RuntimeError("rollout: requests go to the first of the ranks that share an engine, not to this one.")

    def wanted(self) -> Wanted:
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
