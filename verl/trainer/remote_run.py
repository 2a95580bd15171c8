"""Waiting for a run in an actor: what it raised is raised here, as itself and with its cause."""

from __future__ import annotations

from typing import Any

from verl.trainer.own_ray import OwnRay
from verl.trainer.signals import Asked

_LOOK_S = 1.0


class RemoteTraceback(Exception):
    """The traceback of another process, as text; the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RayLostError(RuntimeError):
    """Ray's own processes are gone, and with them the run."""


def result_of(call: Any, own: OwnRay, asked: Asked) -> Any:
    """The result of a TaskRunner's method; its own exception, or WorkerDiedError where its process is gone.

    Ray itself would wait a minute for its own processes, if they are gone, and then end this one without a word.
    """
    import ray

    while not ray.wait([call], timeout=_LOOK_S, fetch_local=False)[0]:
        if (lost := own.lost(signalled=asked.by is not None)) is not None:
            raise _lost(f"Ray's own processes ended ({lost})", own, asked)
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raised = _own_exception(error)
    except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
        from verl.single_controller.base.errors import WorkerDiedError

        died = "the controller's process died"
        if asked.by is not None:  # Ray was sent the signal too, and takes its time to go
            raise _lost(died, own, asked) from error
        raised = WorkerDiedError(died, "TaskRunner", 0, "of the controller", "run", str(error))
    raise raised


def _lost(what: str, own: OwnRay, asked: Asked) -> RayLostError:
    own.kill()
    after = f" after {asked.by} to all processes of the run" if asked.by else ""
    return RayLostError(f"{what}{after}: the step under way is lost.")


def _own_exception(error: Any) -> Exception:
    """What the process raised, without Ray's wrapping; the text of the traceback there is at the end of its causes."""
    import ray

    text = str(error)
    while isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if not isinstance(error, Exception) or isinstance(error, ray.exceptions.RayError):
        # Its class does not unpickle here. The last line of a traceback says what it was.
        error = RuntimeError(text.strip().splitlines()[-1])
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    first.__cause__ = RemoteTraceback(text)
    return error
