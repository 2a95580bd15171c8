"""Asynchronous checkpoints of commit 4cb5ed4 are read completely: groups, trajectories and partial outputs.

`tests/fixtures/async_checkpoint` has the file, the values that it must give and the script that wrote it. What is
renamed later is adapted in the first section below; the fixture and the checks stay as they are.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.async_checkpoint import values
from verl.trainer.asynchronous.group_state import group_shape as read_made_with
from verl.trainer.asynchronous.group_state import load_buffer
from verl.trainer.asynchronous.group_state import saved_prompts as read_prompts
from verl.trainer.asynchronous.rollout_buffer import RolloutBuffer
from verl.utils.nested import load_plain

FILE = Path(values.__file__).parent / "trainer.pt"
RENAMED: dict[str, str] = {}
"""Field name in the file -> attribute name today, for fields that were renamed since."""
ENTRY = {"name": "name", "prompt": "prompt", "step": "step", "made": "finished", "partials": "partials"}
"""Field name in a group's `rows` in the file -> attribute name today."""


def restored(state: dict[str, Any]) -> tuple[RolloutBuffer, dict[int, Any]]:
    """The buffer after a restart, and its groups by serial."""
    buffer = RolloutBuffer(groups_per_batch=2, max_staleness=2, strategy="drop")
    load_buffer(buffer, state["answers"]["buffer"])
    return buffer, {group.serial: group for group in (*buffer.in_flight(), *buffer.finished_groups())}


def entry(group: Any, name: str) -> Any:
    """A field of what the trainer keeps for a group."""
    return getattr(group.state, ENTRY[name])


# ---------------------------------------------------------------- checks


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return load_plain(FILE)


def plain(value: Any) -> Any:
    """Dataclasses as dicts under the field names of the file; arrays as (dtype, nested lists)."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        stored_name = {now: then for then, now in RENAMED.items()}
        return {stored_name.get(each.name, each.name): plain(getattr(value, each.name)) for each in fields(value)}
    return "NaN" if isinstance(value, float) and value != value else value


def with_prompts_as_lists(trajectory: dict[str, Any]) -> dict[str, Any]:
    """Prompt ids come back as an array of integers, whose width depends on the platform that wrote them."""
    rows = [{**row, "prompt_ids": row["prompt_ids"][1]} for row in trajectory["rows"]]
    return {**trajectory, "rows": rows}


@pytest.mark.parametrize("content", values.GROUPS, ids=lambda content: f"group {content['serial']}")
def test_every_field_of_a_group_is_read(state: dict[str, Any], content: dict[str, Any]):
    buffer, groups = restored(state)
    group = groups[content["serial"]]
    for name in ("serial", "sent_at", "oldest", "partial", "promised"):
        assert getattr(group, RENAMED.get(name, name)) == content[name], name
    assert group.response_count == values.ANSWERS
    assert (group in buffer.finished_groups()) == (content["serial"] in values.FINISHED)

    prompt = entry(group, "prompt")
    assert prompt.non_tensor_batch["index"].tolist() == [content["data_row"]]
    assert prompt.non_tensor_batch["uid"].tolist() == [group.uid]
    assert prompt.batch["input_ids"].shape == prompt.batch["attention_mask"].shape == (1, 32)
    name = f"{group.uid}~{group.serial}" if content["renamed"] else group.uid
    assert (entry(group, "name"), entry(group, "step")) == (name, content["step"])


@pytest.mark.parametrize("content", values.GROUPS, ids=lambda content: f"group {content['serial']}")
def test_every_field_of_trajectories_and_partial_outputs_is_read(state: dict[str, Any], content: dict[str, Any]):
    group = restored(state)[1][content["serial"]]
    name = entry(group, "name")
    trajectories = {key: with_prompts_as_lists(plain(one)) for key, one in entry(group, "made").items()}
    assert trajectories == {f"{name}/{one['sample_index']}": plain({**one, "uid": name}) for one in content["made"]}
    partials = {key: plain(one) for key, one in entry(group, "partials").items()}
    assert partials == {f"{name}/{index}": plain(one) for index, one in content["partials"].items()}


def test_counts_and_serials_continue(state: dict[str, Any]):
    buffer, groups = restored(state)
    assert dict(buffer.counts) == values.COUNTS
    assert sorted(groups) == [content["serial"] for content in values.GROUPS]
    assert [group.serial for group in buffer.finished_groups()] == values.FINISHED
    saved = state["answers"]["buffer"]
    assert saved["last_serial"] == values.LAST_SERIAL
    # A prompt that was dropped once is waited for the next time it is sent.
    (dropped,) = saved["again"]
    again = type(groups[5])(values.LAST_SERIAL + 1, dropped, values.ANSWERS, 5)
    buffer.add(again)
    assert again.promised


def test_a_run_without_a_stream_gets_every_prompt(state: dict[str, Any]):
    answers = state["answers"]
    rows = [int(prompt.non_tensor_batch["index"][0]) for prompt in read_prompts(answers)]
    assert rows == [content["data_row"] for content in values.GROUPS]
    assert read_made_with(answers) == values.MADE_WITH
    assert answers["versions"] == values.VERSIONS


def test_the_state_around_the_stream_is_read(state: dict[str, Any]):
    assert (state["global_steps"], state["policy_version"]) == (values.STEP, values.POLICY_VERSION)
    assert state["kl_coef"] == values.KL_COEF
    waiting = state["prompts"]["waiting"]
    assert waiting["arrays"]["index"].tolist() == [values.WAITING_ROW]
    assert waiting["tensors"]["input_ids"].shape == (1, 32)
