"""Open a checkpoint folder: its format, its tensors, its LoRA adapters and the model they belong to."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.model_merger import MergeOptions
from verl.model_merger.formats import METADATA, core_folder, core_tensors, dcp_tensors, rank_files, shard_tensors
from verl.model_merger.lazy_tensors import AdaptedTensor, LazyTensor, folder_tensors
from verl.models.loading import ModelKind, reject_hub_kernels
from verl.models.lora import ADAPTER_FOLDER
from verl.utils.checkpoint.manifest import MANIFEST, damaged_files, read_manifest
from verl.workers.engine.common.checkpoint_compatibility import MODEL_JSON, stored_model_info

_KIND_BY_ARCHITECTURE: Mapping[str, ModelKind] = {
    "ForTokenClassification": "value",
    "ForSequenceClassification": "sequence_classification",
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to merge."""

    folder: Path
    tensors: Mapping[str, LazyTensor]
    """The model's weights, by their names in memory or on disk."""
    base: Mapping[str, LazyTensor]
    """Weights of the base model, if the checkpoint contains only trained weights."""
    adapters: StoredAdapters | None
    config: Any
    """The transformers config."""
    kind: ModelKind
    config_folder: Path | None
    """Folder with config.json, and possibly a tokenizer."""
    base_folder: Path | None
    """Local folder of the base model; None: not needed, and --base-model is not given."""
    base_model: str
    """Path or hub name of the base model of adapters; "" if unknown."""


def open_checkpoint(options: MergeOptions) -> Checkpoint:
    """Open the checkpoint; ValueError, with file and cause, if it cannot be merged."""
    folder = Path(options.local_dir).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--local_dir: {folder} is not a folder.")
    base = Path(_resolve_model(options.base_model, "--base-model")) if options.base_model else None
    is_verl_format = (folder / "model" / METADATA).is_file()
    files, core = rank_files(folder), core_folder(folder)
    _check_backend(options, folder, is_verl_format, bool(files), core is not None)
    info = stored_model_info(folder) if is_verl_format else {}
    config_folder = _config_folder(folder, base)
    config = merged_config(config_folder, info, options)
    kind = _kind(config, info, options)
    if is_verl_format:
        _check_files(folder)
        tensors = dcp_tensors(folder / "model")
    else:
        tensors = shard_tensors(files) if files else core_tensors(core or folder, config, kind)
    plain, adapters = split_adapters(tensors)
    base_model = options.base_model or ""
    if adapters is not None:
        adapters, base_model = _with_settings(adapters, folder, info, options)
        if is_verl_format:  # contains only trained weights
            adapters = replace(adapters, heads=plain)
            if options.lora == "merge":
                base = Path(_resolve_model(base_model, "--base-model"))
                tensors, source = folder_tensors(base), config_folder or base
                return Checkpoint(folder, plain, tensors, adapters, config, kind, source, base, base_model)
    return Checkpoint(folder, plain, {}, adapters, config, kind, config_folder, base, base_model)


def _check_backend(options: MergeOptions, folder: Path, is_verl_format: bool, shards: bool, core: bool) -> None:
    if not (is_verl_format or shards or core):
        inside = sorted(path.parent.parent.name for path in folder.glob(f"*/model/{METADATA}"))
        inside += sorted({path.parent.name for path in folder.glob("*/model_world_size_*.pt")})
        hint = f"Use one of its folders {', '.join(inside)}." if inside else "Use the folder of a role, e.g. .../actor."
        raise ValueError(
            f"--local_dir: {folder} has neither model/{METADATA} (verl), nor model_world_size_W_rank_R.pt (FSDP), nor "
            f"{METADATA} and common.pt (Megatron-Core). {hint}"
        )
    other = {"fsdp": "megatron", "megatron": "fsdp"}[options.backend]
    if not is_verl_format and (core if options.backend == "fsdp" else shards):
        raise ValueError(f"--backend: {folder} was written by {other}. Set --backend {other}.")


def _resolve_model(path: str, key: str) -> str:
    from verl.utils.fs import resolve_model_path

    if not path:
        raise ValueError(f"{key}: the checkpoint contains only adapters and does not name their base model. Set it.")
    return resolve_model_path(path, key)


def _config_folder(folder: Path, base: Path | None) -> Path | None:
    candidates = [folder / "huggingface", folder, folder.parent / "huggingface", *([base] if base is not None else [])]
    return next((candidate for candidate in candidates if (candidate / "config.json").is_file()), None)


def merged_config(config_folder: Path | None, info: Mapping[str, Any], options: MergeOptions) -> Any:
    from transformers import AutoConfig

    if config_folder is not None:
        config = AutoConfig.from_pretrained(config_folder, trust_remote_code=options.trust_remote_code)
        if not options.trust_remote_code:
            reject_hub_kernels(config, str(config_folder))
    elif info.get("config"):
        fields = dict(info["config"])
        config = type(AutoConfig.for_model(fields.pop("model_type"))).from_dict(fields)
    else:
        raise ValueError(
            f"--local_dir: {options.local_dir} has no config.json and no folder huggingface with one. Set "
            "--base-model to the model it was trained from."
        )
    if options.tie_word_embedding:
        config.tie_word_embeddings = True
    return config


def _kind(config: Any, info: Mapping[str, Any], options: MergeOptions) -> ModelKind:
    stored = info.get("kind")
    if stored is None:
        names = config.architectures or [""]
        by_name: ModelKind = next(
            (kind for ending, kind in _KIND_BY_ARCHITECTURE.items() if names[0].endswith(ending)), "causal_lm"
        )
        return "value" if options.is_value_model else by_name
    if options.is_value_model and stored != "value":
        raise ValueError(f"--is-value-model: {options.local_dir}/{MODEL_JSON} describes a {stored} model. Remove it.")
    return stored


