"""The last line of a run that was not stopped: training finished, and where the model is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.steps import has_expected_sizes, newest_first, step_of
from verl.utils.fs import expand_path

logger = logging.getLogger(__name__)


def log_finished(trainer: Any, part: str = ".") -> None:
    """Report the newest whole step of a `trainer` block; `part` is the folder of the trained model in a step."""
    root = Path(expand_path(trainer.default_local_dir)).absolute()
    step = next(filter(has_expected_sizes, newest_first(root)), None)
    if step is None:
        logger.info("Training finished. No model was saved in %s.", root)
        return
    number, exported = step_of(step.name), step / part / "huggingface"
    if exported.is_dir():
        logger.info("Training finished at step %d. Model: %s", number, exported)
    else:
        logger.info(
            "Training finished at step %d. Checkpoint: %s (no model for transformers: hf_model is not in "
            "checkpoint.save_contents; `python -m verl.model_merger merge` writes one)",
            number,
            step / part,
        )
