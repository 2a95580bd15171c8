"""ServedJudge: the run's own reward model, asked over HTTP by reward functions; awake only while they need it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verl.inference.serving.router import Router
from verl.trainer.ppo.groups import WorkerGroups
from verl.utils.http_server.server import Limits, serve_in_thread

_CONNECTIONS = 8192


class ServedJudge:
    """Puts one address in front of the group's servers, and gives it to reward managers.

    With `parks` they give their devices back whenever a batch is scored.
    """

    def __init__(self, groups: WorkerGroups, parks: bool) -> None:
        self._groups, self._parks = groups, parks
        self._router = Router()
        self._held = contextlib.ExitStack()

    def start(self, *managers: Any) -> list[Any]:
        """The managers as they are to be called from now on."""
        serving = serve_in_thread(self._router.app(), "the reward model", limits=Limits(connections=_CONNECTIONS))
        address = f"127.0.0.1:{self._held.enter_context(serving)}"
        self._find_servers()
        if self._parks:
            self._groups.reward_model.park()
        bound: dict[int, Any] = {}
        for manager in managers:
            if manager is not None and id(manager) not in bound:
                manager.bind(reward_router_address=address)
                bound[id(manager)] = _Judged(manager, self)
        return [bound.get(id(manager)) for manager in managers]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """While a batch is scored. Servers that were started anew have other addresses."""
        self._find_servers()
        if self._parks:
            self._groups.reward_model.wake()
        try:
            yield
        finally:
            if self._parks:
                self._groups.reward_model.park()

    def close(self) -> None:
        self._held.close()

    def _find_servers(self) -> None:
        self._router.servers = dict(self._groups.reward_model.address())


class _Judged:
    """A reward manager whose batches are scored while the judge is awake; otherwise what it was."""

    def __init__(self, manager: Any, judge: ServedJudge) -> None:
        self._manager, self._judge = manager, judge

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self._judge.awake():
            return self._manager(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def close(self) -> None:
        self._manager.close()
        self._judge.close()
