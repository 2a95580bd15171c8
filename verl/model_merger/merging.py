"""The commands `merge` and `test`: write a checkpoint as a Hugging Face model, or compare the two.

MergedModel: the tensors of a merged model (or of its adapters), and their sources in the checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from verl.model_merger import MergeOptions
from verl.model_merger.checkpoint import ADAPTER_CONFIG, Checkpoint, open_checkpoint
from verl.model_merger.lazy_tensors import (
    Box,
    LazyTensor,
    ZeroTensor,
    differences,
    first_rows,
    folder_tensors,
    read_tensor,
    slices,
    value_difference,
)
from verl.models.loading import empty_model
from verl.types.weights import TensorSpec
from verl.utils.checkpoint.folders import writer_lock
from verl.utils.disk import describe_disk, format_bytes, sync_folder
from verl.workers.engine.common.checkpoint_compatibility import tensor_differences
from verl.workers.engine.common.hf_export import HFExport, WeightFiles

logger = logging.getLogger(__name__)

# Files of a tokenizer, which belong together, and of other preprocessing.
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken"),
    "chat_template*",
)
_PREPROCESSING = ("*preprocessor_config.json", "processor_config.json")
_LOG_INTERVAL_S = 5.0

# Obsolete tensors in checkpoints of older models.
_OBSOLETE = re.compile(r".*(rotary_emb\.inv_freq|\.masked_bias|_extra_state)")


def merge(options: MergeOptions) -> list[str]:
    """Write `target_dir`; return its differences from `test_hf_dir`, if that is given."""
    assert options.target_dir is not None
    target = Path(options.target_dir).expanduser().resolve()
    check_target(target, Path(options.local_dir).expanduser().resolve(), options.overwrite)
    checkpoint = open_checkpoint(options)
    result = create_result(checkpoint, options)
    size = _size(result)
    _check_disk_space(target, size)
    logger.info("%s: %d tensors, %s when merged", checkpoint.folder, len(result.tensors), format_bytes(size))
    start = time.monotonic()
    with new_folder(target) as folder:
        result.write_configs(folder)
        result.files.write(_read_ahead(result), folder)
        _copy_tokenizer(checkpoint, folder)
    seconds = time.monotonic() - start
    logger.info("merged %s into %s: %s in %.1f s", checkpoint.folder, target, format_bytes(size), seconds)
    if options.hf_upload_path:
        _upload(target, options.hf_upload_path, options.private)
    return test(options) if options.test_hf_dir else []


def test(options: MergeOptions) -> list[str]:
    """Return the differences between the checkpoint (or `target_dir`, if given) and `test_hf_dir`."""
    assert options.test_hf_dir is not None
    theirs = folder_tensors(Path(options.test_hf_dir).expanduser())
    if options.target_dir is not None:
        ours = folder_tensors(Path(options.target_dir).expanduser())
        lines = differences(ours, ours, theirs, options.tolerance, {})
    else:
        result = create_result(open_checkpoint(options), options)
        like = {name: spec for file in result.files.files.values() for name, spec in file.items()}
        lines = differences(result.tensors, like, theirs, options.tolerance, result.aliases)
    if not lines:
        logger.info("no differences from %s in %d tensors", options.test_hf_dir, len(theirs))
    return lines


def _read_ahead(result: MergeResult) -> Iterator[torch.Tensor]:
    """Yield the tensors in file order; the next one is read while one is written."""
    previous: Future[torch.Tensor] | None = None
    logged = time.monotonic()
    done, total = 0, _size(result)
    with ThreadPoolExecutor(1, "reading") as thread:
        for part in result.files.files.values():
            for name, like in part.items():
                reading = thread.submit(read_tensor, result.tensors[name], like.dtype)
                if previous is not None:
                    yield previous.result()
                previous = reading
                if time.monotonic() - logged > _LOG_INTERVAL_S:
                    logged = time.monotonic()
                    logger.info("%s of %s (%d %%)", format_bytes(done), format_bytes(total), 100 * done // total)
                done += like.nbytes
        if previous is not None:
            yield previous.result()


def _size(result: MergeResult) -> int:
    return sum(like.nbytes for part in result.files.files.values() for like in part.values())


def _check_disk_space(target: Path, size: int) -> None:
    existing = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise ValueError(
            f"--target_dir: {describe_disk(existing)} has {format_bytes(free)} free, but {target} needs"
            f" {format_bytes(size)}. Free some space, or use a folder on another disk."
        )


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the tokenizer of the checkpoint, or of the base model if the checkpoint has none, and the other
    preprocessing files of both; those of the checkpoint take precedence."""
    folders = [source for source in (checkpoint.config_folder, checkpoint.base_folder) if source is not None]
    with_tokenizer = (source for source in folders if any(source.glob("tokenizer*")))
    source = next(with_tokenizer, checkpoint.config_folder)
    files = _matching_files(source, _TOKENIZER)
    for other in reversed(folders):
        files |= _matching_files(other, _PREPROCESSING)
    for name, path in sorted(files.items()):
        shutil.copyfile(path, folder / name)
    if not any(name.startswith("tokenizer") for name in files):
        logger.warning("no tokenizer found for %s: copy that of the model into the result", checkpoint.folder)


