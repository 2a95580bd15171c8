"""HFRollout: generation on a plain transformers model, for debugging and as the reference other engines are held to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.workers.rollout.base import (
    PAUSE_MODES,
    RELEASE_TAGS,
    BaseRollout,
    Output,
    Request,
    TensorSpec,
    WeightMismatchError,
    resolve_dtype,
)
from verl.workers.rollout.hf_runner import HFRunner
from verl.workers.rollout.request_loop import RequestLoop
from verl.workers.rollout.weights import EngineWeights

__all__ = ["HFRollout"]


class HFRollout(BaseRollout):
    """A model of its own in `dtype` on `device`, decoded with its KV cache by a thread of its own."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_config(config)
        self.config = config
        self.device = torch.device(device)
        self.weight_dtype = resolve_dtype(config.dtype, self.device) if dtype is None else dtype
        self.model = _load_model(model_path, model_config, config, self.device, self.weight_dtype)
        self.eos_token_ids = _eos_of(self.model)
        pad = self.model.config.get_text_config(decoder=True).pad_token_id
        self.pad_token_id = pad if isinstance(pad, int) else min(self.eos_token_ids, default=0)
        self._weights = EngineWeights(self.model, self.weight_dtype)
        self._released: set[str] = set()
        # Why no token may be sampled: no weights yet, or weights that are not the trainer's.
        self._unfit: str | None = None
        if config.load_format == "dummy":
            self._unfit = "load_format=dummy: the first weights come from the trainer, by an update."
        self._pending_version = 0
        runner = HFRunner(self.model, config.max_num_batched_tokens)
        self._loop = RequestLoop(runner, config.max_num_seqs, config.max_model_len)

    @property
    def version(self) -> int:
        return self._loop.version

    # ---------------------------------------------------------------- requests

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        if self._unfit:
            raise RuntimeError(f"rollout: the engine has no weights to generate with. {self._unfit}")
        if self._released:
            raise RuntimeError(f"rollout: {sorted(self._released)} are released. Call resume() before generating.")
        return self._loop.submit(requests)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        self._loop.abort(ids)

    def pause_generation(self, mode: str = "keep") -> None:
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause_generation: mode {mode!r} is unknown. Use one of {PAUSE_MODES}.")
        self._loop.pause(mode)

    def resume_generation(self) -> None:
        self._loop.unpause()

    # ---------------------------------------------------------------- weights

    def begin_update(self, version: int, manifest: Mapping[str, TensorSpec] | None) -> None:
        self._weights.check_manifest(manifest)
        self._loop.halt("update")
        self.resume(["weights"])
        self._pending_version = version
        self._unfit = f"An update to version {version} was begun and has not been finished."
        self._weights.begin()

    def load_bucket(self, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            self._weights.load(tensors)
        except WeightMismatchError as error:
            self._stop_with(error)
            raise

    def finish_update(self, fingerprint: Mapping[str, int]) -> None:
        try:
            self._weights.verify(fingerprint)
        except WeightMismatchError as error:
            self._stop_with(error)
            raise
        self._loop.recompute()
        self._loop.version = self._pending_version
        self._unfit = None
        self._loop.go("update")

    def _stop_with(self, error: WeightMismatchError) -> None:
        """Half of the weights may be new: whoever waits for an answer gets the error instead."""
        self._unfit = f"The update to version {self._pending_version} failed: {error}"
        self._loop.fail(error)
        self._loop.go("update")

    # ---------------------------------------------------------------- memory and life

    def release(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        _check_tags(tags)
        self._loop.halt("release")
        if "kv_cache" in tags:
            self._loop.recompute()
        if self.device.type == "cuda":
            if "weights" in tags and "weights" not in self._released:
                self._weights.offload()
            torch.cuda.empty_cache()
        self._released |= set(tags)

    def resume(self, tags: Sequence[str] = RELEASE_TAGS) -> None:
        _check_tags(tags)
        if "weights" in tags and "weights" in self._released:
            self._weights.onload()
        self._released -= set(tags)
        if not self._released:
            self._loop.go("release")

    def close(self) -> None:
        self._loop.close()


def _load_model(
    path: str, model_config: ModelConfig, config: RolloutConfig, device: torch.device, dtype: torch.dtype
) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    remote = {"trust_remote_code": model_config.trust_remote_code}
    settings = AutoConfig.from_pretrained(path, **remote)
    settings.update(model_config.override_config)
    if config.load_format == "dummy":
        # Throw-away values must not shift anyone's random numbers.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            model = AutoModelForCausalLM.from_config(settings, dtype=dtype, **remote)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, config=settings, dtype=dtype, **remote)
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"actor_rollout_ref.rollout.name: hf cannot decode {type(model).__name__}, whose state is no KV cache."
        )
    return model.to(device).eval().requires_grad_(False)


def _eos_of(model: Any) -> frozenset[int]:
    """End tokens as the model's generation config, or else its config, names them."""
    for settings in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        eos = getattr(settings, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def _check_config(config: RolloutConfig) -> None:
    if config.tensor_model_parallel_size > 1:
        raise ValueError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size: {config.tensor_model_parallel_size}; the hf engine"
            " runs on one device. Set it to 1."
        )
    if config.stop:
        raise ValueError(
            f"actor_rollout_ref.rollout.stop: {config.stop}; the hf engine works on token ids. Set stop_token_ids."
        )


def _check_tags(tags: Sequence[str]) -> None:
    unknown = set(tags) - set(RELEASE_TAGS)
    if isinstance(tags, str) or unknown:
        raise ValueError(f"release/resume: tags {tags!r}; give a list out of {RELEASE_TAGS}.")
