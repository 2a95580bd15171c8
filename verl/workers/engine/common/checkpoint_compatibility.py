"""Check that a checkpoint fits a model: config, tensor shapes, optimizer state and initial weights."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.config.problems import show
from verl.types.weights import TensorSpec
from verl.utils.torch_archive import load_archive
from verl.workers.engine.common.optim import MOMENTS
from verl.workers.engine.common.sharded_checkpoint import stored_tensors

__all__ = ["FILE", "read_digests", "weight_differences", "weight_digests"]


ABOUT = "model.json"
NOT_SAVED = "not saved in it"

_SHOWN, _WIDTH = 4, 60
# Fields of a model's config that change nothing of what its weights mean: who wrote it, in which precision, how it is
# run, and what belongs to the tokenizer. The size of the vocabulary is in the shapes, where it matters.
_IRRELEVANT = {
    *("transformers_version", "dtype", "torch_dtype", "architectures", "auto_map"),
    *("use_cache", "attn_implementation", "gradient_checkpointing", "chunk_size_feed_forward"),
    *("return_dict", "output_attentions", "output_hidden_states"),
    *("initializer_range", "initializer_factor"),
    *("vocab_size", "max_position_embeddings", "tokenizer_class"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
}
_IRRELEVANT_ENDINGS = ("dropout", "pdrop", "dropout_prob", "drop_rate")


def about(hf_config: Any, kind: str, lora: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `model.json` says of a model; `lora`: of its adapters."""
    return {"kind": kind, "config": hf_config.to_dict(), "lora": lora}


