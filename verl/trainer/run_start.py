"""Before models are loaded: the run owns its folder, and the step it goes on from is whole and fits its models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.config.problems import Problem, Report
from verl.trainer.output_checks import check_space, check_writable, step_bytes
from verl.trainer.run_parts import RunPart
from verl.utils.checkpoint import remote
from verl.utils.checkpoint.checkpoint_manager import reading, resolve_resume
from verl.utils.checkpoint.manifest import read_manifest
from verl.utils.checkpoint.ownership import FolderTakenError, Ownership
from verl.utils.checkpoint.steps import move_aside, newest_first, step_of
from verl.utils.fs import expand_path

logger = logging.getLogger(__name__)

_DIR = "trainer.default_local_dir"
_ANOTHER = "Give each run a folder of its own: set trainer.experiment_name (it is part of the default) or the folder"


class RunStart:
    """Made once per run, as soon as its configuration is known: every problem at once, as a ConfigError.

    `resume_from` is the step the run goes on from (None: it begins anew), `step` its number, `step_bytes` what
    one step will take. The run's folder is its own until `close`; a run that only reads (`saves=False`) owns none.
    """

    def __init__(
        self,
        trainer_config: Any,
        parts: Sequence[RunPart],
        folders: Mapping[str, str | None] | None = None,
        saves: bool = True,
    ) -> None:
        """`folders`: others that the run will write to, by key."""
        report = Report()
        self._config = trainer_config
        self._owned: Ownership | None = None
        self.resume_from: Path | None = None
        self.step = 0
        self.step_bytes = 0
        try:
            check_writable(trainer_config, folders or {}, report)
            if saves:
                self._take_folder(report)
            if self._owned is not None and parts:
                self.step_bytes = sum(map(step_bytes, parts))
                check_space(trainer_config, parts, trainer_config.save_freq, report)
            if self._owned is not None or not saves:
                self._find_step(parts, report)
            report.raise_if_any()
        except BaseException:
            self.close()
            raise

    @property
    def first_step(self) -> int:
        """The first step it logs: 0 is what is known before training."""
        return 0 if self.resume_from is None else self.step + 1

    def close(self) -> None:
        """Give the folder back; safe to call twice."""
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    def _take_folder(self, report: Report) -> None:
        config = self._config
        root = Path(expand_path(config.default_local_dir)).absolute()
        try:
            self._owned = Ownership(root)
        except FolderTakenError as error:
            owner = f": {error.owner}" if error.owner else ""
            report.add(Problem(_DIR, config.default_local_dir, f"another run is writing there{owner}", _ANOTHER))
            return
        except OSError as error:
            why = f"the folder cannot be written to ({error.strerror})"
            report.add(Problem(_DIR, config.default_local_dir, why, "Choose another, or change its rights"))
            return
        if config.resume_mode == "disable":
            self._refuse_used(root, report)

    def _refuse_used(self, root: Path, report: Report) -> None:
        """A run that begins anew is not mixed with another in its folder, nor in the copies of it."""
        config, steps = self._config, newest_first(root)
        if steps and config.used_dir == "move_aside":
            logger.warning("%s: steps of another run moved to %s", _DIR, move_aside(root))
        elif steps:
            why = f"it has {len(steps)} steps of another run ({steps[0].name} is the newest) and resume_mode is disable"
            fix = f"{_ANOTHER}; or set trainer.used_dir=move_aside; or go on from them with trainer.resume_mode=auto"
            report.add(Problem(_DIR, config.default_local_dir, why, fix))
        if config.default_hdfs_dir is not None:
            copied = remote.newest_first(config.default_hdfs_dir, step_of)
            if copied:
                why = f"it has copies of another run's steps ({copied[0]} is the newest) and resume_mode is disable"
                report.add(Problem(remote.KEY, config.default_hdfs_dir, why, "Choose another, or delete them"))

    def _find_step(self, parts: Sequence[RunPart], report: Report) -> None:
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
    from verl.workers.engine.common.same_model import NOT_SAVED, differences

    folder = step / part.folder
    contents = [content for content in part.checkpoint.load_contents if content != "hf_model"]
    found = differences(folder, contents, part.expected)
    if found:
        fix = (
            "Set the model and its keys back to what the checkpoint was saved from; or begin anew, in another folder "
            "(trainer.experiment_name or trainer.default_local_dir)"
        )
        if found[0].startswith(NOT_SAVED):
            fix = "Leave them out of checkpoint.load_contents, or choose another step"
        why = f"the checkpoint {folder} (trainer.resume_mode={mode}) does not fit it: {'; '.join(found)}"
        report.add(Problem(f"{part.key}.path", part.model.path, why, fix))
