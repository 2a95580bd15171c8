"""Before models are loaded: the checkpoint a run goes on from is whole and fits its models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config.problems import Problem, Report
from verl.trainer.run_parts import RunPart
from verl.utils.checkpoint.checkpoint_manager import reading, resolve_resume
from verl.utils.checkpoint.manifest import read_manifest

logger = logging.getLogger(__name__)


class RunStart:
    """Made once per run, as soon as its configuration is known: every problem at once, as a ConfigError.

    `resume_from` is the step the run goes on from (None: it begins anew), `step` its number.
    """

    def __init__(self, trainer_config: Any, parts: Sequence[RunPart]) -> None:
        report = Report()
        config = trainer_config
        self.resume_from: Path | None = resolve_resume(
            config.resume_mode, config.default_local_dir, config.resume_from_path, config.default_hdfs_dir
        )
        self.step = 0
        if self.resume_from is not None:
            with reading(self.resume_from):
                self.step = read_manifest(self.resume_from).step
                for part in parts:
                    _check_part(self.resume_from, part, config.resume_mode, report)
        report.raise_if_any()


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
