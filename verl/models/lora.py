"""LoRA adapters (peft, arXiv 2106.09685) in a Hugging Face model: inject, initialize, disable, merge, save.

Adapters are injected into the linear layers of the model, whose class does not change. The weight of a layer `q_proj`
is then `q_proj.base_layer.weight`; the *plain name* of a tensor is its name without adapters (`q_proj.weight`).
"""

from __future__ import annotations

import copy
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from verl.config.block_rules import ALL_LINEAR, module_matcher
from verl.config.problems import install_command
from verl.models.loading import ModelKind

ADAPTER_FOLDER = "lora_adapter"
"""Folder of a checkpoint with the adapters in peft's format."""

_NAME = "default"  # peft's name of the only adapter
_BASE = ".base_layer."
_TASKS = {"causal_lm": "CAUSAL_LM", "value": "TOKEN_CLS", "sequence_classification": "SEQ_CLS"}


class Adapters:
    """The adapters of one model. They, and the head of a value model or classifier, are float32 and trained; all other
    weights are frozen.

    `hf` is modified in place and may be on the meta device; `initialize` sets the initial values of the adapters.
    """

    def __init__(self, hf: Any, kind: ModelKind, model_config: Any) -> None:
        """`model_config`: a config block with `lora_rank`, `lora_alpha`, `target_modules`, `exclude_modules`."""
        peft = _peft()
        linears, alpha = linear_layers(hf), model_config.lora_alpha
        targets = module_matcher(model_config.target_modules)
        self.config: Any = peft.LoraConfig(
            r=model_config.lora_rank,
            lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
            target_modules=list(linears) if targets == ALL_LINEAR else targets,
            exclude_modules=module_matcher(model_config.exclude_modules),
            fan_in_fan_out=any(not isinstance(layer, nn.Linear) for layer in linears.values()),
            task_type=_TASKS[kind],
        )
        try:
            peft.inject_adapter_in_model(self.config, hf, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ValueError(f"model.target_modules: {error} {_known_layers(linears)}") from error
        self._layers: dict[str, Any] = {
            name: module for name, module in hf.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)
        }
        self._check_mergeable(peft, linears)
        self._train_only_adapters(hf, () if kind == "causal_lm" else ("score",))

    # ---------------------------------------------------------------- names

    def plain_name(self, name: str) -> str | None:
        """Return the plain name of a tensor; None for a tensor of an adapter."""
        layer, separator, tensor = name.partition(_BASE)
        if separator and layer in self._layers:
            return f"{layer}.{tensor}"
        return None if name in self.adapter_names else name

    def plain(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the `tensors` by plain name, without those of adapters."""
        return {plain: value for name, value in tensors.items() if (plain := self.plain_name(name)) is not None}

    def trained(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the trained `tensors`: the contents of a checkpoint, in addition to the base model."""
        return {name: tensors[name] for name in sorted(self._trained)}

    # ---------------------------------------------------------------- values

    def initialize(self, assign: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Initialize the adapters by `assign(parameter, full value)`: A uniform as in peft, B zero.

        The random values depend only on the name of a tensor, so they are the same on any number of ranks.
        """
        for name, layer in self._layers.items():
            down, up = _matrices(layer)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bound = 1.0 / math.sqrt(down.shape[1])
            assign(down, torch.empty(down.shape).uniform_(-bound, bound, generator=generator))
            assign(up, torch.zeros(up.shape))

    def matrices(self, plain_name: str) -> tuple[str, str]:
        """Return the names of the matrices A and B of a weight."""
        layer = plain_name.removesuffix(".weight")
        return f"{layer}.lora_A.{_NAME}.weight", f"{layer}.lora_B.{_NAME}.weight"

    def merged(self, plain_name: str, base: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the weight `base` plus the scaled product of its adapter's matrices, in float32; all unsharded."""
        layer = self._layers[plain_name.removesuffix(".weight")]
        product = (up.float() @ down.float()) * layer.scaling[_NAME]
        return base.float() + (product.T if layer.fan_in_fan_out else product)

    @property
    def layers(self) -> frozenset[str]:
        """Names of the layers with adapters."""
        return frozenset(self._layers)

    def scale(self, layer: str) -> float:
        """Return the factor by which the product of a layer's matrices is multiplied."""
        return float(self._layers[layer].scaling[_NAME])

    def has_adapter(self, plain_name: str) -> bool:
        """Whether the weight with this name has an adapter."""
        return plain_name.endswith(".weight") and plain_name.removesuffix(".weight") in self._layers

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Context in which the model computes only with its base weights."""
        # peft's method also changes requires_grad, which FSDP does not support.
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False

    # ---------------------------------------------------------------- files

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be equal to load trained adapters."""
        modules = sorted({name.rpartition(".")[2] for name in self._layers})
        return {"lora_rank": self.config.r, "lora_alpha": self.config.lora_alpha, "target_modules": modules}

    def peft_config(self, source: str) -> Any:
        """Return the contents of adapter_config.json for the adapters of a model loaded from `source`."""
        config = copy.deepcopy(self.config)
        config.base_model_name_or_path = source
        config.inference_mode = True
        for key in ("target_modules", "exclude_modules"):
            names = getattr(config, key)
            setattr(config, key, sorted(names) if isinstance(names, set) else names)
        heads = sorted({name.partition(".")[0] for name in self._trained - self.adapter_names})
        config.modules_to_save = heads or None
        return config

    def peft_name(self, name: str) -> str:
        """Return the name of a trained tensor in files of peft."""
        return "base_model.model." + name.replace(f".{_NAME}.", ".")

    # ---------------------------------------------------------------- parts

    def _check_mergeable(self, peft: Any, linears: Mapping[str, nn.Module]) -> None:
        unsupported = [
            name
            for name, layer in self._layers.items()
            if name not in linears or type(layer) is not peft.tuners.lora.Linear
        ]
        if unsupported:
            names = sorted({name.rpartition(".")[2] for name in linears})
            raise ValueError(
                f"model.target_modules: {unsupported[0]} is not a linear layer below the output layer; only these can "
                f"have adapters. Set target_modules to some of [{','.join(names)}], or leave it out."
            )

    def _train_only_adapters(self, hf: nn.Module, heads: Sequence[str]) -> None:
        hf.requires_grad_(False)
        for layer in self._layers.values():
            for module in (layer.lora_A, layer.lora_B):
                module.float().requires_grad_(True)
        for head in heads:
            hf.get_submodule(head).float().requires_grad_(True)
        self._trained = {name for name, parameter in hf.named_parameters() if parameter.requires_grad}
        self.adapter_names = {name for name in self._trained if name.partition(".")[0] not in heads}


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            "model.lora_rank: LoRA needs the package peft, which is not installed. "
            f"Run `{install_command('pip install -e .[lora]')}`, or set lora_rank to 0."
        ) from error
    return peft


def _matrices(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(A [rank, inputs], B [outputs, rank])."""
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight


def linear_shape(layer: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear layer."""
    outputs, inputs = layer.weight.shape
    return (outputs, inputs) if isinstance(layer, nn.Linear) else (inputs, outputs)


def adapter_parameters(hf: Any, kind: ModelKind, model_config: Any) -> int:
    """Return the number of parameters that `Adapters` would train; peft need not be installed."""
    linears, excluded = linear_layers(hf), module_matcher(model_config.exclude_modules)
    targets = module_matcher(model_config.target_modules)
    sizes = [
        sum(layer.weight.shape)
        for name, layer in linears.items()
        if (targets == ALL_LINEAR or _matches(name, targets)) and not _matches(name, excluded)
    ]
    if not sizes:
        raise ValueError(f"model.target_modules: no layer matches {targets}. {_known_layers(linears)}")
    heads = () if kind == "causal_lm" else hf.score.parameters()
    return model_config.lora_rank * sum(sizes) + sum(value.numel() for value in heads)


def _matches(name: str, pattern: str | list[str] | None) -> bool:
    """Whether peft selects the module `name`: by an expression for the whole name, or by the ends of names."""
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in pattern or ())


def _known_layers(linears: Mapping[str, nn.Module]) -> str:
    names = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
    return f"The model's linear layers are {names}."


def linear_layers(hf: Any) -> dict[str, nn.Module]:
    """Return all linear layers except the output head, by name: the meaning of `all-linear`."""
    from transformers.pytorch_utils import Conv1D

    body = {id(module) for module in hf.base_model.modules()}
    return {
        name: module
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) in body
    }
