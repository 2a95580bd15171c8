"""What training runs record: sync with validation and resume, async, agents, numbers only, redaction, SFT."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.tiny import tiny_tokenizer
from tests.support.training_harness import make_task, overrides, run_training
from verl import recording
from verl.protocol import DataProto
from verl.recording.redaction import Redaction
from verl.recording.writer import RecordWriter
from verl.trainer.ppo.recorded_rows import RecordedStep, RowOptions

GRPO = ("algorithm=grpo", "actor_rollout_ref.rollout.n=4")
AGENT = '''
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class TwoRows(AgentLoopBase):
    """Row 0: an answer, a tool's text, an answer. Sample 1 rewrites its context: it has a second row."""
    async def run(self, sampling_params, **row):
        ids = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False)
        first = (await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)).token_ids[:3]
        result = self.tokenizer.encode("the key is sk-123", add_special_tokens=False)
        context = [*ids, *first, *result]
        call = {"prompt_ids": context, "sampling_params": sampling_params}
        second = (await self.server_manager.generate("r", **call)).token_ids[:2]
        outputs = [AgentLoopOutput(ids, [*first, *result, *second], [1] * 3 + [0] * len(result) + [1] * len(second),
                                   extra_fields={"turn_names": ["lookup"]}, turn_rewards=[(3, 0.25)])]
        if row["sample_index"] == 1:
            outputs.append(AgentLoopOutput(ids, list(second), [1] * len(second)))
        return outputs
