"""Save and load the state of a run as `global_step_N/`: written in the background, then renamed into place."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.base.worker_group import wait_for_result
from verl.trainer.common.run_start import RunStart
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, reading
from verl.utils.checkpoint.folders import bytes_of_newest
from verl.utils.checkpoint.manifest import read_manifest
from verl.utils.checkpoint.remote import KEY as REMOTE
from verl.utils.disk import disk_full_error, is_disk_full
from verl.utils.exceptions import annotate_error
from verl.utils.nested import load_plain, save_plain
from verl.utils.py_functional import mask_secrets

logger = logging.getLogger(__name__)

STATE = "trainer.pt"
"""File of a step with the state of the trainer."""
# Longer waits for the previous save are logged.
_LONG_WAIT_S = 5.0
# Maximum time to wait for uploads at the end of a run.
_MAX_UPLOAD_WAIT_S = 600.0


@dataclass(frozen=True)
class SaveResult:
    """The outcome of a save."""

    step: int
    path: Path
    """Folder of the step; of a failed save, the unfinished folder, which was removed."""
    seconds: float
    """Duration until the save was complete or failed."""
    gigabytes: float = 0.0
    """Size of the step; 0 for a failed save."""
    error: Exception | None = None

    def metrics(self, verify: bool = False) -> dict[str, float]:
        """Return the metrics of a successful save; raise the error of a failed one. `verify`: read every file back."""
        if self.error is not None:
            annotate_error(self.error, phase="save_checkpoint", step=self.step)
            raise self.error
        problems = CheckpointManager.verify(self.path) if verify else []
        if problems:
            raise OSError(f"{self.path} was written but is damaged: {'; '.join(problems[:5])}")
        return {"checkpoint/background_s": self.seconds, "checkpoint/gb": self.gigabytes}


class Saver:
    """Saves the state of a run in the background: `begin` waits for the previous save, copies the state and returns; a
    thread writes it."""

    def __init__(
        self,
        config: Any,
        max_to_keep: int | Mapping[str, int | None] | None,
        tokenizer: Any,
        get_run_start: Callable[[], RunStart | None] = lambda: None,
    ) -> None:
        """`config`: configuration of the run. `get_run_start` returns the `RunStart` of the run (the expected size of a
        step, and files to store in every step), or None before the run has started."""
        self._config, self._tokenizer, self._get_run_start = config, tokenizer, get_run_start
        trainer = config.trainer
        self._manager = CheckpointManager(trainer.default_local_dir, max_to_keep, trainer.default_hdfs_dir)
        self.root = self._manager.root
        self._thread: threading.Thread | None = None
        self._results: deque[SaveResult] = deque()
        """Results that `collect` has not returned yet. The thread of the save appends to it."""
        self._waited_s = 0.0
        self.newest_step: int | None = None
        """The step that was saved last, is being saved, or from which the run resumed; None after a failed save."""
        self.last_save_seconds: float | None = None
        """Duration of the last successful save."""
        self.on_end: Callable[[SaveResult], None] = lambda save: None
        """Called in the thread of the save when it is complete or failed."""
        self.model_files: dict[str, bytes] = {}
        """Additional files to write into the folder of every exported model, by name."""

    def begin(self, state: Mapping[str, Any], parts: Mapping[str, Any], models: Sequence[str] = ()) -> None:
        """Begin to save the state after `state["global_steps"]` steps.

        `parts`: worker groups by subfolder of the step; each group saves its state into its subfolder. `models`:
        subfolders of the step with an exported model, into which the tokenizer is written.
        """
        start, step = time.monotonic(), state["global_steps"]
        self.wait()
        files, copied_state = self._collect_files(models), copy.deepcopy(dict(state))
        pending_parts: list[Callable[[], Any]] = []
        try:
            folder = self._manager.begin(step)
            for name, group in parts.items():
                pending_parts.append(_begin_part(group, str(folder / name)))
        except Exception as error:
            failure = self._abandon(error, step, pending_parts)
            if failure is error:
                raise
            raise failure from error
        except BaseException:  # a stop signal: do not wait for the parts
            self._manager.abandon()
            raise
        self.newest_step = step
        arguments = (folder, copied_state, files, pending_parts, start)
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"save-step-{step}", daemon=True)
        self._thread.start()

    def _collect_files(self, models: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of all files of a step that no part writes, by path in the step."""
        # For information: a resumed run reads its configuration from its command, not from this file.
        config = mask_secrets(self._config.to_dict())
        files = {"config.json": json.dumps(config, indent=1, default=str).encode()}
        if (run_start := self._get_run_start()) is not None:
            files |= run_start.files
        model_files = self._tokenizer_files | self.model_files
        return files | {f"{model}/{name}": content for model in models for name, content in model_files.items()}

    def _write(
        self,
        folder: Path,
        state: dict[str, Any],
        files: Mapping[str, bytes],
        pending_parts: Sequence[Callable[[], Any]],
        start: float,
    ) -> None:
        """Complete a save that was begun at `start`, and record its result. Runs in the thread of the save."""
        step = state["global_steps"]
        try:
            _wait_for_all(pending_parts)
            save_plain(state, folder / STATE, what="trainer state")
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            target = self._manager.commit(step)
            gigabytes = read_manifest(target).total_bytes / 1e9
            save = SaveResult(step, target, time.monotonic() - start, gigabytes)
        except Exception as error:  # noqa: BLE001 - raised by `SaveResult.metrics`
            save = SaveResult(step, folder, time.monotonic() - start, error=self._abandon(error, step))
        self._end(save)

    def wait_for_turn(self, step: int) -> None:
        """Wait for the previous save before step `step` is saved; add the time to `checkpoint/wait_s`."""
        start = time.monotonic()
        self.wait()
        seconds = time.monotonic() - start
        self._waited_s += seconds
        if seconds >= _LONG_WAIT_S:
            logger.warning(
                "the save of step %d waited %.0f s for the previous one: set a larger trainer.save_freq, or use a"
                " faster disk for trainer.default_local_dir",
                step,
                seconds,
            )

    def collect(self, wait: bool = False) -> list[SaveResult]:
        """Return the saves that have ended since the last call. `wait`: wait for the save in progress first."""
        if wait:
            self.wait()
        return [self._results.popleft() for _ in range(len(self._results))]

    def wait(self) -> None:
        """Wait for the save in progress."""
        if self._thread is not None:
            self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Return the seconds that `wait_for_turn` took since the last call, and the number of failed uploads so far.

        Values of 0 are left out.
        """
        metrics = {"checkpoint/wait_s": self._waited_s} if self._waited_s else {}
        self._waited_s = 0.0
        uploader = self._manager.uploader
        if uploader is not None and uploader.failed:
            metrics["training/failed_copies"] = float(uploader.failed)
        return metrics

    @contextmanager
    def wait_on_error(self) -> Iterator[None]:
        """Context manager: if its body raises an Exception, wait for the save in progress before it propagates.

        Stop signals are BaseExceptions: they propagate at once.
        """
        try:
            yield
        except Exception:
            self.wait()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Wait at the end of the run for the save in progress and, for up to 10 minutes, for uploads to
        `trainer.default_hdfs_dir`; log what failed.

        `error`: the exception that ends the run. After an Exception, do not wait for uploads; after a stop signal
        (another BaseException), do not wait at all.
        """
        if error is not None and not isinstance(error, Exception):
            return
        self.wait()
        for save in self.collect():
            if save.error is not None:
                logger.error("save of step %d failed: %s", save.step, save.error)
        uploader = self._manager.uploader
        missing_steps = [] if uploader is None else uploader.wait(_MAX_UPLOAD_WAIT_S if error is None else 0.0)
        if missing_steps:
            logger.error(
                "%s: %s has no complete copy of %s. The files are in %s. They are copied at the next save, if you start"
                " the same command again; or copy these folders yourself, manifest.json last.",
                REMOTE,
                self._config.trainer.default_hdfs_dir,
                ", ".join(missing_steps),
                self.root,
            )

    def _end(self, save: SaveResult) -> None:
        """Log and store the result of a save. Runs in the thread of the save."""
        if save.error is None:
            logger.info("saved to %s", save.path)
            self.last_save_seconds = save.seconds
        elif self.newest_step == save.step:
            self.newest_step = None  # so that the end of the run saves this step again
        self.on_end(save)
        self._results.append(save)

    def _abandon(self, error: Exception, step: int, pending_parts: Sequence[Callable[[], Any]] = ()) -> Exception:
        """Wait for the parts of a failed save and remove its files; return the error to raise.

        That is `error`, or for a full disk an error with the space that a save needs.
        """
        try:
            _wait_for_all(pending_parts)
        except Exception as another:  # noqa: BLE001 - the first error is raised, this one is logged
            logger.warning("save of step %d: %s", step, another)
        try:
            run_start = self._get_run_start()
            needed = max(run_start.step_bytes if run_start else 0, bytes_of_newest(self.root))
            self._manager.abandon()
            return disk_full_error(self.root, step, needed) if is_disk_full(error) else error
        except OSError as another:
            logger.warning("save of step %d: its files could not be removed: %s", step, another)
            return error

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name. Read once, since a tokenizer cannot be saved while another thread uses it."""
        with tempfile.TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def background_part(group: Any, cls: type) -> Any:
    """Return a worker group as a part for `Saver.begin`.

    A user's worker class `cls` may override only `save_checkpoint`: the returned part then has no `begin_save`, so that
    the override is called, synchronously.
    """
    bases = ClassWithInitArgs(cls).cls.__mro__
    defining_class = next((base for base in bases if {"begin_save", "save_checkpoint"} & vars(base).keys()), object)
    return group if "begin_save" in vars(defining_class) else SimpleNamespace(save_checkpoint=group.save_checkpoint)


def _begin_part(group: Any, path: str) -> Callable[[], Any]:
    """Begin the save of a part and return a function that waits for its end. A group without `begin_save` is saved
    synchronously."""
    if hasattr(group, "begin_save"):
        group.begin_save(path)
        return group.finish_save
    wait_for_result(group.save_checkpoint(path))
    return lambda: None


def _wait_for_all(pending_parts: Sequence[Callable[[], Any]]) -> None:
    """Wait for all parts; then raise the first failure, if there is one."""
    failures = []
    for finish in pending_parts:
        try:
            wait_for_result(finish())
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)
    if failures:
        raise failures[0]


def load_step(folder: Path | None, read: Callable[[Path, Mapping[str, Any]], None]) -> None:
    """Call `read` with the folder of a saved step and its state; do nothing if there is no step to resume from."""
    if folder is None:
        logger.info("no checkpoint to resume from: starting at step 0")
        return
    with reading(folder):
        state = load_plain(folder / STATE)
        read(folder, state)
    logger.info("resumed from %s: step %d", folder, state["global_steps"])
