"""End tokens in whole runs: what any source names ends an answer, in training, validation and generation."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.training_harness import close, make_task, make_trainer, overrides, run_training

# Named by the generation config alone; a third of what a random model says.
ENDS = list(range(100, 190))


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    task = make_task(tmp_path_factory.mktemp("task"))
    settings = Path(task["model"]) / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": ENDS}))
    return task


def generated(trainer, validate: bool):
    """Token ids of each answer, in training or in validation."""
    from verl.protocol import DataProto

    loader = trainer.val_dataloader if validate else trainer.train_dataloader
    batch = trainer._generate_rows(DataProto.from_single_dict(next(iter(loader))), validate)
    lengths = batch.batch["response_mask"].sum(-1).tolist()
    return [row[:length] for row, length in zip(batch.batch["responses"].tolist(), lengths, strict=True)]


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_training_and_validation_stop_at_every_end_token(task, tmp_path, caplog, engine):
    run = ("data.max_response_length=16", f"actor_rollout_ref.rollout.name={engine}")
    sampled = "actor_rollout_ref.rollout.val_kwargs={do_sample: true, temperature: 1.0}"
    trainer = make_trainer(overrides(task, tmp_path, *run, sampled, "actor_rollout_ref.rollout.stop_token_ids=[50]"))
    try:
        with caplog.at_level(logging.INFO):
            trainer.init_workers()
        trainer._sync_weights()
        answers = generated(trainer, validate=False) + generated(trainer, validate=True)
    finally:
        close(trainer)
    ends = {1, 50, *ENDS}
    assert all(token not in ends for answer in answers for token in answer[:-1])
    ended = [answer for answer in answers if answer[-1] in ENDS]
    assert len(ended) > len(answers) / 2, "the end token is part of the answer"
    (told,) = [record.message for record in caplog.records if record.message.startswith("end tokens:")]
    assert "<|end|> = 1 (model config, tokenizer, chat template)" in told
    assert "= 50 (stop_token_ids)" in told


def test_answers_cut_below_the_response_length_are_clipped_and_ended_ones_are_not(task, tmp_path):
    """Cut at rollout.max_new_tokens; at any other end token an answer has ended, however long it is."""
    run = (
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.max_new_tokens=2",
        "trainer.total_training_steps=1",
    )
    trainer = run_training(overrides(task, tmp_path / "cut", *run, "actor_rollout_ref.rollout.ignore_eos=True"))
    assert trainer.history[0]["response_length/clip_ratio"] == 1.0
    stops = f"actor_rollout_ref.rollout.stop_token_ids={list(range(264))}"
    trainer = run_training(overrides(task, tmp_path / "ended", "data.max_response_length=1", *run[2:], stops))
    assert trainer.history[0]["response_length/mean"] == 1.0
    assert trainer.history[0]["response_length/clip_ratio"] == 0.0


def test_generation_stops_at_every_end_token(task, tmp_path):
    from verl.trainer.main_generation import run_generation

    def lengths(**rollout):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
        config = {
            "data": {"path": task["train"], "output_path": str(file), "max_prompt_length": 64, "max_samples": 8},
            "model": {"path": task["model"]},
            "rollout": {"max_new_tokens": 16, "temperature": 1.0, **rollout},
            "trainer": {"device": "cpu"},
        }
        return [len(row["responses"][0]) for row in pq.read_table(run_generation(config)).to_pylist()]

    assert sum(lengths()) < sum(lengths(ignore_eos=True)) / 2