def _matching_files(folder: Path | None, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the files by name."""
    paths = [path for pattern in patterns for path in folder.glob(pattern)] if folder is not None else []
    return {path.name: path for path in paths if path.is_file()}


def _upload(folder: Path, name: str, private: bool) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    repository = api.create_repo(name, private=private, exist_ok=True).repo_id
    api.upload_folder(repo_id=repository, folder_path=folder)
    logger.info("uploaded %s to %s", folder, repository)


_LOCK = ".merging"


def check_target(target: Path, source: Path, overwrite: bool) -> None:
    """Raise ValueError if the target cannot be written."""
    if target == source or target in source.parents:
        raise ValueError(f"--target_dir: {target} is or contains the checkpoint itself. Use another folder.")
    if target.exists() and not target.is_dir():
        raise ValueError(f"--target_dir: {target} is a file. Use a folder.")
    if os.path.ismount(target):
        raise ValueError(f"--target_dir: {target} is a mount point, which cannot be renamed. Use a folder in it.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ValueError(f"--target_dir: {target} is not empty. Use another folder, or --overwrite.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Context manager: yields a temporary folder next to `target`, which replaces `target` when the block ends.

    If the block raises an error, the temporary folder is removed and `target` is not changed. A temporary folder that a
    killed process has left is emptied first; ValueError if another process is writing to it.
    """
    work, old = (target.with_name(f".{target.name}.{word}") for word in ("unfinished", "replaced"))
    work.mkdir(parents=True, exist_ok=True)
    with writer_lock(work / _LOCK) as acquired:
        if not acquired:
            raise ValueError(f"--target_dir: another process is writing {target}. Wait for it, or use another folder.")
        try:
            _empty(work)
            yield work
            (work / _LOCK).unlink()
            sync_folder(work)
            if target.is_dir() and any(target.iterdir()):
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            work.rename(target)
            sync_folder(target.parent)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            if old.is_dir() and not target.exists():
                old.rename(target)
            raise


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


class MergeResult(Protocol):
    """The files to write."""

    files: WeightFiles
    tensors: Mapping[str, LazyTensor]
    """By name in the files."""
    aliases: Mapping[str, str]
    """Other names of tied tensors, which files may contain as well, with the names of the stored ones."""

    def write_configs(self, folder: Path) -> None:
        """Write the config files."""


def create_result(checkpoint: Checkpoint, options: MergeOptions) -> MergeResult:
    """Return the merged model, or the adapters; ValueError if the checkpoint does not match its config."""
    if options.lora == "adapter":
        return AdapterFiles(checkpoint, options)
    return MergedModel(checkpoint, options)


class AdapterFiles:
    """Adapters without the base model, in peft's format."""

    def __init__(self, checkpoint: Checkpoint, options: MergeOptions) -> None:
        if checkpoint.adapters is None:
            raise ValueError(f"--lora adapter: {checkpoint.folder} has no adapters. Remove it.")
        if not checkpoint.base_model:
            raise ValueError("--base-model: the checkpoint does not name the base model of its adapters. Set it.")
        self.tensors: Mapping[str, LazyTensor] = checkpoint.adapters.peft_tensors()
        self.aliases: Mapping[str, str] = {}
        dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
        like = {
            name: torch.empty(value.shape, dtype=dtype or value.dtype, device="meta")
            for name, value in self.tensors.items()
        }
        self.files = WeightFiles({"adapter_model.safetensors": like}, None)
        self._config = checkpoint.adapters.peft_config(checkpoint.kind, checkpoint.base_model)

    def write_configs(self, folder: Path) -> None:
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self._config, indent=2, sort_keys=True), encoding="utf-8")