'''
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) % 3 / 2, "format": 0.5, "comment": f"read {ground_truth}"}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("task")
    (folder / "agent.py").write_text(AGENT)
    (folder / "reward.py").write_text(REWARD)
    return make_task(folder / "data") | {"agent": str(folder / "agent.py"), "reward": str(folder / "reward.py")}


def record(task: dict[str, str], folder: Path, *settings: str) -> tuple[Any, recording.Recording]:
    trainer = run_training(overrides(task, folder, *GRPO, *settings))
    return trainer, recording.read(folder / "checkpoints")


@pytest.fixture(scope="module")
def sync_run(task, tmp_path_factory) -> tuple[Path, Any, recording.Recording]:
    folder = tmp_path_factory.mktemp("sync")
    dumps = (f"trainer.rollout_data_dir={folder}/rollouts", f"trainer.validation_data_dir={folder}/val")
    settings = ("trainer.test_freq=1", "trainer.dump_steps=[2]", "trainer.save_freq=1", "trainer.val_before_train=True")
    return folder, *record(task, folder, *dumps, *settings)


def test_metrics_are_those_of_the_trackers_and_recording_counts_its_own_time(sync_run):
    _, trainer, run = sync_run
    rows = run.metrics.table().to_pylist()
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row, metrics in zip(rows, trainer.history, strict=True):
        assert {name: value for name, value in row.items() if value is not None and name in metrics} == {
            name: pytest.approx(value) for name, value in metrics.items() if not math.isnan(value)
        }
    assert all(0 < row["timing_s/record"] < row["timing_s/step"] for row in rows[1:])


def test_groups_and_trajectories_are_the_trained_batch(sync_run):
    folder, _, run = sync_run
    tensors = torch.load(folder / "checkpoints/debug_step_2.pt", weights_only=True)
    rows, groups = run.trajectories.table(step=2).to_pylist(), run.groups.table(step=2).to_pylist()
    assert (len(rows), len(groups)) == (32, 8)
    dumped = [json.loads(line) for line in (folder / "rollouts/2.jsonl").read_text().splitlines()]
    columns = {"rollout_log_probs": "rollout_log_probs", "trainer_log_probs": "old_log_probs", "mask": "response_mask",
               "advantages": "advantages", "token_ids": "responses", "versions": "rollout_versions",
               "token_scores": "token_level_scores"}  # fmt: skip
    for number, (row, line) in enumerate(zip(rows, dumped, strict=True)):
        assert (row["uid"], row["sample_index"]) == (line["uid"], line["sample_index"])
        length = len(row["token_ids"])
        assert length == int(tensors["attention_mask"][number, -tensors["responses"].shape[1] :].sum())
        for field, name in columns.items():
            assert torch.equal(torch.tensor(row[field]), tensors[name][number, :length].to(torch.tensor(row[field])))
        assert [turn["text"] for turn in row["turns"]] == [line["output"]]
        assert row["prompt"] == line["input"]
        assert row["score"] == line["score"]
        assert dict(row["rewards"]) == {"score": line["data_score"], "format": 0.5}
        assert json.loads(row["reward_info"]) == {"comment": f"read {line['gts']}"}
        assert row["ground_truth"] == line["gts"]
    for number, group in enumerate(groups):
        answers = rows[4 * number : 4 * number + 4]
        assert {answer["uid"] for answer in answers} == {group["uid"]}
        assert group["scores"] == [answer["score"] for answer in answers]
        assert group["lengths"] == [len(answer["token_ids"]) for answer in answers]
        assert group["finish_reasons"] == [answer["finish_reason"] for answer in answers]
        assert group["score_std"] == pytest.approx(np.std(group["scores"]))
        assert group["staleness"] == 0
        assert group["recorded"]


def test_validation_answers_to_the_same_prompts_are_recorded_over_time(sync_run):
    folder, trainer, run = sync_run
    assert run.validation.steps == [0, 1, 2]
    uids = [run.validation.table(["uid"], step=step)["uid"].to_pylist() for step in (0, 1, 2)]
    assert uids[0] == uids[1] == uids[2]
    rows = run.validation.table(step=2).to_pylist()
    lines = [json.loads(line) for line in (folder / "val/2.jsonl").read_text().splitlines()]
    assert [(row["uid"], row["prompt"], row["response"], row["score"]) for row in rows] == [
        (line["uid"], line["input"], line["output"], line["score"]) for line in lines
    ]
    accuracy = np.mean([row["correct"] for row in rows])
    assert accuracy == pytest.approx(trainer.history[-1]["val/toy/accuracy"])
    assert not {"length", "finish_reason", "correct"} & lines[0].keys(), "the format of the view is unchanged"


def test_phases_have_tracks_for_controller_ranks_and_engines(sync_run):
    _, trainer, run = sync_run
    phases = run.phases.to_pandas()
    of_step = phases[(phases.track == "controller") & (phases.step == 2)].set_index("phase")
    for name in ("gen", "reward", "update_actor", "step"):
        seconds = of_step.loc[name, "end"] - of_step.loc[name, "start"]
        assert seconds == pytest.approx(trainer.history[-1][f"timing_s/{name}"], abs=0.01)
    calls = phases[(phases.track == "actor_rollout/0") & (phases.phase == "update_actor")].sort_values("start")
    assert calls.step.tolist() == [1, 2]
    assert (phases[phases.track == "engine/0"].phase == "generating").all()
    generating = phases[(phases.track == "engine/0") & (phases.step == 2)].iloc[0]
    assert of_step.loc["gen", "start"] - 0.01 <= generating.start
    assert generating.end <= of_step.loc["gen", "end"] + 0.01
    assert run.engines.table()["weight_version"].to_pylist()[-1] == 2


def test_events_and_vocabulary(sync_run):
    _, _, run = sync_run
    kinds = run.events.table()["kind"].to_pylist()
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("checkpoint") == 2
    tokens = run.tokens.table().to_pylist()
    assert [row["id"] for row in tokens] == list(range(len(tokens)))
    row = run.trajectories.table(step=1).to_pylist()[0]
    assert "".join(tokens[i]["text"] for i in row["prompt_ids"] if not tokens[i]["special"]) == row["prompt"]


def test_a_resumed_run_continues_the_recording_without_duplicates(task, tmp_path):
    common = ("trainer.save_freq=2", "data.val_files=[]")
    record(task, tmp_path, *common, "trainer.total_training_steps=3")
    torch_steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*"))
    assert torch_steps == ["global_step_2", "global_step_3"]
    (tmp_path / "checkpoints/global_step_3").rename(tmp_path / "lost")
    _, run = record(task, tmp_path, *common, "trainer.total_training_steps=4")
    assert [(a.number, a.first_step) for a in run.attempts] == [(1, 0), (2, 3)]
    assert run.metrics.table()["step"].to_pylist() == [1, 2, 3, 4]
    assert run.metrics.table()["attempt"].to_pylist() == [1, 1, 2, 2]
    assert run.groups.steps == run.trajectories.steps == [1, 2, 3, 4]
    assert run.trajectories.metadata(3)["attempt"] == 2


def test_agents_have_turns_rows_rewards_and_redacted_results(task, tmp_path):
    loop = f"actor_rollout_ref.rollout.agent.default_agent_loop={task['agent']}:TwoRows"
    agents = ("actor_rollout_ref.rollout.mode=async", "actor_rollout_ref.rollout.agent.num_workers=1", loop)
    settings = ("data.val_files=[]", "data.max_response_length=32", "trainer.total_training_steps=1")
    redact = ("trainer.record.redact=['sk-[0-9]+']", f"trainer.rollout_data_dir={tmp_path}/rollouts")
    _, run = record(task, tmp_path, *agents, *settings, *redact)
    rows = run.trajectories.table(step=1).to_pylist()
    assert len(rows) == 8 * 5, "every second sample has two rows"
    assert [row["part"] for row in rows if row["sample_index"] == 1] == [0, 1] * 8
    row = rows[0]
    assert [(turn["source"], turn["name"]) for turn in row["turns"]] == [
        ("model", None), ("environment", "lookup"), ("model", None)
    ]  # fmt: skip
    assert row["turns"][1]["text"] == "the key is [redacted]"
    assert row["turns"][0]["reward"] == 0.25
    assert row["token_ids"] == [-1] * len(row["mask"]), "ids would reveal the text"
    assert sum(turn["tokens"] for turn in row["turns"]) == len(row["mask"])
    assert row["prompt_ids"][0] != -1
    files = [*(tmp_path / "checkpoints/record").rglob("*.*"), *(tmp_path / "rollouts").iterdir()]
    assert not [path for path in files if b"sk-123" in path.read_bytes()]
    group = run.groups.table(step=1).to_pylist()[0]
    assert group["lengths"][1] == sum(
        len(r["mask"]) for r in rows if r["uid"] == group["uid"] and r["sample_index"] == 1
    )


def test_numbers_only_and_a_budget_per_step(task, tmp_path):
    settings = ("trainer.record.texts=False", "trainer.record.max_mb_per_step=0.006", "trainer.test_freq=1")
    _, run = record(task, tmp_path, *settings, "trainer.total_training_steps=1")
    groups, rows = run.groups.table(step=1).to_pylist(), run.trajectories.table(step=1).to_pylist()
    chosen = {group["uid"] for group in groups if group["recorded"]}
    assert 0 < len(chosen) < len(groups) == 8
    assert {row["uid"] for row in rows} == chosen
    sample = run.trajectories.metadata(1)
    assert (sample["groups"], sample["recorded"]) == (8, len(chosen))
    sampled = [json.loads(event["data"]) for event in run.events.table().to_pylist() if event["kind"] == "sampled"]
    assert {"groups": 8, "recorded": len(chosen), "seed": 1} in sampled
    for name in ("prompt", "prompt_ids", "token_ids", "messages", "reward_info", "ground_truth", "extra"):
        assert {row[name] for row in rows} == {None}, name
    assert all(turn["text"] is None for row in rows for turn in row["turns"])
    assert all(row["advantages"] for row in rows)
    assert {row["response"] for row in run.validation.table().to_pylist()} <= {None}
    assert len(run.tokens.table()) == 0
    assert b"Say " not in b"".join(path.read_bytes() for path in run.folder.rglob("*.*"))


def test_large_fields_of_the_data_count_towards_the_budget(task, tmp_path):
    rows = pq.read_table(task["train"]).to_pylist()
    extra = {"extra_info": {"tests": "x" * 20_000}}  # 8 prompts × 4 responses: 640 kB
    pq.write_table(pa.Table.from_pylist([row | extra for row in rows]), tmp_path / "large.parquet")
    large = task | {"train": str(tmp_path / "large.parquet")}
    settings = ("trainer.record.max_mb_per_step=0.3", "trainer.total_training_steps=1", "data.val_files=[]")
    _, run = record(large, tmp_path / "run", *settings)
    assert 0 < sum(run.groups.table(step=1)["recorded"].to_pylist()) < 8


@pytest.mark.parametrize(
    "record_setting",
    [
        "max_mb_per_step=0.006",
        pytest.param("texts=False", marks=pytest.mark.slow),
        pytest.param("enable=False", marks=pytest.mark.slow),
    ],
)
def test_files_of_responses_are_complete_whatever_is_recorded(task, tmp_path, sync_run, record_setting):
    dumps = (f"trainer.rollout_data_dir={tmp_path}/rollouts", f"trainer.validation_data_dir={tmp_path}/val")
    settings = ("trainer.test_freq=1", "trainer.val_before_train=True", f"trainer.record.{record_setting}")
    run_training(overrides(task, tmp_path, *GRPO, *dumps, *settings))
    for name in ("rollouts/1.jsonl", "rollouts/2.jsonl", "val/0.jsonl", "val/1.jsonl", "val/2.jsonl"):
        expected, lines = (
            [json.loads(line) for line in (folder / name).read_text().splitlines()]
            for folder in (sync_run[0], tmp_path)
        )
        assert lines == expected, name
        assert len(lines) == (32 if name.startswith("rollouts") else 6)


def test_a_run_that_only_validates_ends_with_an_error_if_its_responses_cannot_be_written(task, tmp_path):
    (tmp_path / "val").mkdir()
    (tmp_path / "val/0.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        run_training(overrides(task, tmp_path, "trainer.val_only=True", f"trainer.validation_data_dir={tmp_path}/val"))


class _CountingTokenizer:
    """Decodes like the tiny tokenizer and counts the decoded rows."""

    def __init__(self) -> None:
        self._tokenizer, self.rows = tiny_tokenizer(), 0

    def batch_decode(self, rows: list[list[int]], **options: Any) -> list[str]:
        self.rows += len(rows)
        return self._tokenizer.batch_decode(rows, **options)


def _step_batch(groups: int = 4, samples: int = 2) -> DataProto:
    count, width = groups * samples, 3
    ids = torch.arange(20, 20 + count * width).view(count, width)
    ones = torch.ones_like(ids)
    tensors = {"prompts": ids // samples, "responses": ids, "attention_mask": torch.cat([ones, ones], 1)}
    tensors |= {"response_mask": ones, "token_level_scores": ones.float(), "advantages": ones.float()}
    uids = np.array([f"p{row // samples}" for row in range(count)], dtype=object)
    return DataProto.from_dict(tensors, {"uid": uids, "data_source": np.array(["toy"] * count, dtype=object)})


def test_lines_and_trajectories_are_one_conversion(tmp_path):
    tokenizer = _CountingTokenizer()
    options = RowOptions(tokenizer, Redaction(), texts=True, max_bytes=10**6)
    step = RecordedStep(_step_batch(), 1, version=0, reward_names=(), options=options).fetch_tokens()
    lines = list(step.lines())
    decoded = tokenizer.rows
    assert decoded <= 8 + 8, "each prompt and response once"
    writer = RecordWriter(tmp_path / "record", {})
    writer.submit(lambda: step.write(writer), step.step)
    writer.close()
    writer.raise_error()
    assert tokenizer.rows == decoded, "the recording reuses the texts"
    rows = recording.read(tmp_path).trajectories.table(step=1).to_pylist()
    assert [(row["prompt"], row["turns"][0]["text"], row["score"]) for row in rows] == [
        (line["input"], line["output"], line["score"]) for line in lines
    ]


def test_lines_need_no_worker_after_their_tokens_are_fetched(monkeypatch):
    batch = _step_batch()
    batch.lengths = SimpleNamespace(prompt=[3] * 8, response=[3] * 8)  # as a BatchRef, known without fetching
    options = RowOptions(tiny_tokenizer(), Redaction(), texts=True, max_bytes=0)
    step = RecordedStep(batch, 1, version=0, reward_names=(), options=options).fetch_tokens()
    monkeypatch.delattr(RecordedStep, "fetch")
    assert [line["score"] for line in step.lines()] == [3.0] * 8


def test_the_sample_is_chosen_before_its_columns_are_fetched(tmp_path, monkeypatch):
    fetched: dict[str, int] = {}
    fetch = RecordedStep.fetch

    def counted(self: RecordedStep, tensors: Any, *rest: Any, **options: Any) -> DataProto:
        columns = fetch(self, tensors, *rest, **options)
        fetched.update({name: max(len(columns), fetched.get(name, 0)) for name in tensors})
        return columns

    monkeypatch.setattr(RecordedStep, "fetch", counted)
    options = RowOptions(tiny_tokenizer(), Redaction(), texts=True, max_bytes=200)
    writer = RecordWriter(tmp_path / "record", {})
    step = RecordedStep(_step_batch(), 1, version=0, reward_names=(), options=options)
    writer.submit(lambda: step.write(writer), step.step)
    writer.close()
    writer.raise_error()
    recorded = len(recording.read(tmp_path).trajectories.table(step=1))
    assert 0 < recorded < 8
    assert fetched["advantages"] == recorded
    assert fetched["prompts"] == 4, "the preview of each group"


def test_async_groups_have_their_staleness(task, tmp_path):
    mode = ("trainer.mode=one_step_off", "actor_rollout_ref.rollout.mode=async", "data.val_files=[]")
    _, run = record(task, tmp_path, *mode, "trainer.total_training_steps=3")
    staleness = [set(run.groups.table(["staleness"], step=step)["staleness"].to_pylist()) for step in (1, 2, 3)]
    assert staleness == [{0}, {1}, {1}]
    assert [row["async/staleness/max"] for row in run.metrics.table().to_pylist()] == [0, 1, 1]


def test_a_run_that_only_validates_is_recorded_beside_the_training_run(task, tmp_path):
    training = tmp_path / "checkpoints/record"
    training.mkdir(parents=True)
    for _ in range(2):
        run_training(overrides(task, tmp_path, "trainer.val_only=True"))
    folders = list((tmp_path / "checkpoints/val_only").iterdir())
    assert len(folders) == 2, "each has a folder: they may run at the same time"
    for folder in folders:
        run = recording.read(folder)
        assert run.validation.steps == run.metrics.table()["step"].to_pylist() == [0]
        assert [event["kind"] for event in run.events.table().to_pylist()] == ["start", "end"]
    assert list(training.iterdir()) == []


def test_nothing_is_recorded_if_disabled(task, tmp_path):
    settings = ("trainer.record.enable=False", "data.val_files=[]", "trainer.total_training_steps=1")
    trainer = run_training(overrides(task, tmp_path, *GRPO, *settings))
    assert not (tmp_path / "checkpoints/record").exists()
    assert "timing_s/record" not in trainer.history[0]
