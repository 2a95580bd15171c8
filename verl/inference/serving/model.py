"""ModelLoader: the model options of a server's command line, and the engine or classifier they load."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.config.context_length import context_limit
from verl.inference.async_engine import AsyncEngine
from verl.inference.serving.openai_requests import ModelInfo
from verl.types.request import Request
from verl.utils.fs import resolve_model_path
from verl.utils.tokenizer import hf_tokenizer, longest_token

if TYPE_CHECKING:
    from verl.inference.build import BuiltEngine
    from verl.inference.lora import LoraRegistry
    from verl.inference.serving.scoring import Classifier

__all__ = ["LoadedModel", "ModelLoader"]

logger = logging.getLogger(__name__)

_OFFLOADED = "offloaded"


@dataclass(frozen=True)
class LoadedModel:
    """A loaded engine with the tokenizer and limits that a server needs."""

    engine: AsyncEngine
    check: Callable[[Request], None]
    """Raises ValueError for a request that the engine can never run."""
    model_info: ModelInfo
    tokenizer: Any
    description: str
    """The model, its dtype and device, for the log."""
    offload: Callable[[], None]
    """Free the device memory; requests wait until `onload`."""
    onload: Callable[[], None]
    loras: LoraRegistry | None = None
    """The LoRA adapters that requests may select; None without --enable-lora."""


class ModelLoader:
    """Loads the model that the options name. Creating the loader reads only the config of the model."""

    def __init__(self, options: argparse.Namespace, task: str = "generate") -> None:
        """`task`: generate, classify, or auto: classify if the model is a sequence classifier."""
        from verl.inference.build import read_hf_config

        self._options = options
        self._path = resolve_model_path(options.model, "--model")
        values = {"path": self._path, "trust_remote_code": options.trust_remote_code}
        self._config = as_config(ModelConfig, values, at="actor_rollout_ref.model")
        self._hf_config = read_hf_config(self._path, self._config)
        architectures = self._hf_config.architectures or ()
        is_classifier = any(name.endswith("ForSequenceClassification") for name in architectures)
        self.task = ("classify" if is_classifier else "generate") if task == "auto" else task
        self._max_model_len = _resolve_max_model_len(options.max_model_len, self._hf_config)
        self.load_tokenizer = partial(hf_tokenizer, self._path, trust_remote_code=options.trust_remote_code)

    @contextlib.contextmanager
    def load_engine(self, max_responses: int, client_templates: bool) -> Iterator[LoadedModel]:
        """Load the engine, which runs until the context exits."""
        from verl.inference.build import build_engine
        from verl.inference.lora import AdapterOptions, LoraRegistry
        from verl.utils.device import get_device_name, resolve_dtype

        options, max_model_len = self._options, self._max_model_len
        device = get_device_name() if options.device == "auto" else options.device
        dtype = resolve_dtype(options.dtype, device)
        adapters, named_adapters = None, _named_adapters(options)
        if named_adapters is not None:
            adapters = AdapterOptions(options.max_lora_rank, options.max_loras, shared=False)
        config = engine_config(options, max_model_len)
        built = build_engine(self._path, self._config, config, device, dtype, adapters)
        tokenizer = self.load_tokenizer()
        logger.info(built.end_tokens.describe(tokenizer))
        model_info = ModelInfo(
            _names(options),
            max_model_len,
            built.model.vocab_size,
            built.end_tokens.ids,
            max_responses=max_responses,
            client_templates=client_templates,
            longest_token=longest_token(tokenizer),
        )
        # A separate tokenizer for stop strings: the engine uses it in its own thread.
        with contextlib.closing(AsyncEngine(built.engine, self.load_tokenizer)) as engine:
            description = f"{model_info.names[0]} ({built.dtype}, {built.device})"
            offload, onload = partial(_offload, engine, built), partial(_onload, engine, built)
            loras = None
            if built.model.adapters is not None:
                loras = LoraRegistry(engine, built.model.adapters, model_info.names)
                for name, path in named_adapters or ():
                    loras.load(name, path)
            yield LoadedModel(engine, built.engine.check, model_info, tokenizer, description, offload, onload, loras)

    @contextlib.contextmanager
    def load_classifier(self, max_responses: int) -> Iterator[tuple[Classifier, ModelInfo, str]]:
        """Load a sequence classifier; yields it, the limits for requests, and a description for the log."""
        from verl.inference.serving.scoring import Classifier
        from verl.models.loading import pretrained_model
        from verl.utils.device import get_device_name, resolve_dtype

        if _named_adapters(self._options) is not None:
            raise ValueError("--enable-lora: this model is a classifier, which has no adapters. Leave it out.")
        options, tokenizer = self._options, self.load_tokenizer()
        device = get_device_name() if options.device == "auto" else options.device
        dtype = resolve_dtype(options.dtype, device)
        module = pretrained_model(
            self._path, self._hf_config, "sequence_classification", self._config.trust_remote_code
        )
        model_info = ModelInfo(
            _names(options),
            self._max_model_len,
            self._hf_config.get_text_config().vocab_size,
            frozenset(),
            max_responses=max_responses,
            client_templates=False,
            longest_token=longest_token(tokenizer),
        )
        with contextlib.closing(Classifier(module.to(device, dtype), options.max_num_batched_tokens)) as classifier:
            yield classifier, model_info, f"{model_info.names[0]} ({dtype}, {device}, {classifier.num_labels} labels)"


def _offload(engine: AsyncEngine, built: BuiltEngine) -> None:
    import torch

    engine.halt(_OFFLOADED)
    engine.invalidate_kv_cache()
    built.kv.release()
    if built.device.type == "cuda":  # on a CPU the weights are in host memory already
        built.weights.offload()
        torch.cuda.empty_cache()


def _onload(engine: AsyncEngine, built: BuiltEngine) -> None:
    import torch

    if built.device.type == "cuda":
        built.weights.onload()
    built.kv.restore()
    if built.device.type == "cuda":
        torch.cuda.current_stream(built.device).synchronize()  # steps run in another thread, on another stream
    engine.resume(_OFFLOADED)


def engine_config(options: Any, max_model_len: int) -> RolloutConfig:
    """The configuration of a serving engine; `options` are those of a server, or `reward_model.rollout`."""
    return as_config(
        RolloutConfig,
        {
            "max_model_len": max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "enforce_eager": options.enforce_eager,
            "free_weights": False,
        },
    )


def _named_adapters(options: argparse.Namespace) -> list[tuple[str, str]] | None:
    """The names and folders of --lora-modules; None without --enable-lora (which the gateway does not have)."""
    if not getattr(options, "enable_lora", False):
        if getattr(options, "lora_modules", None) or getattr(options, "lora_root", None):
            raise ValueError("--lora-modules, --lora-root: LoRA is off. Add --enable-lora.")
        return None
    adapters = []
    for text in options.lora_modules:
        name, _, path = text.partition("=")
        if not (name and path):
            raise ValueError(f"--lora-modules: {text!r} is not NAME=PATH.")
        adapters.append((name, path))
    return adapters


def _names(options: argparse.Namespace) -> tuple[str, ...]:
    """Names that clients may use for the model: the value of --model, or its folder's name."""
    if options.served_model_name:
        return (options.served_model_name,)
    return tuple(dict.fromkeys((options.model, os.path.basename(options.model.rstrip("/")))))


def _resolve_max_model_len(requested: int | None, hf_config: Any) -> int:
    """The requested context length, else the model's limit."""
    limit = context_limit(hf_config.get_text_config(decoder=True).to_dict()) or requested
    if limit is None:
        raise ValueError(f"--max-model-len: the config of this {hf_config.model_type} model has no limit. Set it.")
    if requested is not None and requested > limit:
        raise ValueError(f"--max-model-len: {requested} is more than the {limit} positions of this model. Lower it.")
    return requested or limit
