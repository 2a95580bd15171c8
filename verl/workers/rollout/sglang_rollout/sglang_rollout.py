"""SGLangRollout: SGLang as a rollout: its processes compute and sample, our thread answers requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.inference.async_engine import AsyncEngine
from verl.inference.models.loading import end_tokens, read_model_config
from verl.models.loading import empty_model
from verl.utils.device import resolve_dtype
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import RELEASE_TAGS
from verl.workers.rollout.embedded_rollout import EmbeddedRollout
from verl.workers.rollout.sglang_rollout.engine_args import engine_arguments
from verl.workers.rollout.sglang_rollout.engine_thread import EngineThread
from verl.workers.rollout.sglang_rollout.environment import environment
from verl.workers.rollout.sglang_rollout.step_engine import SGLangSteps
from verl.workers.rollout.sglang_rollout.weights import Occupation, SGLangKV, SGLangWeights

__all__ = ["SGLangRollout"]


class SGLangRollout(EmbeddedRollout):
    """An engine in `dtype` on `device` and those after it; its ranks are processes that SGLang starts."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        if find_spec("sglang") is None:
            raise ImportError(
                "SGLangRollout: sglang is not installed. Run make setup-sglang, or pip install -e .[sglang]."
            )
        device = torch.empty(0, device=device).device
        dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
        hf_config = read_model_config(model_path, model_config)
        os.environ.update(environment(config, device))
        thread = EngineThread(engine_arguments(model_path, model_config, config, device, dtype))
        ranks = config.tensor_model_parallel_size
        eos_token_ids = end_tokens(model_path, hf_config, model_config).ids
        skeleton = empty_model(hf_config, "causal_lm", dtype, model_config.trust_remote_code)

        self.steps = SGLangSteps(
            thread, eos_token_ids, config.max_model_len, hf_config.get_text_config(decoder=True).vocab_size, dtype
        )
        super().__init__(
            config,
            device,
            dtype,
            loop=AsyncEngine(
                self.steps, partial(hf_tokenizer, model_path, trust_remote_code=model_config.trust_remote_code)
            ),
            weights=SGLangWeights(thread, skeleton, dtype, ranks, Occupation(thread, "weights", device)),
            kv=SGLangKV(thread, self.steps.server, Occupation(thread, "kv_cache", device), ranks),
            eos_token_ids=eos_token_ids,
            pad_token_id=hf_config.get_text_config(decoder=True).pad_token_id,
        )

    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        """SGLang gives nothing back while somebody runs: what is under way begins again from its tokens."""
        if "kv_cache" not in tags:
            self._loop.halt("release")
            self._loop.recompute()
            self.steps.server.drop_kv()
        super().release(tags)

    def close(self) -> None:
        super().close()
        self.steps.close()
