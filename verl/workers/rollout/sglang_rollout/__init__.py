"""SGLang as a rollout engine."""

from verl.workers.rollout.sglang_rollout.sglang_rollout import SGLangRollout

__all__ = ["SGLangRollout"]
