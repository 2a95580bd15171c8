"""An event loop in a scorer process: it starts every call that arrives on a socket, and answers as they end."""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
from typing import Any

from verl.utils.process_pool.errors import TaskTimeout
from verl.utils.reward_score.attempt import invalid, score_loaded

# Before each message: the call's number, and how many bytes follow. The first one from here holds the process id.
HEAD = struct.Struct("<QI")


def answer_on_loop(address: str, timeout: float) -> None:
    """Run what `attempt.load` loaded for each row sent to `address`, for `timeout` seconds, until that is closed."""
    asyncio.run(_answer_all(address, timeout))


def message(number: int, content: Any) -> bytes:
    """CannotSend's causes are the caller's: what cannot be pickled raises here."""
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(number, len(data)) + data


async def receive(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """The next message: a call's number and what is said of it. IncompleteReadError: there are no more."""
    number, size = HEAD.unpack(await reader.readexactly(HEAD.size))
    return number, pickle.loads(await reader.readexactly(size))


async def _answer_all(address: str, timeout: float) -> None:
    reader, writer = await asyncio.open_unix_connection(address)
    writer.write(message(0, os.getpid()))
    under_way: set[asyncio.Task[None]] = set()
    try:
        while True:
            number, row = await receive(reader)
            task = asyncio.ensure_future(_answer(number, row, timeout, writer))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # nobody waits for answers any more


async def _answer(number: int, row: Any, timeout: float, writer: asyncio.StreamWriter) -> None:
    try:
        outcome: Any = await asyncio.wait_for(score_loaded(row), timeout)
    except asyncio.TimeoutError:
        outcome = TaskTimeout(f"took longer than {timeout:g} s and was stopped")
    except MemoryError as error:
        outcome = error
    try:
        answer = message(number, outcome)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is pickled
        answer = message(number, invalid(f"the reward function returned what cannot be sent: {error}"))
    writer.write(answer)
