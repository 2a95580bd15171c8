"""Check that a checkpoint fits a model: config, tensor shapes, optimizer state and initial weights.

`model.json` in a checkpoint describes the model it was saved from; without it, only tensors are compared.
"""

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

MODEL_JSON = "model.json"
NOT_SAVED = "not saved in it"
"""Prefix of the message about a checkpoint that lacks some of the contents to load."""

# In messages: number of items of a list, and characters of a value.
_MAX_SHOWN, _MAX_CHARACTERS = 4, 60
# Config fields that do not change the meaning of weights: version and precision of the writer, runtime settings, and
# fields of the tokenizer. The vocabulary size is compared by tensor shapes.
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


def model_info(hf_config: Any, kind: str, lora: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the contents of `model.json`; `lora`: settings of the adapters, None without adapters."""
    return {"kind": kind, "config": hf_config.to_dict(), "lora": lora}


@dataclass(frozen=True)
class ModelDescription:
    """The model that a checkpoint must fit."""

    model_info: Mapping[str, Any]
    """See `model_info()`."""
    tensors: Mapping[str, TensorSpec]
    """The tensors that a checkpoint of it contains; with LoRA only the adapters."""
    trained: Mapping[str, TensorSpec]
    """The parameters that have optimizer state."""
    parameters: int
    """Number of parameters of the full model."""

    @classmethod
    def from_model(
        cls, hf: torch.nn.Module, stored: Mapping[str, torch.Tensor], info: Mapping[str, Any]
    ) -> ModelDescription:
        """Describe the model `hf`, which may be sharded or on the meta device. `stored`: the tensors that a checkpoint
        of it contains; `info`: see `model_info()`."""
        trained = {name: value for name, value in hf.named_parameters() if value.requires_grad}
        parameters = sum(value.numel() for value in hf.parameters())
        return cls(json.loads(json.dumps(info, default=str)), _tensor_specs(stored), _tensor_specs(trained), parameters)


def checkpoint_differences(folder: Path, contents: Collection[str], expected: ModelDescription) -> list[str]:
    """Return the reasons why the `contents` of a checkpoint do not fit a model; [] if they do."""
    contents = {part for part in contents if part != "optimizer" or expected.trained}
    absent = [part for part, file in _PATHS.items() if part in contents and not (folder / file).exists()]
    if absent:
        return [f"{NOT_SAVED}: {', '.join(absent)} (checkpoint.save_contents)"]
    problems: list[str] = []
    if "model" in contents:
        problems += model_differences(stored_model_info(folder), expected.model_info)
        problems += tensor_differences(stored_tensors(folder / "model"), expected.tensors)
    if "optimizer" in contents:
        problems += _optimizer_differences(stored_tensors(folder / "optimizer"), expected)
    return problems


def require_fit(folder: Path, contents: Collection[str], expected: ModelDescription) -> None:
    """Raise ValueError if the `contents` of a checkpoint do not fit a model."""
    if problems := checkpoint_differences(folder, contents, expected):
        raise ValueError(
            f"{folder} does not fit this model: {'; '.join(problems)}. Use the model and settings it was saved with and"
            " load only what it contains (checkpoint.load_contents), or load another checkpoint."
        )


def model_differences(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return descriptions of the settings in which two models differ (contents of `model.json`).

    If they were saved by different versions of transformers, fields that only one of them has are ignored.
    """
    kinds = []
    if "kind" in stored and "kind" in expected and stored["kind"] != expected["kind"]:
        kinds = [f"it was saved from a {stored['kind']} model, not from a {expected['kind']} model"]
    configs = stored.get("config") or {}, expected.get("config") or {}
    same_version = configs[0].get("transformers_version") == configs[1].get("transformers_version")
    fields = _unequal_fields(*configs, strict=same_version)
    if "lora" in stored:
        no_lora = {"lora_rank": 0}
        fields += _unequal_fields(stored["lora"] or no_lora, expected.get("lora") or no_lora, strict=False)
    lines = [
        f"{name} is {show(new, _MAX_CHARACTERS)} in the model and {show(old, _MAX_CHARACTERS)} in the checkpoint"
        for name, old, new in fields
    ]
    return kinds + _first_lines(lines, "settings")


def tensor_differences(stored: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> list[str]:
    """Return descriptions of the tensors that only one of the two has, and of those with different shapes."""
    both = [name for name in expected if name in stored]
    reshaped = [
        f"{name} is {list(expected[name].shape)} in the model and {list(stored[name].shape)} in the checkpoint"
        for name in both
        if expected[name].shape != stored[name].shape
    ]
    surplus = _describe_names("only in the checkpoint", [name for name in stored if name not in expected])
    missing = _describe_names("only in the model", [name for name in expected if name not in stored])
    return surplus + missing + _first_lines(reshaped, "tensors of another shape")


def _optimizer_differences(stored: Mapping[str, TensorSpec], expected: ModelDescription) -> list[str]:
    """Return descriptions of optimizer state that the model does not have. Tensors are named `<parameter>/<moment>`."""
    not_trained = sorted({name.rpartition("/")[0] for name in stored} - set(expected.trained))
    problems = _describe_names("have optimizer state but are not trained", not_trained)
    unknown_state = sorted({name.rpartition("/")[2] for name in stored} - {*MOMENTS, "step"})
    if unknown_state:
        problems.append(f"the optimizer state has {', '.join(unknown_state)}, which this optimizer does not have")
    return problems


# Paths of the contents in the checkpoint of a model.
_PATHS = {"model": "model", "optimizer": "optimizer", "extra": "extra.pt"}


def stored_model_info(folder: Path) -> dict[str, Any]:
    """Return the contents of `model.json` in a checkpoint; {} if it has none."""
    file = folder / MODEL_JSON
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _unequal_fields(
    stored: Mapping[str, Any], expected: Mapping[str, Any], strict: bool, prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """Return (name, stored value, expected value) of each field that differs.

    Without `strict`, fields that are missing or null on one side are ignored.
    """
    fields = []
    for name in sorted(stored.keys() | expected.keys()):
        old, new = stored.get(name), expected.get(name)
        if _is_irrelevant(name) or old == new or (not strict and (old is None or new is None)):
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            fields += _unequal_fields(old, new, strict, f"{prefix}{name}.")
        else:
            fields.append((f"{prefix}{name}", old, new))
    return fields


def _is_irrelevant(name: str) -> bool:
    return name in _IRRELEVANT or name.startswith("_") or name.endswith(_IRRELEVANT_ENDINGS)


def _describe_names(predicate: str, names: Sequence[str]) -> list[str]:
    """Return a list with one description, `N tensors <predicate>: <names>`; [] without names."""
    if not names:
        return []
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return [f"{len(names)} tensors {predicate}: {', '.join(names[:_MAX_SHOWN])}{more}"]


def _first_lines(lines: Sequence[str], what: str) -> list[str]:
    """Return the first lines, and one with the number of the others."""
    more = [f"{len(lines) - _MAX_SHOWN} more {what}"] if len(lines) > _MAX_SHOWN else []
    return [*lines[:_MAX_SHOWN], *more]


def _tensor_specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in tensors.items()}


INITIAL_WEIGHTS_JSON = "initial_weights.json"
"""File in the checkpoint of a step: digests of the weights that the run started from, by model folder (actor,
critic)."""

# Number of values in each of the three blocks of a tensor that its digest covers: at its start, middle and end.
_BLOCK = 256


def weight_digests(folder: str | Path) -> dict[str, str]:
    """Return a digest per tensor of a model folder; {} if it has no weight files that can be memory-mapped.

    A digest covers a few hundred values: enough to distinguish a fine-tuned model from its base, and cheap for large
    models. Values are rounded to bfloat16, so that a copy of the model in another precision has the same digests.
    """
    return {name: _digest(tensor) for name, tensor in _model_tensors(Path(folder))}


def read_digests(step: Path) -> dict[str, dict[str, str]]:
    """Return the digests stored in the checkpoint of a step, by model folder (actor, critic); {} if it has none."""
    file = step / INITIAL_WEIGHTS_JSON
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def weight_differences(stored: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Return a list with one description if the digests of a tensor that both have differ; otherwise []."""
    both = sorted(stored.keys() & expected.keys())
    differing = [name for name in both if stored[name] != expected[name]]
    if not differing:
        return []
    names = ", ".join(differing[:3]) + (", …" if len(differing) > 3 else "")
    return [
        f"the checkpoint was trained from another model of this architecture ({len(differing)} of {len(both)} tensors"
        f" differ: {names}), and resuming would continue with the weights of the checkpoint"
    ]


def _model_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and memory-mapped tensor of each weight of a model folder."""
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
