"""vLLMRollout: vLLM in this process as a rollout: its engine makes the steps, our thread answers requests."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from verl.config import ModelConfig, RolloutConfig
from verl.inference.async_engine import AsyncEngine
from verl.inference.models.loading import end_tokens, read_model_config
from verl.models.loading import empty_model
from verl.utils.device import resolve_dtype
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import RELEASE_TAGS
from verl.workers.rollout.embedded_rollout import EmbeddedRollout
from verl.workers.rollout.vllm_rollout.engine_args import engine_arguments
from verl.workers.rollout.vllm_rollout.environment import environment
from verl.workers.rollout.vllm_rollout.step_engine import VllmStepEngine
from verl.workers.rollout.vllm_rollout.weights import SleepMode, VllmKV, VllmWeights

__all__ = ["vLLMRollout"]

logger = logging.getLogger(__name__)

_TESTED = ("0.24.0", "0.32.0")
# Its argument for what `return_routed_experts` asks for: newer versions have it, and only on some of their runners.
_EXPERTS = "enable_return_routed_experts"


class vLLMRollout(EmbeddedRollout):
    """A model of vLLM's in `dtype` on `device`. Tensor-parallel ranks are processes that vLLM starts."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        if find_spec("vllm") is None:
            raise ImportError("vLLMRollout: vllm is not installed. Run make setup-vllm, or pip install -e .[vllm].")
        device = torch.empty(0, device=device).device
        dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
        hf_config = read_model_config(model_path, model_config)
        os.environ.update(environment(config, device))
        arguments = engine_arguments(model_path, model_config, config, device, dtype)
        with _random_numbers_undisturbed():
            self._engine = _start(arguments)
        self._memory = SleepMode(self._engine, arguments["enable_sleep_mode"], config.free_weights)
        skeleton = empty_model(hf_config, "causal_lm", dtype, model_config.trust_remote_code)
        super().__init__(
            config,
            device,
            dtype,
            loop=AsyncEngine(
                VllmStepEngine(self._engine, device),
                partial(hf_tokenizer, model_path, trust_remote_code=model_config.trust_remote_code),
            ),
            weights=VllmWeights(self._engine, skeleton, dtype, device, self._memory),
            kv=VllmKV(self._engine, self._memory),
            eos_token_ids=end_tokens(model_path, hf_config, model_config).ids,
            pad_token_id=hf_config.get_text_config(decoder=True).pad_token_id,
        )

    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        super().release(tags)
        self._memory.settle()

    def close(self) -> None:
        super().close()
        self._engine.engine_core.shutdown()


def _start(arguments: dict[str, Any]) -> Any:
    """vLLM's engine. What it does not know, it refuses by itself."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if vllm.__version__.partition("+")[0] not in _TESTED:
        logger.warning("rollout: vLLM %s is not among the tested versions (%s).", vllm.__version__, ", ".join(_TESTED))
    if _EXPERTS in arguments and _EXPERTS not in EngineArgs.__dataclass_fields__:
        raise _says_no_experts(vllm.__version__, "it has no such option")
    try:
        engine_args = EngineArgs(**arguments)
    except TypeError as error:
        raise ValueError(f"engine_kwargs.vllm: {error}") from error
    try:
        return LLMEngine.from_engine_args(engine_args)
    except ValueError as error:
        if _EXPERTS in arguments and any(name in str(error) for name in ("AuxOutput", "routed-experts")):
            raise _says_no_experts(vllm.__version__, str(error)) from error
        raise


def _says_no_experts(version: str, why: str) -> ValueError:
    return ValueError(
        f"return_routed_experts: vLLM {version} does not say here which experts tokens go through ({why}). Set"
        " rollout.name=native, or replay the experts of the old log-probs (router_replay.mode=R2)."
    )


@contextmanager
def _random_numbers_undisturbed() -> Iterator[None]:
    """vLLM seeds the generators of its process, which may be a trainer's."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)
