"""What supervised runs record: rows of fine-tuning with log-probs, pairs of reward models with scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.recorded_runs import record_rm, record_sft
from tests.support.tiny import save_tiny_model, tiny_tokenizer
from verl import recording
from verl.protocol import DataProto
from verl.recording.redaction import Redaction
from verl.recording.writer import RecordWriter
from verl.trainer.ppo.recorded_rows import RowOptions
from verl.trainer.supervised.row_record import write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def sft_run(model, tmp_path_factory) -> recording.Recording:
    return recording.read(record_sft(model, tmp_path_factory.mktemp("sft"), "data.micro_batch_size_per_gpu=1"))


@pytest.fixture(scope="module")
def rm_run(model, tmp_path_factory) -> recording.Recording:
    return recording.read(record_rm(model, tmp_path_factory.mktemp("rm")))


# -------------------------------------------------------------------- fine-tuning


def test_rows_have_texts_tokens_and_the_mask_of_the_conversation(sft_run):
    assert sft_run.rows.steps == [1, 2, 3, 4]
    assert sft_run.rows.metadata(2)["recorded"] == sft_run.rows.metadata(2)["rows"] == 4
    rows = [row for step in sft_run.rows.steps for row in sft_run.rows.table(step=step).to_pylist()]
    assert len({row["uid"] for row in rows}) == 16, "one epoch: every row once"
    tokenizer = tiny_tokenizer()
    for row in rows:
        assert [turn["source"] for turn in row["turns"]] == ["model", "environment", "model"]
        first, between, last = [turn["text"] for turn in row["turns"]]
        i, j = row["prompt"].removeprefix("add ").split(" and ")
        assert first == f"{i}+{j}={int(i) + int(j)}"
        assert (between, last) == ("sure?", "yes")
        assert row["tokens"] == len(row["prompt_ids"]) + len(row["token_ids"])
        assert row["trained_tokens"] == sum(row["mask"])
        assert [turn["tokens"] for turn in row["turns"]] == _runs(row["mask"])
        assert tokenizer.decode(row["prompt_ids"], skip_special_tokens=True) == row["prompt"]


def _runs(mask: list[int]) -> list[int]:
    """Lengths of the runs of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return np.diff(edges).tolist()


def test_losses_of_rows_add_up_to_the_loss_of_the_step(sft_run):
    metrics = sft_run.metrics.table(["step", "train/loss"]).to_pylist()
    losses = {row["step"]: row["train/loss"] for row in metrics}
    for step in sft_run.rows.steps:
        rows = sft_run.rows.table(step=step).to_pylist()
        for row in rows:
            trained = np.array(row["trainer_log_probs"])[np.array(row["mask"]) == 1]
            assert row["loss"] == pytest.approx(-trained.mean())
            assert row["loss_weights"] is None
        total = sum(row["loss"] * row["trained_tokens"] for row in rows)
        assert total / sum(row["trained_tokens"] for row in rows) == pytest.approx(losses[step], rel=1e-5)


def test_validation_rows_are_recorded_over_time(sft_run):
    assert sft_run.validation.steps == [0, 2, 4]
    first, last = (sft_run.validation.table(step=step).to_pylist() for step in (2, 4))
    assert [row["uid"] for row in first] == [row["uid"] for row in last]
    losses = {row["step"]: row["val/loss"] for row in sft_run.metrics.table().to_pylist()}
    for step, rows in ((2, first), (4, last)):
        assert [row["prompt"] for row in rows] == [f"add 0 and {j}" for j in range(4)]
        assert all("sure?" in row["response"] for row in rows)
        assert {row["correct"] for row in rows} == {None}
        means = [row["score"] for row in rows]
        assert min(means) <= -losses[step] <= max(means)
    trained = sft_run.rows.table(["uid"], step=1)["uid"].to_pylist()
    recorded = {uid for step in sft_run.rows.steps for uid in sft_run.rows.table(["uid"], step=step)["uid"].to_pylist()}
    assert set(trained) | {row["uid"] for row in first} <= recorded, "the same row has the same id"


def test_a_validation_beyond_the_budget_keeps_the_same_sample_every_time(model, tmp_path):
    settings = ("trainer.record.max_mb_per_step=0.0008", "trainer.val_before_train=True")
    run = recording.read(record_sft(model, tmp_path, *settings))
    uids = [run.validation.table(["uid"], step=step)["uid"].to_pylist() for step in (0, 2, 4)]
    assert 0 < len(uids[0]) < 4
    assert uids[0] == uids[1] == uids[2] == sorted(uids[0])
    assert run.validation.metadata(2)["groups"] == 4
    events = [json.loads(event["data"]) for event in run.events.table().to_pylist() if event["kind"] == "sampled"]
    assert {"groups": 4, "recorded": len(uids[0]), "stream": "validation"} in events