class MergedModel:
    """A full model in Hugging Face format."""

    def __init__(self, checkpoint: Checkpoint, options: MergeOptions) -> None:
        dtype = _dtype(checkpoint, options.dtype)
        skeleton = empty_model(checkpoint.config, checkpoint.kind, dtype, options.trust_remote_code)
        self._export = HFExport(skeleton, dtype, str(checkpoint.config_folder or ""), options.max_shard_size)
        lookup = _TensorLookup(checkpoint, skeleton, self._export)
        self.tensors: Mapping[str, LazyTensor] = lookup.all()
        self.aliases: Mapping[str, str] = lookup.aliases
        self.files = self._export.files

    def write_configs(self, folder: Path) -> None:
        self._export.write_configs(folder)


@dataclass
class _TensorLookup:
    """Finds the tensors of a model in a checkpoint."""

    checkpoint: Checkpoint
    skeleton: nn.Module
    export: HFExport
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        named = dict(self.skeleton.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name in self.export.weights:
            if name in named:
                first[id(named[name])] = name
        self.aliases = {name: first[id(value)] for name, value in named.items() if first.get(id(value), name) != name}
        vocabulary = _vocabulary(self.skeleton)
        self._vocabulary = {name for name, value in named.items() if id(value) in vocabulary}

    def all(self) -> dict[str, LazyTensor]:
        """Return the tensors in file order. ValueError for missing or surplus tensors and wrong shapes."""
        converter = _GroupConverter(self.export, self._in_memory)
        tensors: dict[str, LazyTensor] = {}
        for name in self.export.files.order:
            like, sources = self.export.exported[name]
            value = self._unconverted(name) if self.export.weights.get(name) is like else self._converted(name)
            if value is None and all(self._in_memory(source) is not None for source in sources):
                value = _ConvertedTensor(tuple(like.shape), like.dtype, name, converter)
            if value is not None:
                tensors[name] = self._without_padding(name, value, like.shape[0] if like.shape else 0)
        self._check(tensors)
        return tensors

    def _unconverted(self, name: str) -> LazyTensor | None:
        """Return a tensor that is the same in files and in memory."""
        value = self._in_memory(name)
        if value is None and name == "score.bias" and self.checkpoint.kind == "value":
            return ZeroTensor((1,), self.export.dtype)  # the checkpoint's head has no bias
        return value

    def _converted(self, name: str) -> LazyTensor | None:
        """Return a tensor that the checkpoint contains in the format of files."""
        return self._lookup(name) if name not in self.export.weights else None

    def _in_memory(self, name: str) -> LazyTensor | None:
        """Return the tensor with this name in memory, merged with its adapter."""
        names = [name, *(alias for alias, first in self.aliases.items() if first == name)]
        values = [value for alias in names if (value := self._lookup(alias)) is not None]
        if len(values) > 1 and (difference := value_difference(values[0], values[1], 0.0)):
            raise ValueError(
                f"{self.checkpoint.folder}: {' and '.join(names[:2])} differ ({difference}), so they are not tied. "
                "Remove --tie-word-embedding, or correct tie_word_embeddings in config.json."
            )
        layer, adapters = name.removesuffix(".weight"), self.checkpoint.adapters
        if not values or adapters is None or layer not in adapters.matrices:
            return values[0] if values else None
        return adapters.merged(layer, values[0], _is_transposed(self.skeleton, layer))

    def _lookup(self, name: str) -> LazyTensor | None:
        self.used.add(name)
        if name in self.checkpoint.tensors:
            return self.checkpoint.tensors[name]
        base = self.checkpoint.base
        return base.get(name, base.get(name.removeprefix("model.")))

    def _without_padding(self, name: str, value: LazyTensor, rows: int) -> LazyTensor:
        """Return the tensor without padded rows of the vocabulary."""
        if name not in self._vocabulary or value.shape[0] <= rows:
            return value
        logger.info("%s: %d padded rows of the vocabulary are omitted", name, value.shape[0] - rows)
        return first_rows(value, rows)

    def _check(self, tensors: Mapping[str, LazyTensor]) -> None:
        surplus = {
            name: value
            for name, value in self.checkpoint.tensors.items()
            if name not in self.used and not _OBSOLETE.fullmatch(name)
        }
        stored = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in {**tensors, **surplus}.items()}
        expected = {name: TensorSpec(tuple(like.shape), like.dtype) for name, (like, _) in self.export.exported.items()}
        problems = tensor_differences(stored, expected)
        adapters = self.checkpoint.adapters.matrices if self.checkpoint.adapters is not None else {}
        if stray := sorted(layer for layer in adapters if f"{layer}.weight" not in self.export.weights):
            problems.append(f"adapters of layers that the model does not have: {', '.join(stray[:4])}")
        if problems:
            raise ValueError(
                f"{self.checkpoint.folder} is not the {type(self.skeleton).__name__} of its config.json: "
                f"{'; '.join(problems)}. See --is-value-model, --tie-word-embedding and --base-model."
            )


