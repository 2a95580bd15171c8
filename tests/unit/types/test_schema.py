"""The table of columns is true of what a training step makes, and the documentation is made from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.training_harness import make_task, overrides, run_training
from verl.types import schema
from verl.types.schema import COLUMNS, columns_read_by, filler, selected_for

ROOT = Path(__file__).parents[3]
# With a critic, a reference, cut-off sampling and its correction: most columns that there are.
EVERYTHING = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "algorithm.rollout_correction.rollout_is=token",
    "actor_rollout_ref.rollout.top_p=0.9",
    "data.max_response_length=20",
    "trainer.total_training_steps=1",
    "trainer.dump_steps=[1]",
    "data.val_files=[]",
)


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """The tensors of a training step, and its rows as people read them."""
    folder = tmp_path_factory.mktemp("run")
    task = make_task(tmp_path_factory.mktemp("task"))
    run_training(overrides(task, folder, *EVERYTHING, f"trainer.rollout_data_dir={folder}"))
    tensors = torch.load(folder / "checkpoints" / "debug_step_1.pt", weights_only=True)
    return tensors, [json.loads(line) for line in (folder / "1.jsonl").read_text().splitlines()]


def test_a_step_makes_the_columns_of_the_table_with_their_types_and_axes(step):
    tensors, rows = step
    assert len(tensors) > 14, "the run does not make most of them"
    assert tensors.keys() <= COLUMNS.keys()
    prompt, response = tensors["prompts"].shape[1], tensors["responses"].shape[1]
    widths = {"prompt": (prompt,), "response": (response,), "sequence": (prompt + response,), "row": ()}
    for name, value in tensors.items():
        column = COLUMNS[name]
        assert tuple(value.shape) == (len(rows), *widths[column.axis]), name
        assert str(value.dtype) == f"torch.{column.dtype}", name
    kinds = {"str": str, "int": int, "bool": bool, "float": float, "dict": dict}
    for name in set(rows[0]) & COLUMNS.keys():
        assert COLUMNS[name].axis == "object", name
        assert all(isinstance(row[name], kinds.get(COLUMNS[name].dtype, object)) for row in rows), name


def test_padding_of_a_steps_columns_holds_their_filler(step):
    tensors, _ = step
    prompt = tensors["prompts"].shape[1]
    padding = tensors["attention_mask"] == 0
    parts = {"prompt": padding[:, :prompt], "response": padding[:, prompt:], "sequence": padding}
    assert parts["response"].any(), "no answer ended early: nothing is shown"
    for name, value in tensors.items():
        if filler(name) is not None and name != "position_ids":  # positions count on; only the store blanks them
            assert (value[parts[COLUMNS[name].axis]] == filler(name)).all(), name


def test_dumped_rows_have_what_people_look_for_and_not_what_serves_the_machinery(step):
    _, rows = step
    assert {"uid", "sample_index", "finish_reason", "data_source", "reward_model", "extra_info"} <= rows[0].keys()
    assert not {"raw_prompt", "row"} & rows[0].keys()


def test_a_call_gets_what_it_reads_and_an_update_the_users_own_tensors_too():
    batch = ["mine", "responses", "advantages", "values", "rollout_versions"]
    assert selected_for("update_actor", batch) == ["mine", "responses", "advantages"]
    assert selected_for("update_critic", batch) == ["mine", "responses", "values"]
    assert "raw_prompt" in columns_read_by("reward_model")
    assert "raw_prompt" not in columns_read_by("infer")
    assert set(columns_read_by("advantage")) < set(columns_read_by("advantage", "correction"))


def test_the_page_is_made_from_the_table():
    page = (ROOT / "docs/reference/columns.md").read_text()
    assert page == schema.render(), "python -m verl.types.schema > docs/reference/columns.md"
