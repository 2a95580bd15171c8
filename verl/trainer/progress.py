"""A progress bar where there is a terminal, nothing where there is none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.trainer.ppo.console import Standing

_REFRESH_S = 0.5


@contextmanager
def progress_bar(standing: Callable[[], Standing | None]) -> Iterator[None]:
    """Draw what `standing()` says, twice a second, as long as the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("steps"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[phase]}"),
    )
    done = threading.Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("steps", total=None, phase="starting")

        def draw() -> None:
            while not done.wait(_REFRESH_S):
                now = standing()
                if now is not None:
                    phase = f"{now.phase} {now.phase_seconds:.0f} s" if now.phase else ""
                    progress.update(task, completed=now.step, total=now.total, phase=phase)

        drawer = threading.Thread(target=draw, name="progress bar", daemon=True)
        drawer.start()
        try:
            yield
        finally:
            done.set()
            drawer.join(timeout=5)