class _GroupConverter:
    """Converts tensors that are fused in memory; caches the tensors of the latest group."""

    def __init__(self, export: HFExport, find: Callable[[str], LazyTensor | None]) -> None:
        self._export, self._find = export, find
        self._sources: tuple[str, ...] = ()
        self._cached: dict[str, torch.Tensor] = {}

    def convert(self, name: str) -> torch.Tensor:
        sources = self._export.exported[name][1]
        if sources != self._sources:
            self._cached, self._sources = {}, sources
            self._cached = self._export.convert({source: self._read(source) for source in sources})
        return self._cached[name]

    def _read(self, name: str) -> torch.Tensor:
        stored, like = self._find(name), self._export.weights[name]
        assert stored is not None
        if tuple(stored.shape) != tuple(like.shape):
            raise ValueError(
                f"{name} has shape {list(stored.shape)} in the checkpoint, but {list(like.shape)} by config.json."
            )
        return read_tensor(stored, like.dtype)


@dataclass(frozen=True)
class _ConvertedTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    converter: _GroupConverter

    def read(self, box: Box, target: torch.Tensor) -> None:
        target.copy_(self.converter.convert(self.name)[slices(box)])


def _dtype(checkpoint: Checkpoint, option: str) -> torch.dtype:
    if option != "auto":
        return getattr(torch, option)
    configured = getattr(checkpoint.config, "dtype", None)
    if configured is not None:
        is_dtype = isinstance(configured, torch.dtype)
        return configured if is_dtype else getattr(torch, str(configured).removeprefix("torch."))
    ((most_common, _),) = Counter(value.dtype for value in checkpoint.tensors.values()).most_common(1)
    return most_common


def _vocabulary(skeleton: Any) -> set[int]:
    """Return the ids of the parameters with a row per token."""
    modules = [skeleton.base_model.get_input_embeddings()]
    if hasattr(skeleton, "get_output_embeddings"):
        modules.append(skeleton.get_output_embeddings())
    return {id(module.weight) for module in modules if module is not None}


def _is_transposed(skeleton: nn.Module, layer: str) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(skeleton.get_submodule(layer), Conv1D)
