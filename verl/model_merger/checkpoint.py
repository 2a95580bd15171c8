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
from verl.model_merger.lazy_tensors import Adapted, Stored, folder_tensors
from verl.models.loading import ModelKind, refuse_hub_kernels
from verl.models.lora import ADAPTER_FOLDER
from verl.utils.checkpoint.manifest import MANIFEST, damaged_files, read_manifest
from verl.workers.engine.common.checkpoint_compatibility import ABOUT

_KINDS: Mapping[str, ModelKind] = {
    "ForTokenClassification": "value",
    "ForSequenceClassification": "sequence_classification",
}
_USUAL: ModelKind = "causal_lm"


@dataclass(frozen=True)
class Checkpoint:
    """What there is to merge."""

    folder: Path
    tensors: Mapping[str, Stored]
    """The model's own weights, by the names they have in memory or on disk."""
    base: Mapping[str, Stored]
    """Those that adapters stand on, where it holds only what was trained."""
    adapters: Adapters | None
    config: Any
    """transformers' own."""
    kind: ModelKind
    beside: Path | None
    """Where config.json is, and perhaps a tokenizer."""
    base_model: str
    """What adapters stand on: a path or a hub name; "" where nobody knows."""


def open_checkpoint(options: MergeOptions) -> Checkpoint:
    """ValueError, with the file and the cause, for what cannot be merged."""
    folder = Path(options.local_dir).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--local_dir: {folder} is no folder.")
    base = Path(_resolved(options.base_model, "--base-model")) if options.base_model else None
    own = (folder / "model" / METADATA).is_file()
    files, core = rank_files(folder), core_folder(folder)
    _check_backend(options, folder, own, bool(files), core is not None)
    about = _about(folder) if own else {}
    beside = _config_folder(folder, base)
    config = _config(beside, about, options)
    kind = _kind(config, about, options)
    if own:
        _check_files(folder)
        tensors = dcp_tensors(folder / "model")
    else:
        tensors = shard_tensors(files) if files else core_tensors(core or folder, config, kind)
    plain, adapters = split_adapters(tensors)
    named = options.base_model or ""
    if adapters is not None:
        adapters, named = _told(adapters, folder, about, options)
        if own:  # holds what was trained, and no more
            adapters = replace(adapters, heads=plain)
            if options.lora == "merge":
                base = Path(_resolved(named, "--base-model"))
                return Checkpoint(folder, plain, folder_tensors(base), adapters, config, kind, beside or base, named)
    return Checkpoint(folder, plain, {}, adapters, config, kind, beside, named)


def _check_backend(options: MergeOptions, folder: Path, own: bool, shards: bool, core: bool) -> None:
    if not (own or shards or core):
        inside = sorted(path.parent.parent.name for path in folder.glob(f"*/model/{METADATA}"))
        inside += sorted({path.parent.name for path in folder.glob("*/model_world_size_*.pt")})
        hint = f"Give one of its folders {', '.join(inside)}." if inside else "Give the folder of a role, as .../actor."
        raise ValueError(
            f"--local_dir: {folder} has neither model/{METADATA} (ours), nor model_world_size_W_rank_R.pt (FSDP), nor "
            f"{METADATA} and common.pt (Megatron-Core). {hint}"
        )
    other = {"fsdp": "megatron", "megatron": "fsdp"}[options.backend]
    if not own and (core if options.backend == "fsdp" else shards):
        raise ValueError(f"--backend: {folder} was written by {other}. Set --backend {other}.")


def _resolved(path: str, key: str) -> str:
    from verl.utils.fs import resolve_model_path

    if not path:
        raise ValueError(f"{key}: the checkpoint holds adapters alone, and does not say for which model. Give it.")
    return resolve_model_path(path, key)


def _about(folder: Path) -> dict[str, Any]:
    file = folder / ABOUT
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _config_folder(folder: Path, base: Path | None) -> Path | None:
    places = [folder / "huggingface", folder, folder.parent / "huggingface", *([base] if base is not None else [])]
    return next((place for place in places if (place / "config.json").is_file()), None)


def _config(beside: Path | None, about: Mapping[str, Any], options: MergeOptions) -> Any:
    from transformers import AutoConfig

    if beside is not None:
        config = AutoConfig.from_pretrained(beside, trust_remote_code=options.trust_remote_code)
        if not options.trust_remote_code:
            refuse_hub_kernels(config, str(beside))
    elif about.get("config"):
        fields = dict(about["config"])
        config = type(AutoConfig.for_model(fields.pop("model_type"))).from_dict(fields)
    else:
        raise ValueError(
            f"--local_dir: {options.local_dir} has no config.json, nor a folder huggingface with one. Give the "
            "model it was trained from: --base-model."
        )
    if options.tie_word_embedding:
        config.tie_word_embeddings = True
    return config


def _kind(config: Any, about: Mapping[str, Any], options: MergeOptions) -> ModelKind:
    said = about.get("kind")
    if said is None:
        names = config.architectures or [""]
        found = next((kind for ending, kind in _KINDS.items() if names[0].endswith(ending)), _USUAL)
        return "value" if options.is_value_model else found
    if options.is_value_model and said != "value":
        raise ValueError(f"--is-value-model: {options.local_dir}/{ABOUT} says that it is a {said} model. Leave it out.")
    return said