def _check_files(folder: Path) -> None:
    """Raise ValueError, which lists all files that are missing or truncated according to the step's manifest."""
    step = next((parent for parent in (folder, folder.parent) if (parent / MANIFEST).is_file()), None)
    if step is None:
        return
    manifest, inside = read_manifest(step), (folder / "model").relative_to(step).as_posix() + "/"
    files = {name: record for name, record in manifest.files.items() if name.startswith(inside)}
    problems = damaged_files(step, replace(manifest, files=files), contents=False)
    if problems:
        raise ValueError(f"{step}: {'; '.join(problems)}. Copy the whole checkpoint again.")


def _with_settings(
    adapters: StoredAdapters, folder: Path, info: Mapping[str, Any], options: MergeOptions
) -> tuple[StoredAdapters, str]:
    """Return the adapters with the settings of the checkpoint and the command line, and their base model."""
    settings = stored_settings(folder / ADAPTER_FOLDER, folder, folder / "huggingface")
    if info.get("lora"):
        settings = {"r": info["lora"]["lora_rank"], "lora_alpha": info["lora"]["lora_alpha"]} | settings
    if options.lora_alpha is not None:
        settings["lora_alpha"] = options.lora_alpha
    return replace(adapters, settings=settings), options.base_model or settings.get("base_model_name_or_path") or ""


PREFIX = "base_model.model."
ADAPTER_CONFIG = "adapter_config.json"
_MATRIX = re.compile(r"(.+)\.lora_([AB])\.(?:[^.]+\.)?weight")
# peft's copies of fully trained modules.
_TRAINED_MODULE = re.compile(r"(.+)\.modules_to_save\.[^.]+\.(.+)")
_TASKS = {"causal_lm": "CAUSAL_LM", "value": "TOKEN_CLS", "sequence_classification": "SEQ_CLS"}
# Settings of peft with which a merged weight is not base + scale * B A.
_UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "lora_bias")


@dataclass
class StoredAdapters:
    """LoRA matrices and fully trained weights of a checkpoint, by the names of the model without adapters."""

    matrices: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    """"A" [rank, in] and "B" [out, rank] by layer."""
    heads: dict[str, LazyTensor] = field(default_factory=dict)
    """Fully trained weights."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Known fields of adapter_config.json."""

    def scale(self, layer: str) -> float:
        """Return the scale of the product of a layer's matrices; ValueError if unknown or unsupported."""
        unsupported = [key for key in _UNSUPPORTED if self.settings.get(key)]
        if unsupported:
            raise ValueError(
                f"{ADAPTER_CONFIG}: {unsupported[0]} cannot be merged. Keep the adapter with --lora adapter."
            )
        rank = self.matrices[layer]["A"].shape[0]
        return self._alpha() / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _alpha(self) -> float:
        alpha = self.settings.get("lora_alpha")
        if alpha is None:
            raise ValueError(f"adapters: there is no {ADAPTER_CONFIG} with lora_alpha. Set --lora-alpha.")
        return float(alpha)

    def merged(self, layer: str, base: LazyTensor, transposed: bool) -> AdaptedTensor:
        """Return the weight of a layer merged with its adapter; `transposed`: it is [in, out]."""
        pair = self.matrices[layer]
        return AdaptedTensor(base, pair["A"], pair["B"], self.scale(layer), transposed)

    def peft_tensors(self) -> dict[str, LazyTensor]:
        """Return all tensors by their names in adapter_model.safetensors."""
        matrices = {
            f"{PREFIX}{layer}.lora_{side}.weight": pair[side] for layer, pair in self.matrices.items() for side in "AB"
        }
        return matrices | {f"{PREFIX}{name}": value for name, value in self.heads.items()}

    def peft_config(self, kind: ModelKind, base_model: str) -> dict[str, Any]:
        """Return the contents of adapter_config.json; `settings` take precedence. ValueError: lora_alpha is unknown."""
        defaults = {
            "peft_type": "LORA",
            "task_type": _TASKS[kind],
            "r": next(iter(self.matrices.values()))["A"].shape[0],
            "lora_alpha": self._alpha(),
            "target_modules": sorted(self.matrices),
            "modules_to_save": sorted({name.partition(".")[0] for name in self.heads}) or None,
            "inference_mode": True,
        }
        return {**defaults, **self.settings, "base_model_name_or_path": base_model}


def split_adapters(tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], StoredAdapters | None]:
    """Return the weights by their names without adapters, and the adapters, if any."""
    plain: dict[str, LazyTensor] = {}
    adapters = StoredAdapters()
    for full, value in tensors.items():
        name = full.removeprefix(PREFIX)
        if matrix := _MATRIX.fullmatch(name):
            adapters.matrices.setdefault(matrix[1], {})[matrix[2]] = value
        elif trained := _TRAINED_MODULE.fullmatch(name):
            adapters.heads[f"{trained[1]}.{trained[2]}"] = value
        else:
            plain.setdefault(name.replace(".base_layer.", ".").replace(".original_module.", "."), value)
    single = sorted(layer for layer, pair in adapters.matrices.items() if len(pair) == 1)
    if single:
        raise ValueError(f"adapters: {single[0]} has only one of its two matrices: the checkpoint is incomplete.")
    return {**plain, **adapters.heads}, adapters if adapters.matrices else None


def stored_settings(*folders: Path) -> dict[str, Any]:
    """Return adapter_config.json of the first folder that has one; {} if none has."""
    file = next((folder / ADAPTER_CONFIG for folder in folders if (folder / ADAPTER_CONFIG).is_file()), None)
    return json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
