"""SGLang's engine in a thread of its own, which its event loop runs in and which its processes end with."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from importlib import import_module
from typing import Any, TypeVar

from verl.workers.rollout.sglang_rollout.children import run_detokenizer, run_scheduler

__all__ = ["TESTED", "EngineThread"]

T = TypeVar("T")

TESTED = ("0.5.23",)

logger = logging.getLogger(__name__)


class EngineThread:
    """Makes an engine, and calls its coroutines from any thread.

    Linux ends SGLang's processes when the thread that started them ends: it must be one that lives as long as they do.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        made: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=[arguments, made], name="sglang", daemon=True)
        self._thread.start()
        self.engine = made.result()
        self.manager = self.engine.tokenizer_manager
        """What SGLang's HTTP server calls, too; it has what the engine has in coroutines, and more."""
        self.version: str = import_module("sglang").__version__

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, computed in the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the engine and its processes."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self, arguments: dict[str, Any], made: Future[Any]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            engine = _make(arguments)
        except BaseException as error:  # noqa: BLE001 - raised where the engine was asked for
            made.set_exception(error)
            return
        made.set_result(engine)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        engine.shutdown()


def _make(arguments: dict[str, Any]) -> Any:
    """SGLang's engine. What it does not know, it refuses by itself."""
    import sglang
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    if sglang.__version__ not in TESTED:
        logger.warning("rollout: SGLang %s is not among the tested versions (%s).", sglang.__version__, TESTED)
    try:
        ServerArgs(**arguments)
    except TypeError as error:
        raise ValueError(f"engine_kwargs.sglang: {error}") from error

    class OwnedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

    return OwnedEngine(**arguments)
