"""A checkpoint folder: whose layout it has, what it holds, and which model that is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.model_merger.adapters import Adapters, split_adapters, stored_settings
from verl.model_merger.core_folder import core_folder, core_tensors
from verl.model_merger.dcp_folder import METADATA, dcp_tensors
from verl.model_merger.fsdp_shards import rank_files, shard_tensors
from verl.model_merger.model_folder import folder_tensors
from verl.model_merger.options import MergeOptions
from verl.model_merger.stored import Stored
from verl.models.loading import ModelKind, refuse_hub_kernels
from verl.models.lora import ADAPTER_FOLDER
from verl.utils.checkpoint.manifest import MANIFEST, damaged_files, read_manifest
from verl.workers.engine.common.same_model import ABOUT

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
