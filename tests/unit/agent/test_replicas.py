"""An engine that agents wait for and that says nothing is named to whoever watches their process."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from verl.agent.replicas import Replica
from verl.workers.roles.requests import Collected

from verl.agent import replicas
from verl.single_controller.base.beat import Heart
from verl.single_controller.base.handle import RankHandle
from verl.types.request import Request, SamplingParams
from verl.utils.helper_processes import silent_peer


class Stuck(RankHandle):
    """A rank that answers, and whose engine does not move."""

    role, rank = "rollout", 3

    def tell(self, method: str, *args: Any) -> None: ...

    def ask(self, method: str, *args: Any) -> Collected:
        time.sleep(0.05)
        return Collected([], 1, 7, False, (4799, "stopped"))


def test_who_waits_for_an_engine_that_does_not_move_says_for_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_SILENT_S", 0.3)
    heart = Heart()

    async def wait_for_it() -> list[str | None]:
        replica = Replica(Stuck(), "client", asyncio.get_running_loop(), lambda why: None)
        told = [silent_peer()]
        asking = asyncio.create_task(replica.answer(Request("a", [5], SamplingParams())))
        await asyncio.sleep(0.1)
        told.append(silent_peer())
        await asyncio.sleep(0.5)
        with heart.running("generate_sequences", lambda: 0):
            told.append(heart.beat(every_thread=False).awaits)
        replica.close()
        await asyncio.wait([asking])
        return [*told, silent_peer()]

    before, soon, late, after = asyncio.run(wait_for_it())
    assert (before, soon, after) == (None, None, None)
    where = r"rank 3 of rollout, whose engine has not moved for \d s \(1 requests; its engine's process \(pid 4799\)"
    assert re.match(where, late or "")
