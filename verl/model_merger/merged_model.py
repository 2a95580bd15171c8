"""What the files of a merged model hold: each tensor in them, and where it comes from."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from verl.model_merger import MergeOptions
from verl.model_merger.checkpoint import CONFIG, Checkpoint
from verl.model_merger.lazy_tensors import Box, Stored, Zeros, first_rows, slices, value_difference, whole
from verl.models.loading import empty_model
from verl.types.weights import TensorSpec
from verl.workers.engine.common.checkpoint_compatibility import tensor_differences
from verl.workers.engine.common.hf_export import HFExport, WeightFiles

logger = logging.getLogger(__name__)

# Tensors of older models that nobody needs.
_LEFT_OUT = re.compile(r".*(rotary_emb\.inv_freq|\.masked_bias|_extra_state)")


class Result(Protocol):
    """What is written."""

    files: WeightFiles
    tensors: Mapping[str, Stored]
    """By name in the files."""
    aliases: Mapping[str, str]
    """Other names of tied ones, which files may hold as well."""

    def write_configs(self, folder: Path) -> None:
        """What belongs beside the weights."""


def result_of(checkpoint: Checkpoint, options: MergeOptions) -> Result:
    """ValueError for a checkpoint that is not what its config says."""
    if options.lora == "adapter":
        return AdapterFiles(checkpoint, options)
    return MergedModel(checkpoint, options)


class AdapterFiles:
    """Adapters alone, as peft loads them."""

    def __init__(self, checkpoint: Checkpoint, options: MergeOptions) -> None:
        if checkpoint.adapters is None:
            raise ValueError(f"--lora adapter: {checkpoint.folder} has no adapters. Leave it out.")
        if not checkpoint.base_model:
            raise ValueError("--base-model: the checkpoint does not say which model its adapters stand on. Give it.")
        self.tensors: Mapping[str, Stored] = checkpoint.adapters.peft_tensors()
        self.aliases: Mapping[str, str] = {}
        dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
        like = {
            name: torch.empty(value.shape, dtype=dtype or value.dtype, device="meta")
            for name, value in self.tensors.items()
        }
        self.files = WeightFiles({"adapter_model.safetensors": like}, None)
        self._config = checkpoint.adapters.peft_config(checkpoint.kind, checkpoint.base_model)

    def write_configs(self, folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(self._config, indent=2, sort_keys=True), encoding="utf-8")


class MergedModel:
    """A whole model, as transformers loads it."""

    def __init__(self, checkpoint: Checkpoint, options: MergeOptions) -> None:
        dtype = _dtype(checkpoint, options.dtype)
        skeleton = empty_model(checkpoint.config, checkpoint.kind, dtype, options.trust_remote_code)
        self._export = HFExport(skeleton, dtype, str(checkpoint.beside or ""), options.max_shard_size)
        found = _Finder(checkpoint, skeleton, self._export)
        self.tensors: Mapping[str, Stored] = found.all()
        self.aliases: Mapping[str, str] = found.aliases
        self.files = self._export.files

    def write_configs(self, folder: Path) -> None:
        self._export.write_configs(folder)


@dataclass
class _Finder:
    """Looks up what a model needs in what a checkpoint has."""

    checkpoint: Checkpoint
    skeleton: nn.Module
    export: HFExport
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        named = dict(self.skeleton.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name in self.export.memory:
            if name in named:
                first[id(named[name])] = name
        self.aliases = {name: first[id(value)] for name, value in named.items() if first.get(id(value), name) != name}
        vocabulary = _vocabulary(self.skeleton)
        self._vocabulary = {name for name, value in named.items() if id(value) in vocabulary}

    def all(self) -> dict[str, Stored]:
        """By name in the files, in their order. ValueError for what is missing, too much, or of another shape."""
        group = _OneAtATime(self.export, self._in_memory)
        found: dict[str, Stored] = {}
        for name in self.export.files.order:
            like, sources = self.export.stored[name]
            value = self._plain(name) if self.export.memory.get(name) is like else self._given(name)
            if value is None and all(self._in_memory(source) is not None for source in sources):
                value = _Converted(tuple(like.shape), like.dtype, name, group)
            if value is not None:
                found[name] = self._cut(name, value, like.shape[0] if like.shape else 0)
        self._check(found)
        return found

    def _plain(self, name: str) -> Stored | None:
        """A weight that is in the files what it is in memory."""
        value = self._in_memory(name)
        if value is None and name == "score.bias" and self.checkpoint.kind == "value":
            return Zeros((1,), self.export.dtype)  # a head without a bias
        return value

    def _given(self, name: str) -> Stored | None:
        """One that the checkpoint has as files have it."""
        return self._lookup(name) if name not in self.export.memory else None

    def _in_memory(self, name: str) -> Stored | None:
        """By its name in memory, with its adapter."""
        names = [name, *(alias for alias, first in self.aliases.items() if first == name)]
        found = [value for each in names if (value := self._lookup(each)) is not None]
        if len(found) > 1 and (difference := value_difference(found[0], found[1], 0.0)):
            raise ValueError(
                f"{self.checkpoint.folder}: {' and '.join(names[:2])} are not the same ({difference}), so they are not "
                "tied. Leave --tie-word-embedding out, or mend tie_word_embeddings in config.json."
            )
        layer, adapters = name.removesuffix(".weight"), self.checkpoint.adapters
        if not found or adapters is None or layer not in adapters.matrices:
            return found[0] if found else None
        return adapters.merged(layer, found[0], _is_transposed(self.skeleton, layer))

    def _lookup(self, name: str) -> Stored | None:
        self.used.add(name)
        if name in self.checkpoint.tensors:
            return self.checkpoint.tensors[name]
        base = self.checkpoint.base
        return base.get(name, base.get(name.removeprefix("model.")))

    def _cut(self, name: str, value: Stored, rows: int) -> Stored:
        """Without rows that only fill up a vocabulary."""
        if name not in self._vocabulary or value.shape[0] <= rows:
            return value
        logger.info("%s: %d rows that pad the vocabulary are left out", name, value.shape[0] - rows)
        return first_rows(value, rows)

    def _check(self, found: Mapping[str, Stored]) -> None:
        surplus = {
            name: value
            for name, value in self.checkpoint.tensors.items()
            if name not in self.used and not _LEFT_OUT.fullmatch(name)
        }
        there = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in {**found, **surplus}.items()}
        wanted = {name: TensorSpec(tuple(like.shape), like.dtype) for name, (like, _) in self.export.stored.items()}
        different = tensor_differences(there, wanted)
        adapters = self.checkpoint.adapters.matrices if self.checkpoint.adapters is not None else {}
        if stray := sorted(layer for layer in adapters if f"{layer}.weight" not in self.export.memory):
            different.append(f"adapters of layers that the model does not have: {', '.join(stray[:4])}")
        if different:
            raise ValueError(
                f"{self.checkpoint.folder} is not the {type(self.skeleton).__name__} of its config.json: "
                f"{'; '.join(different)}. See --is-value-model, --tie-word-embedding and --base-model."
            )


class _OneAtATime:
    """Tensors that are fused in memory, taken apart: those of one group are kept."""

    def __init__(self, export: HFExport, find: Callable[[str], Stored | None]) -> None:
        self._export, self._find = export, find
        self._sources: tuple[str, ...] = ()
        self._made: dict[str, torch.Tensor] = {}

    def take(self, name: str) -> torch.Tensor:
        sources = self._export.stored[name][1]
        if sources != self._sources:
            self._made, self._sources = {}, sources
            self._made = self._export.converted({each: self._read(each) for each in sources})
        return self._made[name]

    def _read(self, name: str) -> torch.Tensor:
        stored, like = self._find(name), self._export.memory[name]
        assert stored is not None
        if tuple(stored.shape) != tuple(like.shape):
            raise ValueError(f"{name} is {list(stored.shape)} in the checkpoint, by config.json {list(like.shape)}.")
        return whole(stored, like.dtype)


@dataclass(frozen=True)
class _Converted:
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    group: _OneAtATime

    def read(self, box: Box, target: torch.Tensor) -> None:
        target.copy_(self.group.take(self.name)[slices(box)])


def _dtype(checkpoint: Checkpoint, wanted: str) -> torch.dtype:
    if wanted != "auto":
        return getattr(torch, wanted)
    said = getattr(checkpoint.config, "dtype", None)
    if said is not None:
        return said if isinstance(said, torch.dtype) else getattr(torch, str(said).removeprefix("torch."))
    ((most, _),) = Counter(value.dtype for value in checkpoint.tensors.values()).most_common(1)
    return most


def _vocabulary(skeleton: Any) -> set[int]:
    """Ids of the parameters that have a row for each token."""
    modules = [skeleton.base_model.get_input_embeddings()]
    if hasattr(skeleton, "get_output_embeddings"):
        modules.append(skeleton.get_output_embeddings())
    return {id(module.weight) for module in modules if module is not None}


def _is_transposed(skeleton: nn.Module, layer: str) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(skeleton.get_submodule(layer), Conv1D)
