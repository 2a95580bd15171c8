"""Simulated users: picked by the row, one state per trajectory, ended whatever happens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from verl.config.problems import Report
from verl.interactions.base import BaseInteraction, InteractionSet, read_interactions
from verl.utils.import_utils import ClassEntry

TEACHER = {"name": "gsm8k", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}
QUESTION = [{"role": "user", "content": "6 * 7?"}]


def entries_of(folder: Path, *entries: Any) -> list[ClassEntry]:
    (folder / "users.yaml").write_text(json.dumps({"interaction": entries}))
    report = Report()
    found = read_interactions(str(folder / "users.yaml"), report)
    report.raise_if_any()
    return found


def row(**kwargs: Any) -> dict[str, Any]:
    return {"extra_info": {"index": 5, "interaction_kwargs": kwargs}}


async def test_the_teacher_asks_again_until_the_answer_is_right(tmp_path: Path):
    interactions = InteractionSet.load(entries_of(tmp_path, TEACHER), timeout_s=5.0)
    assert interactions.names == ["gsm8k"]
    async with interactions.session(row(name="gsm8k", ground_truth="42")) as session:
        wrong = [*QUESTION, {"role": "assistant", "content": "It is 41."}]
        done, text, score, extra = await session.respond(wrong)
        assert (done, score, extra) == (False, 0.0, {})
        assert "wrong" in text
        right = [*wrong, {"role": "user", "content": text}, {"role": "assistant", "content": "#### 42"}]
        assert await session.respond(right) == (True, "Your answer is right.", 1.0, {})
        assert await session.calculate_score() is None


class Guest(BaseInteraction):
    """Plain functions, short answers, a score of its own."""

    guests: dict[str, list[Any]]

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.guests = {}

    def start_interaction(self, instance_id: str, mood: str) -> None:
        self.guests[instance_id] = [mood]

    def generate_response(self, instance_id: str, messages: list[dict[str, Any]]) -> Any:
        if messages[-1]["content"] == "go away":
            raise PermissionError("offended")
        self.guests[instance_id].append(messages[-1]["content"])
        return len(messages) > 1, " ".join(self.guests[instance_id])

    def calculate_score(self, instance_id: str) -> float:
        return len(self.guests[instance_id])

    def finalize_interaction(self, instance_id: str) -> None:
        del self.guests[instance_id]


async def test_guests_of_many_trajectories_are_kept_apart_and_leave_when_one_fails():
    guest = Guest({"name": "guest"})
    interactions = InteractionSet({"guest": guest}, timeout_s=5.0)

    async def trajectory(number: int) -> Any:
        async with interactions.session(row(name="guest", mood=f"m{number}")) as session:
            said = await session.respond([{"role": "assistant", "content": str(number)}])
            return said, await session.calculate_score()

    for number, answer in enumerate(await asyncio.gather(*map(trajectory, range(20)))):
        assert answer == ((False, f"m{number} {number}", None, {}), 2.0)
    assert guest.guests == {}

    async def rude() -> None:
        async with interactions.session(row(name="guest", mood="calm")) as session:
            await session.respond([{"role": "assistant", "content": "go away"}])

    with pytest.raises(RuntimeError, match=r"generate_response"):
        await rude()
    assert guest.guests == {}


async def test_a_row_without_a_user_has_none_and_an_unknown_one_is_named():
    interactions = InteractionSet({"guest": Guest({})}, timeout_s=5.0)
    assert interactions.session({}) is None
    assert interactions.session({"extra_info": None}) is None
    with pytest.raises(ValueError, match=r"interaction_kwargs\.name.*row 5: .*'host'.*guest"):
        interactions.session(row(name="host"))
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.rollout\.multi_turn\.interaction_config_path"):
        InteractionSet({}, timeout_s=5.0).session(row(name="host"))


def test_users_of_a_file_travel_by_content(tmp_path: Path):
    source = "from verl.interactions.base import BaseInteraction\nclass Mine(BaseInteraction): ...\n"
    (tmp_path / "mine.py").write_text(source)
    entries = entries_of(tmp_path, {"class_name": f"{tmp_path}/mine.py:Mine"})
    (tmp_path / "mine.py").unlink()
    assert InteractionSet.load(entries, timeout_s=5.0).names == ["Mine"]
