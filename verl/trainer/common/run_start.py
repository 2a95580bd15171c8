"""RunStart: checks before models are loaded. No other run uses the folder, folders are writable, checkpoints fit on the
disk, and the step to resume from is complete and matches the models."""

from __future__ import annotations

import functools
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config import PPOConfig, SupervisedConfig
from verl.config.names import TRAINING_ENGINES
from verl.config.problems import Problem, Report
from verl.utils.checkpoint import remote
from verl.utils.checkpoint.checkpoint_manager import reading, resolve_resume
from verl.utils.checkpoint.folders import FolderOwnership, FolderTakenError, bytes_of_all, move_aside, newest_first
from verl.utils.checkpoint.manifest import read_manifest
from verl.utils.disk import describe_disk, format_bytes
from verl.utils.fs import expand_path, resolve_model_path
from verl.utils.tracking import tracking_folders, tracking_problems

logger = logging.getLogger(__name__)

_DIR = "trainer.default_local_dir"
# Bytes of a number in float32, and in bfloat16 or float16.
_FLOAT32, _HALF = 4, 2
_OTHER_FOLDER = "Give each run its own folder: set trainer.experiment_name (it is part of the default) or the folder"


@dataclass(frozen=True, eq=False)
class RunPart:
    """One trained model of a run."""

    folder: str
    """Its folder in a checkpoint: `actor`, `critic`, or `.` for the checkpoint itself."""
    key: str
    """The configuration key of its model block."""
    kind: Any
    """Kind of model: `causal_lm`, `value`, …"""
    block: Any
    """The configuration block with its engine, optimizer and checkpoint."""
    model: Any
    """The configuration block of its model."""
    limit: int | None
    """Maximum number of checkpoints that contain it; None: no limit."""

    @property
    def precision(self) -> str:
        """The precision of matrix products and of the exported model."""
        return self.block[TRAINING_ENGINES[self.block.strategy].block].mixed_precision

    @functools.cached_property
    def expected(self) -> Any:
        """The tensors that a checkpoint must contain; read from the config of the model, not from its weights."""
        from verl.workers.engine.fsdp.engine import expected_model

        return expected_model(self._local_path, self.kind, self.model)

    @functools.cached_property
    def initial_weights(self) -> dict[str, str]:
        """Digests of the weights in the model's folder, by tensor name."""
        from verl.workers.engine.common.checkpoint_compatibility import weight_digests

        return weight_digests(self._local_path)

    @property
    def _local_path(self) -> str:
        return resolve_model_path(self.model.path, f"{self.key}.path")


