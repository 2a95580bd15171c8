"""RunRecord: the recording of an RL run, its summary, and files of batches and responses."""

from __future__ import annotations

import copy
import logging
import os
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.recording.writer import delete_oldest
from verl.trainer.common.dumps import ResponseFiles, dump_batch
from verl.trainer.common.recorder import KEY, Groups, Recorder
from verl.trainer.common.run_start import RunStart
from verl.trainer.common.run_status import RunStatus
from verl.trainer.common.run_summary import RunSummary
from verl.trainer.ppo.recorded_rows import RecordedStep, RowOptions, record_validation, validation_lines
from verl.trainer.recovery.step_end import FOLDER, NonFatalFailures
from verl.utils.concurrency import JobThread
from verl.utils.fs import expand_path

logger = logging.getLogger(__name__)

VALIDATION_FOLDER = "val_only"
"""Folder in `trainer.default_local_dir` of the recordings of runs with `trainer.val_only`, a folder for each."""
_RESPONSES, _VALIDATION = "trainer.rollout_data_dir", "trainer.validation_data_dir"


class RunRecord:
    """Records the run, collects its summary and writes files of batches and responses. A file that cannot be written is
    a non-fatal failure.

    The recording and the JSONL files of responses are written in one background thread, from the same converted rows.
    The recording may contain only a sample; the JSONL files contain all responses, and training waits if the thread
    falls behind.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any, failures: NonFatalFailures, status: RunStatus) -> None:
        self._config, self._failures = config, failures
        self._trainer = config.trainer
        # A tokenizer cannot be used by two threads at the same time.
        self._tokenizer = copy.deepcopy(tokenizer)
        # A run that only validates does not own the run's folder, in which a training run may be recorded, and others
        # may validate at the same time.
        subfolder = validation_subfolder(config.trainer.default_local_dir) if config.trainer.val_only else ""
        self._thread = JobThread("recording")
        self.recorder = Recorder(config.trainer, "ppo", status, subfolder, self._thread)
        self._files = ResponseFiles(self._thread, failures, self.recorder.redaction)
        record = config.trainer.record
        budget = int(record.max_mb_per_step * 1e6)
        self._options = RowOptions(self._tokenizer, self.recorder.redaction, record.texts, budget)
        self.summary = RunSummary()

    def open(self, start: RunStart, groups: Groups) -> None:
        """Begin to record."""
        if not self._trainer.record.enable:
            return
        open_recording = partial(self._open, start, groups)
        self._failures.dump(KEY, str(self.recorder.folder), start.step, open_recording)

    def _open(self, start: RunStart, groups: Groups) -> None:
        first_step = 0 if self._trainer.val_only else start.first_step
        self.recorder.open(first_step, self._config.to_dict(), groups, start.resume_from, self._tokenizer)
        if self._trainer.val_only:
            delete_oldest(self.recorder.folder.parents[1].iterdir(), int(self._trainer.record.max_gb * 1e9))

    def close(self, step: int, error: BaseException | None) -> None:
        """Write everything that was recorded. `error`: the exception that ends the run, if any."""
        try:
            if error is None or isinstance(error, Exception):  # after a second stop signal, do not wait
                self._files.wait()
        finally:
            self.recorder.close(step, error)
            self._thread.close()

    def dump(self, batch: DataProto, step: int, version: int, rewards: Collection[str], has_bad_update: bool) -> None:
        """Record the groups and trajectories of a step; write the batch if `trainer.dump_steps` contains the step or
        `has_bad_update` is set; write the responses if `trainer.rollout_data_dir` is set.

        `version`: version of the policy before the update of the step. `rewards`: columns that the reward function
        returned.
        """
        if step in self._trainer.dump_steps or has_bad_update:
            folder = self._trainer.default_local_dir
            dumped = self._failures.dump(FOLDER, folder, step, partial(dump_batch, batch, folder, step))
            if dumped is not None:
                logger.info("batch of step %d written to %s", step, dumped)
        recorded = RecordedStep(batch, step, version, rewards, self._options)
        with self.recorder.timed():
            if (responses_folder := self._trainer.rollout_data_dir) is not None:
                fetched = self._failures.dump(_RESPONSES, responses_folder, step, recorded.fetch_tokens)
                if fetched is not None:
                    self._files.submit(_RESPONSES, responses_folder, step, fetched.lines)
            self.recorder.submit(recorded.write, step)

    def validation(self, samples: Mapping[str, Sequence[Any]], correct: Sequence[bool | None], step: int) -> None:
        """Record scored responses to the validation prompts (`Validator`); `correct`: whether each
        response is correct."""
        with self.recorder.timed():
            if (folder := self._trainer.validation_data_dir) is not None:
                self._files.submit(_VALIDATION, folder, step, partial(validation_lines, samples, step))
            job = partial(record_validation, {**samples, "correct": correct}, step, self._options)
            self.recorder.submit(job, step)
        if self._trainer.val_only:  # writing the files is the purpose of the run: a failure is fatal
            self._files.wait(essential=True)

    def wait_for_files(self) -> None:
        """Wait until the files of responses are written."""
        self._files.wait()

    def end_step(self, step: int) -> dict[str, float]:
        """Report failed files; return the seconds that recording took in the trainer's thread, as metrics."""
        self._files.report()
        return self.recorder.end_step(step, self._failures)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step, and add them to the summary."""
        self.summary.add(step, metrics, time.monotonic())
        self.recorder.log(metrics, step)


def validation_subfolder(run_folder: str) -> str:
    """Return where a run that only validates is recorded, relative to `run_folder`: `val_only/<time>-<id>`. Restarts of
    a command share it."""
    run_id = os.environ.get("VERL_RUN") or uuid.uuid4().hex[:12]
    root = Path(expand_path(run_folder)).absolute() / VALIDATION_FOLDER
    earlier = [path.name for path in root.glob(f"*-{run_id}")]
    name = earlier[0] if earlier else f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id}"
    return f"{VALIDATION_FOLDER}/{name}"
