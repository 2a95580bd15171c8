"""TRTLLMRollout: TensorRT-LLM as a rollout: its workers compute and sample, our thread answers requests.

Written against its documented LLM API (`AsyncLLM`, PyTorch backend, Ray orchestrator). It has never been run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.config.names import ROLLOUTS
from verl.inference.async_engine import AsyncEngine
from verl.inference.models.loading import end_tokens, read_model_config
from verl.models.loading import empty_model
from verl.types.request import Output, Request
from verl.utils.device import resolve_dtype
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.embedded_rollout import EmbeddedRollout
from verl.workers.rollout.log_prob_probe import require_log_probs_as_drawn
from verl.workers.rollout.served import Tell
from verl.workers.rollout.streamed_server import RestartingSteps, StreamedServer
from verl.workers.rollout.trtllm_rollout.engine_args import engine_arguments
from verl.workers.rollout.trtllm_rollout.environment import environment
from verl.workers.rollout.trtllm_rollout.source import TRTLLMSource
from verl.workers.rollout.trtllm_rollout.watch import watch_actors
from verl.workers.rollout.trtllm_rollout.weights import TRTLLMMemory, TRTLLMWeights

__all__ = ["TRTLLMRollout"]

logger = logging.getLogger(__name__)


class TRTLLMRollout(EmbeddedRollout):
    """An engine in `dtype` on the devices of this process; its workers are processes of Ray that it starts."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
    ) -> None:
        if find_spec("tensorrt_llm") is None:
            raise ImportError(f"TRTLLMRollout: tensorrt_llm is not installed. Run {ROLLOUTS['trtllm'].install}.")
        device = torch.device(device)
        dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
        hf_config = read_model_config(model_path, model_config)
        os.environ.update(environment(config, device))
        import tensorrt_llm
        from tensorrt_llm.llmapi import AsyncLLM

        logger.warning("rollout: TensorRT-LLM %s: no version of it was ever tried here.", tensorrt_llm.__version__)
        self._llm = AsyncLLM(**engine_arguments(model_path, model_config, config, dtype))
        text = hf_config.get_text_config(decoder=True)
        self._vocab, self._proven = int(text.vocab_size), False
        self._source = TRTLLMSource(self._llm, config.max_num_seqs, self._vocab)
        self._steps = RestartingSteps(self._connect, config.max_model_len, after_truncation=True)
        call = self._streams.call
        call(self._llm.setup_async())
        memory = TRTLLMMemory(self._llm, call)
        skeleton = empty_model(hf_config, "causal_lm", dtype, model_config.trust_remote_code)
        super().__init__(
            config,
            device,
            dtype,
            loop=AsyncEngine(
                self._steps, partial(hf_tokenizer, model_path, trust_remote_code=model_config.trust_remote_code)
            ),
            weights=TRTLLMWeights(self._llm, call, skeleton, dtype, memory),
            kv=memory,
            eos_token_ids=end_tokens(model_path, hf_config, model_config).ids,
            pad_token_id=text.pad_token_id,
        )

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        self._require_ready()
        if not self._proven:
            import tensorrt_llm

            self._proven = require_log_probs_as_drawn(
                f"TensorRT-LLM {tensorrt_llm.__version__}",
                lambda temperature, top_k: self._streams.call(self._source.top(temperature, top_k)),
                self._vocab,
                after_truncation=True,
                dtype=self.weight_dtype,
            )
        return super().submit(requests)

    def watch_processes(self, on_end: Callable[[str], None]) -> None:
        watch_actors(on_end)

    def close(self) -> None:
        super().close()
        self._steps.close()

    def _connect(self, tell: Tell) -> StreamedServer:
        self._streams = StreamedServer(self._source, tell)
        return self._streams