class RunStart:
    """Created once per run, after its configuration was validated. Raises ConfigError with all problems at once.

    `resume_from`: folder of the step to resume from (None: start from the beginning). `step`: its number. `step_bytes`:
    expected size of one checkpoint. The run folder is locked until `close`, unless `saves=False`.
    """

    def __init__(
        self,
        trainer_config: Any,
        parts: Sequence[RunPart],
        folders: Mapping[str, str | None] | None = None,
        saves: bool = True,
    ) -> None:
        """`folders`: further folders that the run writes to, by configuration key."""
        report = Report()
        self._config, self._parts = trainer_config, parts
        self._lock: FolderOwnership | None = None
        self.resume_from: Path | None = None
        self.step = 0
        self.step_bytes = 0
        try:
            check_writable(trainer_config, folders or {}, report)
            if saves:
                self._lock_folder(report)
            if self._lock is not None and parts:
                self.step_bytes = sum(map(step_bytes, parts))
                check_space(trainer_config, parts, trainer_config.save_freq, report)
            if self._lock is not None or not saves:
                self._resolve_resume(parts, report)
            report.raise_if_any()
            if self._lock is not None and trainer_config.resume_mode == "disable":
                self._move_steps_aside()
        except BaseException:
            self.close()
            raise

    @property
    def first_step(self) -> int:
        """The first step that is logged: 0 is the state before training."""
        return 0 if self.resume_from is None else self.step + 1

    @functools.cached_property
    def files(self) -> dict[str, bytes]:
        """Files to store in every saved step, by name: the digests of the models' initial weights."""
        from verl.workers.engine.common.checkpoint_compatibility import INITIAL_WEIGHTS_JSON

        weights = {part.folder: part.initial_weights for part in self._parts}
        return {INITIAL_WEIGHTS_JSON: json.dumps(weights).encode()} if weights else {}

    def close(self) -> None:
        """Release the folder; safe to call twice."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _lock_folder(self, report: Report) -> None:
        config = self._config
        root = Path(expand_path(config.default_local_dir)).absolute()
        try:
            self._lock = FolderOwnership(root)
        except FolderTakenError as error:
            owner = f": {error.owner}" if error.owner else ""
            report.add(Problem(_DIR, config.default_local_dir, f"another run is writing there{owner}", _OTHER_FOLDER))
            return
        except OSError as error:
            why = f"the folder cannot be written to ({error.strerror})"
            report.add(Problem(_DIR, config.default_local_dir, why, "Choose another folder, or change its permissions"))
            return
        if config.resume_mode == "disable" and config.used_dir == "refuse":
            self._check_unused(root, report)

    def _check_unused(self, root: Path, report: Report) -> None:
        """Report a checkpoint folder or a folder of copies that has steps of an earlier run."""
        config, steps = self._config, [step.name for step in newest_first(root)]
        fix = f"{_OTHER_FOLDER}; or set trainer.used_dir=move_aside; or resume from them with trainer.resume_mode=auto"
        folders = {_DIR: (config.default_local_dir, steps)}
        if (copies := config.default_hdfs_dir) is not None:
            folders[remote.KEY] = (copies, remote.remote_steps(copies))
        for key, (folder, names) in folders.items():
            if names:
                why = f"it has steps of an earlier run ({names[0]} is the newest) and resume_mode is disable"
                report.add(Problem(key, folder, why, fix))

    def _move_steps_aside(self) -> None:
        """Move steps and copies of an earlier run to another folder. Called when all checks have passed."""
        config = self._config
        aside = move_aside(Path(expand_path(config.default_local_dir)).absolute())
        if aside is not None:
            logger.warning("%s: moved the steps of an earlier run to %s (trainer.resume_mode=disable)", _DIR, aside)
        if config.default_hdfs_dir is not None:
            copies = remote.move_remote_aside(config.default_hdfs_dir)
            if copies is not None:
                logger.warning("%s: moved the copies of an earlier run to %s", remote.KEY, copies)

    def _resolve_resume(self, parts: Sequence[RunPart], report: Report) -> None:
        config = self._config
        self.resume_from = resolve_resume(
            config.resume_mode, config.default_local_dir, config.resume_from_path, config.default_hdfs_dir
        )
        if self.resume_from is not None:
            with reading(self.resume_from):
                self.step = read_manifest(self.resume_from).step
                for part in parts:
                    _check_part(self.resume_from, part, config.resume_mode, report)


def _check_part(step: Path, part: RunPart, mode: str, report: Report) -> None:
    from verl.workers.engine.common.checkpoint_compatibility import (
        NOT_SAVED,
        checkpoint_differences,
        read_digests,
        weight_differences,
    )

    folder = step / part.folder
    contents = [content for content in part.block.checkpoint.load_contents if content != "hf_model"]
    mismatches = checkpoint_differences(folder, contents, part.expected)
    if not mismatches and "model" in contents:
        mismatches = weight_differences(read_digests(step).get(part.folder, {}), part.initial_weights)
    if mismatches:
        fix = (
            "Restore the model and its keys as they were when the checkpoint was saved; or start anew in another "
            "folder (trainer.experiment_name or trainer.default_local_dir)"
        )
        if mismatches[0].startswith(NOT_SAVED):
            fix = "Leave them out of checkpoint.load_contents, or choose another step"
        why = f"the checkpoint {folder} (trainer.resume_mode={mode}) does not match it: {'; '.join(mismatches)}"
        report.add(Problem(f"{part.key}.path", part.model.path, why, fix))


def run_parts(config: PPOConfig | SupervisedConfig, worker_classes: Iterable[type] = ()) -> list[RunPart]:
    """Return the trained models of a run; [] if it uses a worker class of the user, whose checkpoints are unknown."""
    if any(not cls.__module__.startswith("verl.") for cls in worker_classes):
        return []
    if isinstance(config, SupervisedConfig):
        parts = [RunPart(".", "model", config.model_kind, config, config.model, config.trainer.max_ckpt_to_keep)]
    else:
        policy, trainer = config.actor_rollout_ref, config.trainer
        limit = trainer.max_actor_ckpt_to_keep
        parts = [RunPart("actor", "actor_rollout_ref.model", "causal_lm", policy.actor, policy.model, limit)]
        if config.critic.enable:
            limit = trainer.max_critic_ckpt_to_keep
            parts.append(RunPart("critic", "critic.model", "value", config.critic, config.critic.model, limit))
    return parts


def step_bytes(part: RunPart) -> int:
    """Return the size of a part in one checkpoint: float32 shards, two moments per trained parameter, the exported
    model."""
    expected, contents = part.expected, part.block.checkpoint.save_contents
    stored = sum(math.prod(spec.shape) for spec in expected.tensors.values())
    trained = sum(math.prod(spec.shape) for spec in expected.trained.values())
    copies = 2 if expected.model_info["lora"] else 1  # adapters are also written in the format of peft
    total = 0
    if "model" in contents:
        total += stored * _FLOAT32 * copies
    if "optimizer" in contents:
        total += 2 * trained * (_HALF if part.block.optim.state_dtype == "bf16" else _FLOAT32)
    if "hf_model" in contents:
        total += expected.parameters * (_FLOAT32 if part.precision == "fp32" else _HALF)
    return total


def check_space(config: Any, parts: Sequence[RunPart], save_freq: int | None, report: Report) -> None:
    """Report a problem if the steps to keep and one that is being written do not fit on the disk."""
    root = Path(expand_path(config.default_local_dir)).absolute()
    sizes = {part: step_bytes(part) for part in parts}
    free = shutil.disk_usage(root).free
    if any(part.limit is not None for part in parts) and config.resume_mode != "disable":
        free += bytes_of_all(root)  # old steps are deleted as new ones are saved; steps moved aside are kept
    needed = sum(
        size * _stored_steps(part.limit, config.total_training_steps, save_freq) for part, size in sizes.items()
    )
    one = sum(sizes.values())
    if needed > free:
        why = (
            f"its disk {describe_disk(root)} has {format_bytes(free)} for checkpoints, which need"
            f" {format_bytes(needed)}: a step takes {format_bytes(one)}, and the kept steps and one being written must"
            " fit"
        )
        fix = (
            "Free some space or choose another disk; or keep fewer steps (trainer.max_actor_ckpt_to_keep, in SFT "
            "max_ckpt_to_keep) or less of each (checkpoint.save_contents)"
        )
        report.add(Problem("trainer.default_local_dir", config.default_local_dir, why, fix))
    elif one:
        logger.info("A step is about %s; %s has space for %d.", format_bytes(one), describe_disk(root), free // one)


def check_writable(config: Any, folders: Mapping[str, str | None], report: Report) -> None:
    """Report problems of the trackers, and folders of trackers or keys that cannot be written."""
    for text in tracking_problems(config.logger):
        report.add(Problem("trainer.logger", config.logger, text, "Correct it, or leave it out"))
    tracker_folders = {("trainer.logger", str(folder)) for folder in tracking_folders(config)}
    for key, folder in [
        *sorted(tracker_folders),
        *((key, folder) for key, folder in folders.items() if folder is not None),
    ]:
        problem = write_problem(Path(expand_path(folder)))
        if problem is not None:
            report.add(Problem(key, folder, problem, "Choose another folder, or change its permissions"))


def write_problem(folder: Path) -> str | None:
    """Create the folder if necessary; return why it cannot be written to, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-") as file:
            file.write(b"1")
            file.flush()
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror or error})"
    return None


def _stored_steps(limit: int | None, total_steps: int | None, save_freq: int | None) -> int:
    """Return the number of steps that must fit at once; 1 without a limit, since the user may move them elsewhere."""
    if limit is None or (save_freq is not None and save_freq <= 0):
        return 1
    if total_steps is None or save_freq is None:
        return limit + 1
    return min(limit + 1, math.ceil(total_steps / save_freq))
