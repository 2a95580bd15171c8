"""Lane: the way to one loop worker, and the thread that collects what it has answered."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from verl.agent.stream import Finished
from verl.single_controller.base.errors import WorkerError
from verl.single_controller.base.handle import RankHandle
from verl.types.request import Output
from verl.utils.progress import pulse

__all__ = ["Heard", "Lane"]

logger = logging.getLogger(__name__)

# So long a call for trajectories stands open.
_STANDING_S = 2.0


class Lane:
    """One loop worker, from the stream's opening to its end."""

    def __init__(self, handle: RankHandle) -> None:
        self.handle = handle
        self.rows = 0
        """Answers that it has to give."""
        self.closed = False
        """Nobody wants to hear from it any more."""

    def collect(self, heard: Heard, came: Callable[[Finished], None]) -> None:
        """Put what it says into `heard`, until it ends or fails, in a thread of its own; `came` is told there first."""
        threading.Thread(target=self._keep_collecting, args=(heard, came), name="answer-stream", daemon=True).start()

    def partial_answers(self) -> dict[str, Output]:
        """What there is of answers under way, by trajectory. They go on."""
        try:
            return self.handle.ask("partial_answers")
        except WorkerError as error:  # the next step finds it, too, and mends it
            logger.warning("answers under way are saved without what there is of them: %s", error)
            return {}

    def drop(self, names: Sequence[str]) -> None:
        """It need not go on with these trajectories."""
        with contextlib.suppress(WorkerError):  # whoever waits for the others hears of it
            self.handle.ask("drop_trajectories", names)

    def end(self) -> None:
        """Nor with any."""
        with contextlib.suppress(WorkerError):  # one that is gone has nothing to end
            self.handle.ask("end_stream")

    def _keep_collecting(self, heard: Heard, came: Callable[[Finished], None]) -> None:
        told, moved = None, 0
        while not self.closed:
            try:
                told = self.handle.ask("collect_trajectories", _STANDING_S)
                if self.closed:
                    return  # what was under way is asked for again, and counted again
                came(told)
            except Exception as error:  # noqa: BLE001 - raised in the trainer's thread
                heard.put((self, error))
                return
            if told.pulses != moved:
                moved = told.pulses
                pulse()
            if told.trajectories or told.lost or told.ended:
                heard.put((self, told))
            if told.ended:
                return


Heard: TypeAlias = "queue.SimpleQueue[tuple[Lane, Finished | Exception]]"
"""What came, by whom."""
