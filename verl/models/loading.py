"""Hugging Face models for training: their config, the model on the meta device or with its weights; ValueModel."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from verl.utils.torch_archive import read_archive

ModelKind: TypeAlias = Literal["causal_lm", "value", "sequence_classification"]
_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "value": "AutoModel",
    "sequence_classification": "AutoModelForSequenceClassification",
}

_CLASSIFIER_HEAD = "score.weight"


class ValueModel(nn.Module):
    """A transformer with a linear head of one value per token, with the parameter names of a token classifier.

    The head is initialized with 0, or with `score.weight` and `score.bias` of `head`.
    """

    def __init__(self, base: Any, head: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.config = base.config
        self.base_model_prefix = base.base_model_prefix or "model"
        setattr(self, self.base_model_prefix, base)
        self.score = nn.Linear(base.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)
        for name, value in (head or {}).items():
            parameter = self.get_parameter(name)
            if parameter.shape != value.shape:
                raise ValueError(
                    f"model.path: {name} of the checkpoint has shape {tuple(value.shape)}, but a value head needs "
                    f"{tuple(parameter.shape)}. Use a model with one label, or one without a head."
                )
            parameter.data.copy_(value)

    @property
    def base_model(self) -> Any:
        return getattr(self, self.base_model_prefix)


def read_config(path: str, trust_remote_code: bool = False, override_config: Mapping[str, Any] | None = None) -> Any:
    """Return the config of a model with `override_config` applied and dropout disabled unless it is overridden.

    With dropout, the log-probs of two passes differ, and the ratio of an unchanged policy is not 1.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not trust_remote_code:
        reject_hub_kernels(config, path)
    overrides = dict(override_config or {})
    disable_dropout(config, keep=overrides)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        # torch's fused attention has no soft-capping, which some versions of transformers ignore.
        overrides.setdefault("attn_implementation", "eager")
    for key, value in overrides.items():
        if not hasattr(config, key) and key != "attn_implementation":
            raise ValueError(
                f"model.override_config: {config.model_type} has no {key!r}. See {path}/config.json for its keys."
            )
        setattr(config, "_attn_implementation" if key == "attn_implementation" else key, value)
    return config


def disable_dropout(config: Any, keep: Mapping[str, Any] | None = None) -> None:
    """Set all dropout probabilities of a config to 0, except those named in `keep`."""
    names = ("dropout", "pdrop", "dropout_prob", "drop_rate")
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and key.endswith(names) and key not in (keep or {}):
                setattr(part, key, 0.0)


def empty_model(config: Any, kind: ModelKind, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """Return the model on the meta device, without memory for weights."""
    with torch.device("meta"):
        model = _auto_class(kind).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        return ValueModel(model).to(dtype) if kind == "value" else model


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks: the members of every ModuleList that is not inside another."""
    layers: list[nn.Module] = []
    for child in model.children():
        layers += list(child) if isinstance(child, nn.ModuleList) else outermost_layers(child)
    return layers


def pretrained_model(
    path: str, config: Any, kind: ModelKind, trust_remote_code: bool = False, trains: bool = False
) -> nn.Module:
    """Return the model with its weights in host memory, in their stored dtype.

    If a classifier is trained (`trains`), its checkpoint may lack a head (a causal LM); it is initialized with 0.
    """
    auto = _auto_class(kind)
    for file in sorted(Path(path).glob("*.bin")):
        if zipfile.is_zipfile(file):  # torch.load would decompress members of any size
            read_archive(file, lambda location: location, plain=True)
    model, loading_info = auto.from_pretrained(
        path, config=config, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True
    )
    missing = set(loading_info["missing_keys"])
    if trains and kind == "sequence_classification" and missing == {_CLASSIFIER_HEAD}:
        nn.init.zeros_(model.get_parameter(_CLASSIFIER_HEAD))
    elif missing:
        raise ValueError(
            f"model.path: {path} lacks weights of a {type(model).__name__}: {_list_names(missing)}. "
            "Use a checkpoint of this model class."
        )
    if kind == "value":
        return ValueModel(model, stored_head(path))
    return model


def stored_head(path: str) -> dict[str, torch.Tensor]:
    """Return the `score.*` tensors of a local checkpoint (of a critic or reward model); empty if it has none."""
    from safetensors import safe_open

    head = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            head.update({name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith("score.")})
    return head


def reject_hub_kernels(config: Any, path: str) -> None:
    """Raise ValueError if a config names an attention or experts implementation `owner/kernel`, which transformers
    would download and execute."""
    for name in ("_attn_implementation", "_experts_implementation"):
        for part in (config, config.get_text_config()):
            value = getattr(part, name, None)
            if isinstance(value, str) and "/" in value:
                raise ValueError(
                    f"{path}/config.json: {name.lstrip('_')} is {value!r}, code from a hub. Remove it, or set "
                    "trust_remote_code=True if you trust the model."
                )


def _auto_class(kind: ModelKind) -> Any:
    import transformers

    if kind not in _AUTO_CLASSES:
        raise ValueError(f"kind: {kind!r} is unknown. Use one of {', '.join(_AUTO_CLASSES)}.")
    return getattr(transformers, _AUTO_CLASSES[kind])


def _list_names(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