def _check_files(folder: Path) -> None:
    """By the manifest of the step around it: what is missing or truncated is told at once."""
    step = next((place for place in (folder, folder.parent) if (place / MANIFEST).is_file()), None)
    if step is None:
        return
    manifest, inside = read_manifest(step), (folder / "model").relative_to(step).as_posix() + "/"
    files = {name: record for name, record in manifest.files.items() if name.startswith(inside)}
    problems = damaged_files(step, replace(manifest, files=files), contents=False)
    if problems:
        raise ValueError(f"{step}: {'; '.join(problems)}. Copy the checkpoint again, whole.")


def _told(adapters: Adapters, folder: Path, about: Mapping[str, Any], options: MergeOptions) -> tuple[Adapters, str]:
    """With what the checkpoint and the command say of them; and the model they stand on."""
    settings = stored_settings(folder / ADAPTER_FOLDER, folder, folder / "huggingface")
    if about.get("lora"):
        settings = {"r": about["lora"]["lora_rank"], "lora_alpha": about["lora"]["lora_alpha"]} | settings
    if options.lora_alpha is not None:
        settings["lora_alpha"] = options.lora_alpha
    return replace(adapters, settings=settings), options.base_model or settings.get("base_model_name_or_path") or ""


PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
_MATRIX = re.compile(r"(.+)\.lora_([AB])\.(?:[^.]+\.)?weight")
# peft's own copies of modules that are trained whole.
_TRAINED_WHOLE = re.compile(r"(.+)\.modules_to_save\.[^.]+\.(.+)")
_TASKS = {"causal_lm": "CAUSAL_LM", "value": "TOKEN_CLS", "sequence_classification": "SEQ_CLS"}
# Settings of peft under which a merged weight is more than base + scale * B A.
_REFUSED = ("use_dora", "rank_pattern", "alpha_pattern", "lora_bias")


@dataclass
class Adapters:
    """What was trained beside a model's own weights, by plain names: those without adapters."""

    matrices: dict[str, dict[str, Stored]] = field(default_factory=dict)
    """By layer: "A" [rank, in] and "B" [out, rank]."""
    heads: dict[str, Stored] = field(default_factory=dict)
    """Weights that were trained whole."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """As in adapter_config.json, as far as it is known."""

    def scale(self, layer: str) -> float:
        """How much the product of the matrices of a layer counts. ValueError where nobody knows."""
        refused = [key for key in _REFUSED if self.settings.get(key)]
        if refused:
            raise ValueError(
                f"{CONFIG}: {refused[0]} is set, which is not merged here. Keep the adapter: --lora adapter."
            )
        alpha = self.settings.get("lora_alpha")
        if alpha is None:
            raise ValueError(f"adapters: there is no {CONFIG} that says lora_alpha. Give it with --lora-alpha.")
        rank = self.matrices[layer]["A"].shape[0]
        return float(alpha) / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def merged(self, layer: str, base: Stored, transposed: bool) -> Adapted:
        """The weight of a layer with its adapter; `transposed`: it is [in, out]."""
        pair = self.matrices[layer]
        return Adapted(base, pair["A"], pair["B"], self.scale(layer), transposed)

    def peft_tensors(self) -> dict[str, Stored]:
        """Under the names of adapter_model.safetensors."""
        found = {
            f"{PREFIX}{layer}.lora_{side}.weight": pair[side] for layer, pair in self.matrices.items() for side in "AB"
        }
        return found | {f"{PREFIX}{name}": value for name, value in self.heads.items()}

    def peft_config(self, kind: ModelKind, base_model: str) -> dict[str, Any]:
        """All of adapter_config.json: what the checkpoint says of it comes first."""
        made = {
            "peft_type": "LORA",
            "task_type": _TASKS[kind],
            "r": next(iter(self.matrices.values()))["A"].shape[0],
            "target_modules": sorted(self.matrices),
            "modules_to_save": sorted({name.partition(".")[0] for name in self.heads}) or None,
            "inference_mode": True,
        }
        if "lora_alpha" not in self.settings:
            self.scale(next(iter(self.matrices)))
        return {**made, **self.settings, "base_model_name_or_path": base_model}


def split_adapters(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], Adapters | None]:
    """(a model's own weights by plain name, what adapters there are)."""
    plain: dict[str, Stored] = {}
    found = Adapters()
    for full, value in tensors.items():
        name = full.removeprefix(PREFIX)
        if matrix := _MATRIX.fullmatch(name):
            found.matrices.setdefault(matrix[1], {})[matrix[2]] = value
        elif trained := _TRAINED_WHOLE.fullmatch(name):
            found.heads[f"{trained[1]}.{trained[2]}"] = value
        else:
            plain.setdefault(name.replace(".base_layer.", ".").replace(".original_module.", "."), value)
    single = sorted(layer for layer, pair in found.matrices.items() if len(pair) == 1)
    if single:
        raise ValueError(f"adapters: {single[0]} has one of two matrices. The checkpoint is not whole.")
    if not found.matrices:
        return {**plain, **found.heads}, None
    return {**plain, **found.heads}, found


def stored_settings(*folders: Path) -> dict[str, Any]:
    """adapter_config.json in the first folder that has one; {}: none has."""
    file = next((folder / CONFIG for folder in folders if (folder / CONFIG).is_file()), None)
    return json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
