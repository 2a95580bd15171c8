"""NativeRollout: the embedded engine of `verl.inference` as a rollout; nothing to install."""

from __future__ import annotations

import logging

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.inference.build import build_engine
from verl.workers.rollout import register_rollout
from verl.workers.rollout.embedded_rollout import EmbeddedRollout

logger = logging.getLogger(__name__)


@register_rollout("native")
class NativeRollout(EmbeddedRollout):
    """An engine with its own copy of the model in `dtype` on `device`: paged KV, continuous batching, one thread."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        built = build_engine(model_path, model_config, config, device, dtype)
        self.model = built.model
        self.weights = built.weights.tensors
        """The engine's weights by HF name; read-only."""
        adapters = built.model.adapters
        self.applies_adapters = adapters is not None
        if adapters is not None:
            logger.info(
                "rollout: LoRA adapters (rank %d, %d tensors) are applied without merging; weight syncs send only them",
                adapters.options.rank,
                len(adapters.weights()),
            )
        elif model_config.lora_rank:
            logger.info("rollout: LoRA adapters are merged before every weight sync (engine_kwargs.native.merge_lora)")
        self._regions = (built.kv.region, built.model.region)
        self._scheduler, self._runner, self._parallel = built.engine.scheduler, built.runner, built.parallel
        super().__init__(
            config,
            built.device,
            built.dtype,
            loop=built.start(),
            weights=built.weights,
            kv=built.kv,
            eos_token_ids=built.end_tokens.ids,
            pad_token_id=built.pad_token_id,
        )

    def _kv_used(self) -> float:
        """Return the share of the KV cache's blocks in use."""
        blocks = self._scheduler.blocks
        return 1 - blocks.free_blocks / blocks.num_blocks

    def _preemptions(self) -> int:
        """Return the number of preempted sequences so far."""
        return self._scheduler.num_preempted

    def exchange_error(self, error: Exception | None) -> Exception | None:
        return self._parallel.exchange_error(error)

    def _cuda_graphs(self) -> int:
        return self._runner.captured_graphs

    def close(self) -> None:
        super().close()
        for region in self._regions:
            region.close()
