"""What the same command would do next: go on at the newest whole step, or begin. Said where a run ends early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.utils.exceptions import note


def what_the_same_command_does(trainer: Any) -> str:
    """For the `trainer` block of a run, in one clause. Sizes are looked at, not checksums: loading does that."""
    if trainer.resume_mode == "disable":
        return "the same command starts from the beginning (trainer.resume_mode=disable)"
    folder = _resumed_from(trainer)
    if folder is None:
        return "the same command starts from the beginning: no step was saved"
    step = folder.name.rpartition("_")[2]
    return f"the same command goes on at step {step} ({folder})"


def _resumed_from(trainer: Any) -> Path | None:
    from verl.utils.checkpoint.steps import newest_first
    from verl.utils.fs import expand_path

    if trainer.resume_mode == "resume_path":
        return Path(str(trainer.resume_from_path))
    found = newest_first(Path(expand_path(trainer.default_local_dir)).absolute())
    return next((folder for folder in found if _is_whole(folder)), None)


def _is_whole(folder: Path) -> bool:
    from verl.utils.checkpoint.steps import manifest_of

    manifest = manifest_of(folder)
    try:
        return manifest is not None and all(
            (folder / name).stat().st_size == record.size for name, record in manifest.files.items()
        )
    except OSError:
        return False


@contextmanager
def tells_of_restart(trainer: Any) -> Iterator[None]:
    """Errors that leave this block know the run's folder and what the same command would do."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        from verl.utils.fs import expand_path

        note(error, run_folder=expand_path(trainer.default_local_dir), restart=what_the_same_command_does(trainer))
        raise
