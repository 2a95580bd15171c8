"""LoRA adapters (peft) in a Hugging Face model: put in, started, switched off, added to its weights, written alone.

Adapters stand inside the model's own linear layers, so that it stays the class that transformers made. A layer
`q_proj` then holds its weight as `q_proj.base_layer.weight`; the *plain name* of a tensor is the one it has without
adapters (`q_proj.weight`). See arXiv:2106.09685.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from verl.config.block_rules import ALL_LINEAR, module_matcher
from verl.models.loading import ModelKind

ADAPTER_FOLDER = "lora_adapter"
"""Where a checkpoint holds the adapters in peft's own format."""

_NAME = "default"  # what peft calls an adapter without a name
_BASE = ".base_layer."
_TASKS = {"causal_lm": "CAUSAL_LM", "value": "TOKEN_CLS", "sequence_classification": "SEQ_CLS"}


class Adapters:
    """The adapters of one model. They (and the head of a value model or classifier) are float32 and trained; all other
    weights are frozen.

    `hf` is changed in place and may be on the meta device; `start` gives its adapters their first values.
    """

    def __init__(self, hf: Any, kind: ModelKind, model_config: Any) -> None:
        """`model_config`: a block with `lora_rank`, `lora_alpha`, `target_modules` and `exclude_modules`."""
        peft = _peft()
        linears, alpha = _linear_layers(hf), model_config.lora_alpha
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
            names = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise ValueError(f"model.target_modules: {error} The model's linear layers are {names}.") from error
        self._layers: dict[str, Any] = {
            name: module for name, module in hf.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)
        }
        self._refuse_what_cannot_be_merged(peft, linears)
        self._train_only_adapters(hf, () if kind == "causal_lm" else ("score",))

    # ---------------------------------------------------------------- names

    def plain_name(self, name: str) -> str | None:
        """The name of a tensor of the model without adapters; None for a tensor of an adapter."""
        layer, inside, rest = name.partition(_BASE)
        if inside and layer in self._layers:
            return f"{layer}.{rest}"
        return None if name in self._own else name

    def plain(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors` of the model by plain name, without those of adapters."""
        return {plain: value for name, value in tensors.items() if (plain := self.plain_name(name)) is not None}

    def trained(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of `tensors` that learn: all that a checkpoint must hold beside the base model."""
        return {name: tensors[name] for name in sorted(self._trained)}

    # ---------------------------------------------------------------- values

    def start(self, put: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Give every adapter its first value by `put(parameter, whole value)`: A uniform as peft draws it, B zero.

        The noise depends on the name of a tensor alone: every rank draws the same, however many there are.
        """
        for name, layer in self._layers.items():
            down, up = _matrices(layer)
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bound = 1.0 / math.sqrt(down.shape[1])
            put(down, torch.empty(down.shape).uniform_(-bound, bound, generator=draw))
            put(up, torch.zeros(up.shape))

    def matrices(self, plain_name: str) -> tuple[str, str]:
        """The names of A and B that stand beside a weight."""
        layer = plain_name.removesuffix(".weight")
        return f"{layer}.lora_A.{_NAME}.weight", f"{layer}.lora_B.{_NAME}.weight"

    def merged(self, plain_name: str, base: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """`base`, a weight that has an adapter, plus the product of the adapter's matrices in float32; all of them
        whole."""
        layer = self._layers[plain_name.removesuffix(".weight")]
        product = (up.float() @ down.float()) * layer.scaling[_NAME]
        return base.float() + (product.T if layer.fan_in_fan_out else product)

    def has(self, plain_name: str) -> bool:
        """Whether that weight has an adapter."""
        return plain_name.endswith(".weight") and plain_name.removesuffix(".weight") in self._layers

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it the model computes with its base weights alone."""
        # peft's own switch also takes requires_grad away, which a sharded parameter remembers for good.
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False

    # ---------------------------------------------------------------- files

    def about(self) -> dict[str, Any]:
        """What must be the same for trained adapters to mean the same."""
        modules = sorted({name.rpartition(".")[2] for name in self._layers})
        return {"lora_rank": self.config.r, "lora_alpha": self.config.lora_alpha, "target_modules": modules}

    def peft_config(self, source: str) -> Any:
        """The configuration that belongs beside the adapters of a model loaded from `source`."""
        config = copy.deepcopy(self.config)
        config.base_model_name_or_path = source
        config.inference_mode = True
        for key in ("target_modules", "exclude_modules"):
            names = getattr(config, key)
            setattr(config, key, sorted(names) if isinstance(names, set) else names)
        heads = sorted({name.partition(".")[0] for name in self._trained - self._own})
        config.modules_to_save = heads or None
        return config

    def peft_name(self, name: str) -> str:
        """What peft calls a trained tensor in its files."""
        return "base_model.model." + name.replace(f".{_NAME}.", ".")

    # ---------------------------------------------------------------- parts

    def _refuse_what_cannot_be_merged(self, peft: Any, linears: Mapping[str, nn.Module]) -> None:
        odd = [
            name
            for name, layer in self._layers.items()
            if name not in linears or type(layer) is not peft.tuners.lora.Linear
        ]
        if odd:
            names = sorted({name.rpartition(".")[2] for name in linears})
            raise ValueError(
                f"model.target_modules: {odd[0]} is not a linear layer of the model's body; adapters stand in those "
                f"only. Set target_modules to some of [{','.join(names)}], or leave it out."
            )

    def _train_only_adapters(self, hf: nn.Module, heads: Sequence[str]) -> None:
        hf.requires_grad_(False)
        for layer in self._layers.values():
            for module in (layer.lora_A, layer.lora_B):
                module.float().requires_grad_(True)
        for head in heads:
            hf.get_submodule(head).float().requires_grad_(True)
        self._trained = {name for name, parameter in hf.named_parameters() if parameter.requires_grad}
        self._own = {name for name in self._trained if name.partition(".")[0] not in heads}


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            "model.lora_rank: LoRA needs the package peft, which is not installed. "
            "Run `pip install -e .[lora]`, or set lora_rank to 0."
        ) from error
    return peft


def _matrices(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(A [rank, inputs], B [outputs, rank])."""
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight


def _linear_layers(hf: Any) -> dict[str, nn.Module]:
    """All linear layers but the head on top, by name: what `all-linear` means."""
    from transformers.pytorch_utils import Conv1D

    body = {id(module) for module in hf.base_model.modules()}
    return {
        name: module
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) in body
    }
