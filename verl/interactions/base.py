"""BaseInteraction: base class of simulated users, which reply to the model.

InteractionSet: the simulated users of a loop worker. InteractionSession: one trajectory's use of one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from verl.config.problems import Report
from verl.utils.concurrency import accepted_keywords, call_user_function, wait_with_timeout
from verl.utils.import_utils import ClassEntry, error_text, read_class_list

logger = logging.getLogger(__name__)

_CONFIG_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"


class BaseInteraction:
    """A simulated user. One object serves all trajectories of a process: keep the state of a trajectory by
    `instance_id`.

    Methods may be `async` or plain; plain ones run in threads.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config["name"] if "name" in config else type(self).__name__

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start a trajectory; return its id. `kwargs`: the row's `extra_info.interaction_kwargs`."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """The reply to the conversation so far: (whether the conversation ends, text, score of the turn, extra)."""
        raise NotImplementedError(f"{type(self).__name__} does not define generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Score of the whole trajectory, in addition to those of its turns. If not overridden: no score."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Release the state of a trajectory."""


def read_interactions(path: str, report: Report) -> list[ClassEntry]:
    """The entries of an interaction file, with the contents of the Python files that they name."""
    return read_class_list(_CONFIG_KEY, path, "interaction", ("name",), report)


class InteractionSet:
    """Simulated users by name. `timeout_s` limits each call of their methods."""

    def __init__(self, interactions: Mapping[str, BaseInteraction], timeout_s: float) -> None:
        self._interactions = dict(interactions)
        self._timeout_s = timeout_s

    @classmethod
    def load(cls, entries: Sequence[ClassEntry], timeout_s: float) -> InteractionSet:
        """Create the interactions of an interaction file; ConfigError lists all problems."""
        interactions: dict[str, BaseInteraction] = {}
        report = Report()
        for entry in entries:
            interaction_class = entry.load(BaseInteraction, report)
            if interaction_class is None:
                continue
            name = str(entry.options["name"]) if "name" in entry.options else interaction_class.__name__
            if name in interactions:
                report.problem(f"{entry.location}.name", name, "the name is used twice", "Use unique names")
            try:
                interactions[name] = interaction_class({"name": name, **entry.config})
            except Exception as error:  # noqa: BLE001 (a user's constructor; reported)
                cause = f"its constructor raised {type(error).__name__}: {error_text(error)}"
                report.problem(f"{entry.location}.class_name", str(entry.path), cause, "Correct its config or its code")
        report.raise_if_any()
        return cls(interactions, timeout_s)

    @property
    def names(self) -> list[str]:
        return list(self._interactions)

    def session(self, row: Mapping[str, Any]) -> InteractionSession | None:
        """A session with the interaction `extra_info.interaction_kwargs.name` of the row; None: the row has no such
        keywords."""
        info = row.get("extra_info")
        info = info if isinstance(info, Mapping) else {}
        kwargs = row.get("interaction_kwargs") or info.get("interaction_kwargs")
        if not kwargs:
            return None
        name = kwargs.get("name")
        if name not in self._interactions:
            raise ValueError(
                f"extra_info.interaction_kwargs.name of row {info.get('index', '?')}: unknown interaction "
                f"{name!r}. Known: {', '.join(self._interactions) or f'none; set {_CONFIG_KEY}'}."
            )
        return InteractionSession(self._interactions[name], kwargs, self._timeout_s)


class InteractionSession:
    """One trajectory's conversation with a simulated user, as an async context manager that always finalizes it."""

    def __init__(self, interaction: BaseInteraction, kwargs: Mapping[str, Any], timeout_s: float) -> None:
        self._interaction = interaction
        self._kwargs = kwargs
        self._timeout_s = timeout_s
        self._id: str | None = None

    async def __aenter__(self) -> InteractionSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._id is None:
            return
        try:
            await self._call("finalize_interaction")
        except RuntimeError as failure:  # the trajectory stays valid
            logger.warning("%s", failure)

    async def respond(self, messages: Sequence[Mapping[str, Any]]) -> tuple[bool, str, float | None, dict[str, Any]]:
        """(done, text, score, extra) for the conversation so far. RuntimeError if the interaction fails."""
        if self._id is None:
            self._id = uuid4().hex
            self._id = await self._call("start_interaction") or self._id
        done, text, score, extra = (*await self._call("generate_response", list(messages)), None, None, None)[:4]
        return bool(done), str(text or ""), None if score is None else float(score), dict(extra or {})

    async def calculate_score(self) -> float | None:
        """The score of the trajectory; None if the class does not override `calculate_score`, or `respond` was never
        called."""
        overridden = type(self._interaction).calculate_score is not BaseInteraction.calculate_score
        return float(await self._call("calculate_score")) if overridden and self._id is not None else None

    async def _call(self, method: str, *args: Any) -> Any:
        function = getattr(self._interaction, method)
        keywords = accepted_keywords(function, self._kwargs)
        keywords.pop("instance_id", None)
        try:
            return await wait_with_timeout(self._timeout_s, call_user_function(function, self._id, *args, **keywords))
        except Exception as error:
            raise RuntimeError(f"interaction {self._interaction.name}: {method} failed: {error!r}") from error
