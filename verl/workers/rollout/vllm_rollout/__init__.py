"""vLLM as a rollout engine."""

from verl.workers.rollout.vllm_rollout.vllm_rollout import vLLMRollout

__all__ = ["vLLMRollout"]