@pytest.mark.parametrize(
    "batching",
    [pytest.param("data.micro_batch_size_per_gpu=3", marks=pytest.mark.slow), "data.use_dynamic_bsz=True"],
)
def test_log_probs_belong_to_their_rows_for_all_micro_batches(sft_run, model, tmp_path, batching):
    limit = "data.max_token_len_per_gpu=70"
    run = recording.read(record_sft(model, tmp_path, batching, limit, "trainer.total_training_steps=1"))
    expected = {row["uid"]: row for row in sft_run.rows.table(step=1).to_pylist()}
    for row in run.rows.table(step=1).to_pylist():
        reference = expected.pop(row["uid"])
        np.testing.assert_allclose(row["trainer_log_probs"], reference["trainer_log_probs"], atol=1e-4)
    assert expected == {}


def test_training_is_bit_identical_with_and_without_recording(sft_run, model, tmp_path):
    settings = ("data.micro_batch_size_per_gpu=1", "trainer.record.enable=False", "trainer.logger=[file]")
    folder = record_sft(model, tmp_path, *settings, f"trainer.tracking_dir={tmp_path}/runs")
    assert not (folder / "record").exists()
    lines = [json.loads(line)["data"] for line in (tmp_path / "runs/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    recorded = sft_run.metrics.table(["train/loss"])["train/loss"].to_pylist()
    assert losses == [loss for loss in recorded if loss is not None]


def test_a_resumed_run_has_every_step_once(model, tmp_path):
    record_sft(model, tmp_path, "trainer.save_freq=2", "trainer.total_training_steps=3")
    (tmp_path / "checkpoints/global_step_3").rename(tmp_path / "lost")
    run = recording.read(record_sft(model, tmp_path, "trainer.save_freq=2"))
    assert [attempt.first_step for attempt in run.attempts] == [0, 3]
    assert run.rows.steps == [1, 2, 3, 4]
    assert [run.rows.metadata(step)["attempt"] for step in run.rows.steps] == [1, 1, 2, 2]
    assert len({uid for step in run.rows.steps for uid in run.rows.table(["uid"], step=step)["uid"].to_pylist()}) == 16


def test_the_budget_keeps_the_numbers_of_all_rows(model, tmp_path):
    settings = ("trainer.record.max_mb_per_step=0.001", "trainer.total_training_steps=1")
    run = recording.read(record_sft(model, tmp_path, *settings))
    rows = run.rows.table(step=1).to_pylist()
    recorded = [row for row in rows if row["recorded"]]
    assert 0 < len(recorded) < len(rows) == 4
    assert all(row["loss"] > 0 and row["trained_tokens"] > 0 for row in rows)
    for row in rows:
        assert (row["token_ids"] is not None) == (row["prompt"] is not None) == row["recorded"]
    sampled = [json.loads(event["data"]) for event in run.events.table().to_pylist() if event["kind"] == "sampled"]
    assert {"rows": 4, "recorded": len(recorded), "seed": 1} in sampled


def test_numbers_only(model, tmp_path):
    settings = ("trainer.record.texts=False", "trainer.total_training_steps=1")
    run = recording.read(record_sft(model, tmp_path, *settings))
    for row in run.rows.table(step=1).to_pylist():
        assert (row["prompt"], row["prompt_ids"], row["token_ids"]) == (None, None, None)
        assert {turn["text"] for turn in row["turns"]} == {None}
        assert len(row["trainer_log_probs"]) == len(row["mask"])
    assert {row["response"] for row in run.validation.table().to_pylist()} <= {None}
    assert b"sure?" not in b"".join(path.read_bytes() for path in run.folder.rglob("*.*"))


def test_redacted_texts_have_no_token_ids(model, tmp_path):
    settings = ("trainer.record.redact=['sure.']", "trainer.total_training_steps=1")
    run = recording.read(record_sft(model, tmp_path, *settings))
    for row in run.rows.table(step=1).to_pylist():
        assert row["turns"][1]["text"] == "[redacted]"
        assert set(row["token_ids"]) == {-1}
        assert -1 not in row["prompt_ids"]


def _write(folder: Path, batch: dict[str, torch.Tensor], log_probs: torch.Tensor) -> list[dict[str, Any]]:
    writer = RecordWriter(folder / "record", {})
    options = RowOptions(tiny_tokenizer(), Redaction(), True, 10**6)
    writer.submit(lambda: write_rows(DataProto.from_dict(batch), log_probs, 1, options, writer), 1)
    writer.close()
    writer.raise_error()
    return recording.read(folder).rows.table(step=1).to_pylist()


def test_weighted_rows_and_rows_without_trained_tokens(tmp_path):
    batch = {
        "prompts": torch.tensor([[0, 20], [20, 21]]),
        "responses": torch.tensor([[22, 23, 24], [0, 0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 0, 1], [0, 0, 0]]),
        "loss_weights": torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]]),
    }
    weighted, empty = _write(tmp_path, batch, torch.tensor([[-1.0, -9.0, -2.0], [0.0, 0.0, 0.0]]))
    assert weighted["loss"] == pytest.approx((1.0 + 2.0 * 0.5) / 1.5)
    assert weighted["loss_weights"] == [1.0, 0.0, 0.5]
    assert [(turn["source"], turn["tokens"]) for turn in weighted["turns"]] == [
        ("model", 1), ("environment", 1), ("model", 1)
    ]  # fmt: skip
    assert (empty["loss"], empty["turns"], empty["token_ids"], empty["tokens"]) == (None, [], [], 2)