@dataclass(frozen=True)
class ModelDescription:
    """What a checkpoint must fit."""

    about: Mapping[str, Any]
    """`config`, the model's own; `lora`, of its adapters or None; `kind`."""
    tensors: Mapping[str, TensorSpec]
    """What is stored of the model: what learns."""
    learning: Mapping[str, TensorSpec]
    """Parameters that have an optimizer's state."""
    parameters: int
    """Of the whole model."""

    @classmethod
    def of(cls, hf: torch.nn.Module, stored: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> ModelDescription:
        """Of a model, sharded or on the meta device; `stored` is what a checkpoint holds of it."""
        learning = {name: value for name, value in hf.named_parameters() if value.requires_grad}
        parameters = sum(value.numel() for value in hf.parameters())
        return cls(json.loads(json.dumps(about, default=str)), _specs(stored), _specs(learning), parameters)


def differences(folder: Path, contents: Collection[str], wanted: ModelDescription) -> list[str]:
    """Why the `contents` of a checkpoint do not fit a model, a phrase each; [] where they do."""
    contents = {part for part in contents if part != "optimizer" or wanted.learning}
    absent = [part for part, file in _FILES.items() if part in contents and not (folder / file).exists()]
    if absent:
        return [f"{NOT_SAVED}: {', '.join(absent)} (checkpoint.save_contents)"]
    found: list[str] = []
    if "model" in contents:
        found += about_differences(_stored_about(folder), wanted.about)
        found += tensor_differences(stored_tensors(folder / "model"), wanted.tensors)
    if "optimizer" in contents:
        found += _optimizer_differences(stored_tensors(folder / "optimizer"), wanted)
    return found


def about_differences(stored: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Settings that two models differ in; what only one of two versions of transformers knows is left out."""
    kinds = [f"a {stored['kind']} model there, a {here['kind']} model here"] if _unlike(stored, here, "kind") else []
    configs = stored.get("config") or {}, here.get("config") or {}
    same_version = configs[0].get("transformers_version") == configs[1].get("transformers_version")
    names = _unequal(*configs, strict=same_version)
    lora = {name: (block.get("lora") or {"lora_rank": 0}) for name, block in (("there", stored), ("here", here))}
    if "lora" in stored:
        names += _unequal(lora["there"], lora["here"], strict=False)
    lines = [f"{name} is {show(new, _WIDTH)} here and {show(old, _WIDTH)} there" for name, old, new in names]
    return kinds + _listed(lines, "settings")


def tensor_differences(stored: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec]) -> list[str]:
    """Tensors that only one of the two has, and those of another shape."""
    both = [name for name in wanted if name in stored]
    reshaped = [
        f"{name} is {list(wanted[name].shape)} here and {list(stored[name].shape)} there"
        for name in both
        if wanted[name].shape != stored[name].shape
    ]
    surplus = _some("only in the checkpoint", [name for name in stored if name not in wanted])
    missing = _some("only in the model", [name for name in wanted if name not in stored])
    return surplus + missing + _listed(reshaped, "tensors of another shape")


def _optimizer_differences(stored: Mapping[str, TensorSpec], wanted: ModelDescription) -> list[str]:
    found = _some("with an optimizer's state that do not learn here", _strangers(stored, wanted.learning))
    layout = sorted({name.rpartition("/")[2] for name in stored} - {*MOMENTS, "step"})
    if layout:
        found.append(f"the optimizer's state has {', '.join(layout)}, which this optimizer does not")
    return found


def _strangers(stored: Mapping[str, TensorSpec], learning: Mapping[str, TensorSpec]) -> list[str]:
    return sorted({name.rpartition("/")[0] for name in stored} - set(learning))


_FILES = {"model": "model", "optimizer": "optimizer", "extra": "extra.pt"}


def _stored_about(folder: Path) -> Mapping[str, Any]:
    file = folder / ABOUT
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _unequal(
    there: Mapping[str, Any], here: Mapping[str, Any], strict: bool, prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """(name, value there, value here). Not `strict`: a setting that one side does not say is not compared."""
    found = []
    for name in sorted(there.keys() | here.keys()):
        old, new = there.get(name), here.get(name)
        if _is_irrelevant(name) or old == new or (not strict and (old is None or new is None)):
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _unequal(old, new, strict, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", old, new))
    return found


def _is_irrelevant(name: str) -> bool:
    return name in _IRRELEVANT or name.startswith("_") or name.endswith(_IRRELEVANT_ENDINGS)


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    return name in one and name in other and one[name] != other[name]


def _some(where: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{len(names)} tensors {where}: {', '.join(names[:_SHOWN])}{more}"]


def _listed(lines: Sequence[str], what: str) -> list[str]:
    more = [f"{len(lines) - _SHOWN} more {what}"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in tensors.items()}


FILE = "initial_weights.json"
Digests = Mapping[str, str]
"""Digest by tensor name, as in the model's files."""

# Values in each of three blocks of a tensor: at its start, in the middle and at its end.
_BLOCK = 256
_MAX_NAMES = 3


def weight_digests(folder: str | Path) -> dict[str, str]:
    """Digests of all tensors in a model's folder; {} if it has no files that can be memory-mapped."""
    return {name: _digest(tensor) for name, tensor in _tensors(Path(folder))}


def read_digests(step: Path) -> dict[str, dict[str, str]]:
    """The digests stored in a checkpoint step, by model folder (actor, critic); {} if it has none."""
    file = step / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def weight_differences(stored: Digests, here: Digests) -> list[str]:
    """A list with one description if any tensor that both have differs; else []."""
    both = sorted(stored.keys() & here.keys())
    differing = [name for name in both if stored[name] != here[name]]
    if not differing:
        return []
    names = ", ".join(differing[:_MAX_NAMES]) + (", …" if len(differing) > _MAX_NAMES else "")
    return [
        f"the checkpoint was trained from another model of this architecture ({len(differing)} of {len(both)} tensors"
        f" differ: {names}), and resuming would continue with that one"
    ]


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)
    for file in [] if files else sorted(folder.glob("pytorch_model*.bin")):
        if zipfile.is_zipfile(file):
            yield from load_archive(file, mapped=True).items()


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.reshape(-1)
    middle = max(0, len(flat) // 2 - _BLOCK // 2)
    values = torch.cat([flat[:_BLOCK], flat[middle : middle + _BLOCK], flat[-_BLOCK:]])
    if values.is_floating_point():
        values = values.to(torch.bfloat16)
    return hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
