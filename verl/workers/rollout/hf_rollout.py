"""HFRollout: generation on a plain transformers model, for debugging and as the reference other engines are held to."""

from __future__ import annotations

from functools import partial

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.inference.async_engine import AsyncEngine
from verl.inference.models.loading import end_tokens, load_module, read_model_config
from verl.inference.weights import EngineWeights, pack_module
from verl.utils.device import resolve_dtype
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.embedded_rollout import EmbeddedRollout
from verl.workers.rollout.hf_engine import HFEngine
from verl.workers.rollout.hf_runner import HFRunner

__all__ = ["HFRollout"]


class HFRollout(EmbeddedRollout):
    """A model of its own in `dtype` on `device`, decoded with its KV cache by a thread of its own."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        if config.tensor_model_parallel_size > 1:
            raise ValueError(
                f"tensor_model_parallel_size: {config.tensor_model_parallel_size}; the hf engine runs on one device."
                " Set it to 1."
            )
        device = torch.device(device)
        dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
        hf_config = read_model_config(model_path, model_config)
        self.model = load_module(model_path, hf_config, model_config, config.load_format, device, dtype)
        if getattr(self.model, "_is_stateful", False):
            raise ValueError(f"name: hf cannot decode {type(self.model).__name__}, whose state is no KV cache.")
        region = pack_module(self.model, device, dtype)
        self.model.eval().requires_grad_(False)
        weights = EngineWeights(self.model.state_dict(), region, dtype, keep=not config.free_weights)
        self.weights = weights.tensors
        """What the engine computes with, by HF name; to be read."""
        runner = HFRunner(self.model, config.max_num_batched_tokens)
        super().__init__(
            config,
            device,
            dtype,
            loop=AsyncEngine(
                HFEngine(runner, config.max_num_seqs, config.max_model_len),
                partial(hf_tokenizer, model_path, trust_remote_code=model_config.trust_remote_code),
            ),
            weights=weights,
            kv=None,
            eos_token_ids=end_tokens(model_path, hf_config, model_config).ids,
            pad_token_id=hf_config.get_text_config(decoder=True).pad_token_id,
        )
