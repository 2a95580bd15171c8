"""EngineThread: runs SGLang's engine and its event loop in a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from importlib import import_module
from typing import Any, TypeVar

from verl.utils.process_tree import die_with_parent

__all__ = ["EngineThread"]

T = TypeVar("T")

_TESTED_VERSIONS = ("0.5.23",)

logger = logging.getLogger(__name__)


class EngineThread:
    """Creates an engine, and calls its coroutines from any thread.

    Linux ends SGLang's processes when the thread that started them ends, so this thread lives as long as they do.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        created: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=[arguments, created], name="sglang", daemon=True)
        self._thread.start()
        self.engine = created.result()
        self.manager = self.engine.tokenizer_manager
        """The object behind SGLang's HTTP server; it has coroutines for the engine's methods, and more."""
        self.version: str = import_module("sglang").__version__

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Shut down the engine and its processes."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self, arguments: dict[str, Any], created: Future[Any]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            engine = _create_engine(arguments)
        except BaseException as error:  # noqa: BLE001 - raised in the constructor
            created.set_exception(error)
            return
        created.set_result(engine)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        engine.shutdown()


def _create_engine(arguments: dict[str, Any]) -> Any:
    """Create SGLang's `Engine`; ValueError for unknown arguments."""
    import sglang
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    if sglang.__version__ not in _TESTED_VERSIONS:
        logger.warning(
            "rollout: SGLang %s is not among the tested versions (%s).", sglang.__version__, _TESTED_VERSIONS
        )
    try:
        ServerArgs(**arguments)
    except TypeError as error:
        raise ValueError(f"engine_kwargs.sglang: {error}") from error

    class OwnedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

    return OwnedEngine(**arguments)


# Main functions of SGLang's processes: they end with the thread that started them.


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    die_with_parent()
    return Engine.run_scheduler_process_func(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    die_with_parent()
    return Engine.run_detokenizer_process_func(*args, **kwargs)
