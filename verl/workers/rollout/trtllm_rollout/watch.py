"""The workers of TensorRT-LLM are actors of Ray, of whose end nobody tells those who wait for an answer: it is seen
here."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["watch_actors"]

_LOOK_EVERY_S = 1.0


def watch_actors(on_end: Callable[[str], None]) -> None:
    """Of the actors that this process, a driver of Ray, has started so far, `on_end` is told of the first that ends, in
    a thread of its own."""
    import ray

    actors = ray._private.state.actors  # the documented list of actors needs Ray's dashboard
    job = ray.get_runtime_context().get_job_id()
    workers = [name for name, actor in actors().items() if actor["JobID"] == job and actor["State"] == "ALIVE"]

    def run() -> None:
        while ray.is_initialized():
            for worker in map(actors, workers):
                if worker["State"] != "ALIVE":
                    on_end(f"process {worker['Pid']} ({worker['ActorClassName']}, an actor of Ray) has ended")
                    return
            threading.Event().wait(_LOOK_EVERY_S)

    threading.Thread(target=run, name="watch-actors", daemon=True).start()
