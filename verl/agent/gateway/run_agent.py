"""Users' agents run beside the event loop that answers them, so that one which blocks never waits for itself."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from verl.utils.concurrency import SharedEventLoop
from verl.utils.import_utils import ImportPath, load_user_object

__all__ = ["load_agent", "start_agent"]

_PARAMETERS = ("base_url", "prompt", "request_kwargs", "metadata")
_loop = SharedEventLoop("agents")


def load_agent(place: str | ImportPath, own: Iterable[str] = ()) -> Callable[..., Any]:
    """The function at `file.py:function` or `pkg.module.function`; `own` are keywords that it is given besides."""
    path = ImportPath.read(place) if isinstance(place, str) else place
    return load_user_object(path.module, path.name, key="run_agent", required_params=(*_PARAMETERS, *own))


def start_agent(function: Callable[..., Any], **arguments: Any) -> Future[Any]:
    """Run it: an `async def` in an event loop that all of this process's agents share, a `def` in its own thread."""
    if inspect.iscoroutinefunction(function):
        return _loop.submit(_awaited(function, arguments))
    future: Future[Any] = Future()
    threading.Thread(target=_fulfil, args=(future, function, arguments), name="agent", daemon=True).start()
    return future


async def _awaited(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return await function(**arguments)
    except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop of all agents
        raise RuntimeError(f"the agent wanted to end its process ({error!r})") from error


def _fulfil(future: Future[Any], function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(**arguments))
    except BaseException as error:  # noqa: BLE001 - whoever waits for the agent gets it
        future.set_exception(error)
