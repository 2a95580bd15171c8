"""The commands `merge` and `test`: write a checkpoint as a Hugging Face model, or compare the two."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from verl.model_merger import MergeOptions
from verl.model_merger.checkpoint import Checkpoint, open_checkpoint
from verl.model_merger.lazy_tensors import differences, folder_tensors, read_tensor
from verl.model_merger.merged_model import MergeResult, create_result
from verl.utils.checkpoint.folders import writer_lock
from verl.utils.disk import describe_disk, format_bytes, sync_folder

logger = logging.getLogger(__name__)

_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "preprocessor_config.json", "processor_config.json"),
)
_LOG_INTERVAL_S = 5.0


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
    """Copy the tokenizer and other preprocessing files."""
    source = checkpoint.config_folder
    files = {path for pattern in _TOKENIZER for path in source.glob(pattern)} if source is not None else set()
    for path in sorted(files):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if not any(path.name.startswith("tokenizer") for path in files):
        logger.warning("no tokenizer found for %s: copy that of the model into the result", checkpoint.folder)


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
    """Context with a temporary folder, which is renamed to `target` at exit, and removed after an error.

    Leftovers of a killed process are removed first; ValueError if another process writes to the folder.
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
            raise


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
