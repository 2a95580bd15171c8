"""Rollout engines that already run as servers, connected by URL: `vllm serve`, or SGLang's server."""

from verl.workers.rollout.url_rollout.url_rollout import URLRollout

__all__ = ["URLRollout"]
