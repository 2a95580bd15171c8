"""TensorRT-LLM as a rollout engine."""

from verl.workers.rollout.trtllm_rollout.trtllm_rollout import TRTLLMRollout

__all__ = ["TRTLLMRollout"]
