"""Output of the controller's actor on the driver's console: its lines without Ray's prefix, in order and complete.

Ray prints the lines of all actors with a coloured prefix. With `trainer.console=line` the lines of the controller have
none; lines of other actors keep theirs, coloured only on a terminal.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

# The name of Ray's own handler: Ray removes the handler of this name when it disconnects.
_RAY_HANDLER = "ray_print_logs"
_END = ":verl-controller-output-ends:"
# Ray reads the files of actors every 100 to 500 ms.
_END_TIMEOUT_S = 3.0


class ControllerOutput:
    """Prints the lines of actors in place of Ray. Used by the driver, after `ray.init`."""

    def __init__(self, actor_name: str) -> None:
        """`actor_name`: class name of the controller."""
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        self._actor_name, self._ended = actor_name, threading.Event()
        self.has_started = False
        """Whether the controller has written something."""
        if not sys.stdout.isatty():
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        handlers = [handle for name, handle in dispatcher.handlers if name == _RAY_HANDLER]
        if not handlers:  # ray.init(log_to_driver=False)
            self._ended.set()
            return
        self._print_with_prefix = handlers[0]
        dispatcher.remove_handler(_RAY_HANDLER)
        dispatcher.add_handler(_RAY_HANDLER, self._print)

    def wait_for_end(self, timeout: float = _END_TIMEOUT_S) -> None:
        """Wait until everything that the controller has written is printed, up to `timeout` seconds. Returns at once if
        it has written nothing: a user's own class need not mark the end."""
        if self.has_started:
            self._ended.wait(timeout)

    def _print(self, data: dict[str, Any]) -> None:
        if data.get("actor_name") != self._actor_name:
            return self._print_with_prefix(data)
        self.has_started = True
        lines = [line for line in data["lines"] if line != _END]
        if lines:
            stream = sys.stderr if data["is_err"] else sys.stdout
            stream.write("\n".join([*lines, ""]))
            stream.flush()
        if len(lines) < len(data["lines"]):
            self._ended.set()


def end_controller_output() -> None:
    """In the controller: mark the end of its output on stdout, for `wait_for_end`."""
    sys.stdout.write(f"{_END}\n")
    sys.stdout.flush()
