"""A run's state as `global_step_N/`, written behind training and renamed into place: the frame around what each trainer
saves and loads."""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.protocol import DataProtoFuture
from verl.single_controller.base import ClassWithInitArgs
from verl.trainer.common.run_start import RunStart
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, reading
from verl.utils.checkpoint.manifest import read_manifest
from verl.utils.checkpoint.remote import KEY as REMOTE
from verl.utils.checkpoint.steps import bytes_of_newest
from verl.utils.disk import disk_full_error, is_disk_full
from verl.utils.exceptions import annotate_error
from verl.utils.plain_store import load_plain, save_plain

logger = logging.getLogger(__name__)

STATE = "trainer.pt"
# Waiting so long for the save before is worth a line.
_LONG_WAIT_S = 5.0
# A run that is over waits so long for the copies of its last steps.
_LAST_COPIES_S = 600.0


@dataclass(frozen=True)
class Save:
    """What became of a save that was begun."""

    step: int
    path: Path
    seconds: float
    """From its beginning until it was in place, or had failed."""
    gigabytes: float = 0.0
    error: Exception | None = None

    def result(self, verify: bool = False) -> dict[str, float]:
        """Its metrics, or what went wrong. `verify` reads every file back."""
        if self.error is not None:
            annotate_error(self.error, phase="save_checkpoint", step=self.step)
            raise self.error
        problems = CheckpointManager.verify(self.path) if verify else []
        if problems:
            raise OSError(f"{self.path} was written and is not whole: {'; '.join(problems[:5])}")
        return {"checkpoint/background_s": self.seconds, "checkpoint/gb": self.gigabytes}


