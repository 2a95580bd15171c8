"""InteractionBox: the simulated users of a loop worker, and the session that one of them has with a trajectory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from uuid import uuid4

from verl.config.problems import Report
from verl.interactions.base import BaseInteraction
from verl.utils.concurrency import accepted_keywords, call_user_function, wait_with_timeout
from verl.utils.import_utils import ClassEntry, error_text, read_class_list

logger = logging.getLogger(__name__)
KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"


def read_interactions(path: str, report: Report) -> list[ClassEntry]:
    """The entries of an interaction file with the users' files in them."""
    return read_class_list(KEY, path, "interaction", ("name",), report)


class InteractionBox:
    """Simulated users by name. `seconds` bounds each of their calls."""

    def __init__(self, interactions: Mapping[str, BaseInteraction], seconds: float) -> None:
        self._interactions = dict(interactions)
        self._seconds = seconds

    @classmethod
    def load(cls, entries: Sequence[ClassEntry], seconds: float) -> InteractionBox:
        """Those of an interaction file; ConfigError tells all problems."""
        made: dict[str, BaseInteraction] = {}
        report = Report()
        for entry in entries:
            found = entry.load(BaseInteraction, report)
            if found is None:
                continue
            name = str(entry.options["name"]) if "name" in entry.options else found.__name__
            if name in made:
                report.problem(f"{entry.location}.name", name, "another one has this name", "Give each its own")
            try:
                made[name] = found({"name": name, **entry.config})
            except Exception as error:  # noqa: BLE001 (a user's constructor; reported)
                why = f"it cannot be made: {type(error).__name__}: {error_text(error)}"
                report.problem(f"{entry.location}.class_name", str(entry.path), why, "Correct its config or its code")
        report.raise_if_any()
        return cls(made, seconds)

    @property
    def names(self) -> list[str]:
        return list(self._interactions)

    def session(self, row: Mapping[str, Any]) -> InteractionSession | None:
        """With the one that `extra_info.interaction_kwargs.name` of the row picks; None: the row has no such user."""
        info = row.get("extra_info")
        info = info if isinstance(info, Mapping) else {}
        kwargs = row.get("interaction_kwargs") or info.get("interaction_kwargs")
        if not kwargs:
            return None
        name = kwargs.get("name")
        if name not in self._interactions:
            raise ValueError(
                f"extra_info.interaction_kwargs.name of row {info.get('index', '?')}: there is no interaction "
                f"{name!r}. There are: {', '.join(self._interactions) or f'none; set {KEY}'}."
            )
        return InteractionSession(self._interactions[name], kwargs, self._seconds)


class InteractionSession:
    """What one simulated user says in one trajectory, as an async context manager; ended whatever happens."""

    def __init__(self, interaction: BaseInteraction, kwargs: Mapping[str, Any], seconds: float) -> None:
        self._interaction = interaction
        self._kwargs = kwargs
        self._seconds = seconds
        self._id: str | None = None

    async def __aenter__(self) -> InteractionSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._id is None:
            return
        try:
            await self._ask("finalize_interaction")
        except RuntimeError as failed:  # what was said stays said
            logger.warning("%s", failed)

    async def respond(self, messages: Sequence[Mapping[str, Any]]) -> tuple[bool, str, float | None, dict[str, Any]]:
        """(done, text, score, extra) for the chat so far. The user's failure is raised, with its name."""
        if self._id is None:
            self._id = uuid4().hex
            self._id = await self._ask("start_interaction") or self._id
        done, text, score, extra = (*await self._ask("generate_response", list(messages)), None, None, None)[:4]
        return bool(done), str(text or ""), None if score is None else float(score), dict(extra or {})

    async def finish(self) -> float | None:
        """The score of the whole, of an interaction that defines `calculate_score` and has said something."""
        own = type(self._interaction).calculate_score is not BaseInteraction.calculate_score
        return float(await self._ask("calculate_score")) if own and self._id is not None else None

    async def _ask(self, method: str, *args: Any) -> Any:
        function = getattr(self._interaction, method)
        given = {
            name: value for name, value in accepted_keywords(function, self._kwargs).items() if name != "instance_id"
        }
        try:
            return await wait_with_timeout(self._seconds, call_user_function(function, self._id, *args, **given))
        except Exception as error:
            raise RuntimeError(f"interaction {self._interaction.name}: {method} failed: {error!r}") from error
