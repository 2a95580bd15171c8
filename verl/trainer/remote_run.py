"""Waiting for a run in an actor: what it raised is raised here, as itself and with its cause."""

from __future__ import annotations

from typing import Any


class RemoteTraceback(Exception):
    """The traceback of another process, as text; the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def result_of(call: Any) -> Any:
    """The result of a TaskRunner's method; its own exception, or WorkerDiedError where its process is gone."""
    import ray

    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raised = _own_exception(error)
    except ray.exceptions.RayActorError as error:
        from verl.single_controller.base.errors import WorkerDiedError

        raised = WorkerDiedError(
            "the controller's process died", "TaskRunner", 0, "of the controller", "run", str(error)
        )
    raise raised


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