class Saver:
    """The saves of a run, one after the other: `begin` returns once the state is frozen, a thread does the rest.

    What is due while the one before is being written waits for that.
    """

    def __init__(
        self,
        config: Any,
        max_to_keep: int | Mapping[str, int | None] | None,
        tokenizer: Any,
        start: Callable[[], RunStart | None] = lambda: None,
    ) -> None:
        """`config` is the whole run's. `start` returns the run's `RunStart`, which has the expected bytes of a step and
        the files that are stored in every step; None: the run has not started."""
        self._config, self._tokenizer, self._start = config, tokenizer, start
        trainer = config.trainer
        self._manager = CheckpointManager(trainer.default_local_dir, max_to_keep, trainer.default_hdfs_dir)
        self.root = self._manager.root
        self._thread: threading.Thread | None = None
        self._done: list[Save] = []
        self._waited = 0.0
        self.newest_step: int | None = None
        """The last one that was begun and has not failed, or that the run went on from."""
        self.seconds: float | None = None
        """What the last save took from its beginning to its end."""
        self.beside_models: dict[str, bytes] = {}
        """Files by name that go, with the tokenizer, to every model that transformers loads."""

    def begin(self, state: Mapping[str, Any], parts: Mapping[str, Any], models: Sequence[str] = ()) -> None:
        """Save the state after `state["global_steps"]` steps.

        `parts`: the worker groups that save into a folder of the step, by its name; into the folders `models` of it,
        which transformers loads, goes the tokenizer.
        """
        start, step = time.monotonic(), state["global_steps"]
        self.settle()
        files = {"config.json": json.dumps(self._config.to_dict(), indent=1, default=str).encode()}
        if (run_start := self._start()) is not None:
            files |= run_start.files
        beside = self._tokenizer_files | self.beside_models
        files |= {f"{model}/{name}": content for model in models for name, content in beside.items()}
        kept = copy.deepcopy(dict(state))
        begun: list[Callable[[], Any]] = []
        try:
            folder = self._manager.begin(step)
            for name, group in parts.items():
                begun.append(_begin_part(group, str(folder / name)))
        except Exception as error:
            failure = self._given_up(error, step, begun)
            if failure is error:
                raise
            raise failure from error
        except BaseException:
            self._manager.abandon()
            raise

        def write() -> None:
            try:
                _wait_for_all(begun)
                save_plain(kept, folder / STATE, what="trainer state")
                for name, content in files.items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(content)
                target = self._manager.commit(step)
                gigabytes = read_manifest(target).total_bytes / 1e9
                save = Save(step, target, time.monotonic() - start, gigabytes)
            except Exception as error:  # noqa: BLE001 - raised by whoever asks for the result
                save = Save(step, folder, time.monotonic() - start, error=self._given_up(error, step))
            self._end(save)

        self.newest_step = step
        self._thread = threading.Thread(target=write, name=f"save-step-{step}", daemon=True)
        self._thread.start()

    def wait_for_turn(self, step: int) -> None:
        """Return when the save of `step` can begin: when the one before is over."""
        start = time.monotonic()
        self.settle()
        seconds = time.monotonic() - start
        self._waited += seconds
        if seconds >= _LONG_WAIT_S:
            logger.warning(
                "the save of step %d waited %.0f s for the one before, which was still being written: set a larger"
                " trainer.save_freq, or a faster disk for trainer.default_local_dir",
                *(step, seconds),
            )

    def collect(self, wait: bool = False) -> list[Save]:
        """Saves that have ended since this was last asked."""
        if wait:
            self.settle()
        done, self._done = self._done, []
        return done

    def settle(self) -> None:
        """Return when nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Seconds that a save waited for the one before, once; copies that failed so far, if any."""
        found = {"checkpoint/wait_s": self._waited} if self._waited else {}
        self._waited = 0.0
        copies = self._manager.copies
        return found | ({"training/failed_copies": float(copies.failed)} if copies and copies.failed else {})

    @contextmanager
    def settled(self) -> Iterator[None]:
        """An error that leaves this block finds the folder of checkpoints as it will stay; a stop does not wait."""
        try:
            yield
        except Exception:
            self.settle()
            raise

    def close(self) -> None:
        """The run is over: wait for what is being written and, for a while, for the copies.

        In a `finally`, after an error, copies are left to the restart; a stop at once waits for nothing.
        """
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, Exception):
            return
        self.settle()
        for save in self.collect():
            if save.error is not None:
                logger.error("save of step %d failed: %s", save.step, save.error)
        copies = self._manager.copies
        missing = copies.wait(_LAST_COPIES_S if error is None else 0.0) if copies is not None else []
        if missing:
            logger.error(
                "%s: %s has no whole copy of %s, which %s has. The same command copies them at its next save; or copy"
                " the folders by hand, manifest.json last.",
                *(REMOTE, self._config.trainer.default_hdfs_dir, ", ".join(missing), self.root),
            )

    def _end(self, save: Save) -> None:
        if save.error is None:
            logger.info("saved to %s", save.path)
            self.seconds = save.seconds
        elif self.newest_step == save.step:
            self.newest_step = None
        self._done.append(save)

    def _given_up(self, error: Exception, step: int, begun: Sequence[Callable[[], Any]] = ()) -> Exception:
        """What to raise for a save that failed, when none of its parts is being written and its space is free."""
        try:
            _wait_for_all(begun)
        except Exception as another:  # noqa: BLE001 - the first error is raised, this one is said
            logger.warning("save of step %d: %s", step, another)
        try:
            run_start = self._start()
            needed = max(run_start.step_bytes if run_start else 0, bytes_of_newest(self.root))
            self._manager.abandon()
            return disk_full_error(self.root, step, needed) if is_disk_full(error) else error
        except OSError as another:
            logger.warning("save of step %d: what was written could not be removed: %s", step, another)
            return error

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        """Read once: a tokenizer that another thread is using cannot be saved."""
        with tempfile.TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def background_part(group: Any, cls: type) -> Any:
    """The group as `Saver.begin` takes it: with `begin_save` only if that does what its `save_checkpoint` does,
    which may be the user's own."""
    bases = ClassWithInitArgs(cls).cls.__mro__
    first = next((base for base in bases if {"begin_save", "save_checkpoint"} & vars(base).keys()), object)
    return group if "begin_save" in vars(first) else SimpleNamespace(save_checkpoint=group.save_checkpoint)


def _begin_part(group: Any, path: str) -> Callable[[], Any]:
    """Returns what waits for its end. Without `begin_save` that has come already."""
    if hasattr(group, "begin_save"):
        group.begin_save(path)
        return group.finish_save
    _value(group.save_checkpoint(path))
    return lambda: None


def _wait_for_all(begun: Sequence[Callable[[], Any]]) -> None:
    """Until none of the parts is being written any more; then raise the first failure, if there is one."""
    failures = []
    for finish in begun:
        try:
            _value(finish())
        except Exception as error:  # noqa: BLE001 - raised below, when no other part is being written
            failures.append(error)
    if failures:
        raise failures[0]


def _value(result: Any) -> Any:
    return result.get() if isinstance(result, DataProtoFuture) else result


def load_step(folder: Path | None, read: Callable[[Path, Mapping[str, Any]], None]) -> None:
    """Give `read` the folder of a saved step and its state; nothing where the run begins anew."""
    if folder is None:
        logger.info("no checkpoint to resume from: starting at step 0")
        return
    with reading(folder):
        state = load_plain(folder / STATE)
        read(folder, state)
    logger.info("resumed from %s: step %d", folder, state["global_steps"])
