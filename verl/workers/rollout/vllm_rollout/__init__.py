"""vLLM as a rollout engine: its name, for code that imports it; the engine itself is not built yet."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.base import BaseRollout

__all__ = ["vLLMRollout"]


class vLLMRollout(BaseRollout):
    """Not built yet: constructing one says what to use."""

    def __new__(cls, *args: Any, **kwargs: Any) -> vLLMRollout:
        raise NotImplementedError(
            "vLLMRollout: vLLM as a rollout engine is not built yet in this version, with or without vllm installed."
            " Use the embedded engine: actor_rollout_ref.rollout.name=native."
        )