# -------------------------------------------------------------------- reward models


def test_pairs_have_texts_scores_and_margins(rm_run):
    assert rm_run.pairs.steps == [1, 2, 3, 4]
    metrics = {row["step"]: row for row in rm_run.metrics.table().to_pylist()}
    for step in rm_run.pairs.steps:
        pairs = rm_run.pairs.table(step=step).to_pylist()
        assert len(pairs) == 4
        for pair in pairs:
            i, j = pair["prompt"].removeprefix("add ").split(" and ")
            assert (pair["chosen"], pair["rejected"]) == (f"{int(i) + int(j)}", f"not {int(i) + int(j)}, I think")
            assert pair["chosen_tokens"] == len(pair["chosen_ids"]) < pair["rejected_tokens"]
            is_tie = j == "3"
            assert pair["preference"] == (0.5 if is_tie else 1.0)
            difference = pair["chosen_score"] - pair["rejected_score"]
            assert pair["margin"] == (None if is_tie else pytest.approx(difference))
            assert pair["correct"] == (None if is_tie or not difference else difference > 0)
        decided = [pair for pair in pairs if pair["margin"] is not None]
        shares = [0.5 if pair["correct"] is None else pair["correct"] for pair in decided]
        assert np.mean(shares) == pytest.approx(metrics[step]["train/accuracy"])
        assert np.mean([pair["margin"] for pair in decided]) == pytest.approx(metrics[step]["train/margin"], rel=1e-5)
        assert np.mean([pair["loss"] for pair in pairs]) == pytest.approx(metrics[step]["train/loss"], rel=1e-5)


def test_validation_pairs_become_correct_or_wrong(rm_run):
    assert rm_run.validation.steps == [0, 2, 4]
    metrics = {row["step"]: row for row in rm_run.metrics.table().to_pylist()}
    for step in (2, 4):
        rows = rm_run.validation.table(step=step).to_pylist()
        assert [row["prompt"] for row in rows] == [f"add 0 and {j}" for j in range(4)]
        for row in rows:
            rewards = dict(row["rewards"])
            is_tie = row["prompt"] == "add 0 and 3"
            assert row["score"] == (None if is_tie else pytest.approx(rewards["chosen"] - rewards["rejected"]))
            assert [(turn["name"], turn["text"] == row["response"]) for turn in row["turns"]] == [
                ("chosen", True), ("rejected", False)
            ]  # fmt: skip
        shares = [row["correct"] for row in rows if row["score"] is not None]
        assert np.mean(shares) == pytest.approx(metrics[step]["val/accuracy"])


@pytest.mark.slow
def test_pairs_keep_the_budget_and_the_settings_for_texts(model, tmp_path):
    one = "trainer.total_training_steps=1"
    run = recording.read(record_rm(model, tmp_path / "numbers", "trainer.record.texts=False", one))
    for pair in run.pairs.table(step=1).to_pylist():
        assert {pair[name] for name in ("prompt", "chosen", "rejected", "prompt_ids", "chosen_ids")} == {None}
        assert pair["chosen_score"] is not None
    some = ("trainer.record.redact=['I think']", "trainer.record.max_mb_per_step=0.0006", one)
    pairs = recording.read(record_rm(model, tmp_path / "redacted", *some)).pairs.table(step=1).to_pylist()
    assert 0 < sum(pair["recorded"] for pair in pairs) < 4
    for pair in pairs:
        if pair["recorded"]:
            assert pair["rejected"].endswith(", [redacted]")
            assert set(pair["rejected_ids"]) == {-1}
            assert -1 not in pair["chosen_ids"]
    assert all((pair["chosen"] is not None) == pair["recorded"] for pair in pairs)
    assert all(pair["loss"] > 0 for pair in pairs)


@pytest.mark.slow
def test_a_resumed_reward_model_has_every_step_once(model, tmp_path):
    record_rm(model, tmp_path, "trainer.save_freq=2", "trainer.total_training_steps=3")
    (tmp_path / "checkpoints/global_step_3").rename(tmp_path / "lost")
    run = recording.read(record_rm(model, tmp_path, "trainer.save_freq=2"))
    assert [run.pairs.metadata(step)["attempt"] for step in run.pairs.steps] == [1, 1, 2, 2]
