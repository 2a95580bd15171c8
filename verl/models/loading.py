"""Hugging Face models for training: their config, an empty copy on the meta device, and the real weights."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from verl.models.heads import ValueModel
from verl.utils.torch_archive import read_archive

ModelKind: TypeAlias = Literal["causal_lm", "value", "sequence_classification"]
_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "value": "AutoModel",
    "sequence_classification": "AutoModelForSequenceClassification",
}

_HEAD = "score.weight"  # of a decoder that classifies


def read_config(path: str, trust_remote_code: bool = False, override_config: Mapping[str, Any] | None = None) -> Any:
    """The model's own config with `override_config` on top, and dropout off.

    Dropout would give every token another probability each time it is looked at: the ratio of an unchanged policy
    would not be 1. Set it in `override_config` to have it.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not trust_remote_code:
        refuse_hub_kernels(config, path)
    overrides = dict(override_config or {})
    switch_dropout_off(config, keep=overrides)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        # torch's fused attention has no soft-capping, and not every transformers version knows that.
        overrides.setdefault("attn_implementation", "eager")
    for key, value in overrides.items():
        if not hasattr(config, key) and key != "attn_implementation":
            raise ValueError(
                f"model.override_config: {config.model_type} has no {key!r}. Look into {path}/config.json for its keys."
            )
        setattr(config, "_attn_implementation" if key == "attn_implementation" else key, value)
    return config


def switch_dropout_off(config: Any, keep: Mapping[str, Any] | None = None) -> None:
    """Every dropout probability of a config becomes 0, except those named in `keep`."""
    names = ("dropout", "pdrop", "dropout_prob", "drop_rate")
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and key.endswith(names) and key not in (keep or {}):
                setattr(part, key, 0.0)


def empty_model(config: Any, kind: ModelKind, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """The model on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        model = _auto_class(kind).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        return ValueModel(model).to(dtype) if kind == "value" else model


def pretrained_model(
    path: str, config: Any, kind: ModelKind, trust_remote_code: bool = False, learns: bool = False
) -> nn.Module:
    """The model with its weights in host memory, in the dtype they are stored in.

    A classifier that `learns` may begin without a head (as a causal LM): it starts at 0, where all texts score alike.
    """
    auto = _auto_class(kind)
    for file in sorted(Path(path).glob("*.bin")):
        if zipfile.is_zipfile(file):  # torch.load would inflate what is compressed, whatever its size
            read_archive(file, lambda place: place, plain=True)
    model, found = auto.from_pretrained(
        path, config=config, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True
    )
    missing = set(found["missing_keys"])
    if learns and kind == "sequence_classification" and missing == {_HEAD}:
        nn.init.zeros_(model.get_parameter(_HEAD))
    elif missing:
        raise ValueError(
            f"model.path: {path} lacks weights of a {type(model).__name__}: {_some(missing)}. "
            "Give a checkpoint of that kind of model."
        )
    if kind == "value":
        return ValueModel(model, stored_head(path))
    return model


def stored_head(path: str) -> dict[str, torch.Tensor]:
    """`score.*` tensors of a local checkpoint (a critic's, or a reward model's); empty where there are none."""
    from safetensors import safe_open

    head = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            head.update({name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith("score.")})
    return head


def refuse_hub_kernels(config: Any, path: str) -> None:
    """A config can name an attention or experts implementation `owner/kernel`, which transformers fetches and runs."""
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


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
