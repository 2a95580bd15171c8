"""Training steps with an agent of the user's own that does everything an agent may do, through the real engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.training_harness import make_task, overrides, run_training
from verl.trainer.common.training_health import NoSamplesError
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

AGENT = '''
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

TOOL = [70, 71, 72]


class Varied(AgentLoopBase):
    """Sample 0: two turns; 1: brings its score; 2: a token that nobody sampled; 3: two rows; of some rows it fails."""

    async def run(self, sampling_params, **row):
        prompt, number = list(row["prompt_ids"]), row["sample_index"]
        if number == 0 and row["index"] % 2:
            raise KeyError("no such city")
        first = await self._ask(prompt, sampling_params)
        if number == 1:
            said = {"reward_extra_info": {"hints": 2.0}, "place": "Paris"}
            return AgentLoopOutput(prompt, first, [1] * len(first), reward_score=0.25, num_turns=1, extra_fields=said)
        if number == 3:
            again = [*prompt, 80, 81]
            second = await self._ask(again, sampling_params)
            return [AgentLoopOutput(p, r, [1] * len(r), num_turns=2) for p, r in ((prompt, first), (again, second))]
        made_up = [90] if number == 2 else []
        second = await self._ask([*prompt, *first, *TOOL], sampling_params)
        return AgentLoopOutput(
            prompt,
            [*first, *TOOL, *second, *made_up],
            [1] * len(first) + [0] * len(TOOL) + [1] * len(second + made_up),
            num_turns=3,
            metrics=AgentLoopMetrics(tool_calls=0.5, tool_call_counts=1, tools={"echo": {"calls": 1, "seconds": 0.5}}),
            turn_rewards=[(len(first) + len(TOOL), 0.5)],
        )

    async def _ask(self, ids, sampling_params):
        said = await self.server_manager.generate(
            request_id=str(len(ids)), prompt_ids=ids, sampling_params={**sampling_params, "max_new_tokens": 3}
        )
        return said.token_ids


class Graded(AgentLoopBase):
    """Its tool's reward takes a right answer's score away and gives a wrong one's; two of three rows fail."""

    async def run(self, sampling_params, **row):
        if row["index"] % 3:
            raise KeyError("no such city")
        prompt, right = list(row["prompt_ids"]), row["extra_info"]["right"]
        first = await self._ask(prompt, sampling_params)
        return AgentLoopOutput(prompt, first, [1] * len(first), turn_rewards=[(1, -1.0 if right else 1.0)])

    _ask = Varied._ask


class Broken(AgentLoopBase):
    async def run(self, sampling_params, **row):
        raise ValueError(f"nothing works: {row['uid'][:0]}here")
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "my_agent.py").write_text(AGENT)
    return make_task(folder) | {"agent": str(folder / "my_agent.py")}


class Kept(RayPPOTrainer):
    def _record_step(self, batch, metrics) -> None:
        super()._record_step(batch, metrics)
        self.kept = batch


def run(task: dict[str, str], folder: Path, loop: str, *settings: str) -> Kept:
    common = (
        "algorithm=grpo",
        "data.val_files=[]",
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={task['agent']}:{loop}",
        "trainer.total_training_steps=1",
        f"trainer.rollout_data_dir={folder / 'dumps'}",
    )
    return run_training(overrides(task, folder, *common, *settings), trainer_cls=Kept)


@pytest.mark.parametrize(
    "correction",
    [
        pytest.param(("algorithm.rollout_correction.bypass_mode=True",), marks=pytest.mark.slow),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_rs=token"),
    ],
    ids=["bypass", "weights"],
)
def test_an_agent_that_does_all_an_agent_may_do_is_learned_from(task, tmp_path, correction):
    trainer = run(task, tmp_path, "Varied", *correction)
    batch, metrics = trainer.kept, trainer.history[0]
    names, numbers = (batch.non_tensor_batch[name].tolist() for name in ("trajectory", "sample_index"))
    failed = [info["status"] == "failed" for info in batch.non_tensor_batch["agent_metrics"]]
    tensors = {name: batch.batch[name] for name in ("response_mask", "rollout_log_probs", "old_log_probs")}
    mask = tensors["response_mask"].bool()
    assert [not row.any() for row in mask] == failed
    assert len(set(names)) == 8 * 4
    assert metrics["agent_loop/trajectories/failed"] == len({n for n, f in zip(names, failed, strict=True) if f}) > 0
    unknown = tensors["rollout_log_probs"].isnan()
    assert unknown.sum() == metrics["agent_loop/unmatched_tokens"] == 8
    assert {number for number, row in zip(numbers, unknown, strict=True) if row.any()} == {2}
    for name in ("old_log_probs", "advantages", "returns", "token_level_scores"):
        assert batch.batch[name].isfinite().all(), name
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.isfinite(weight).all() for weight in trainer.final_weights.values())
    assert metrics["actor/grad_norm"] > 0
    given = [row for row, number in enumerate(numbers) if number == 1]
    assert batch.batch["token_level_scores"][given].sum(-1).tolist() == [0.25] * 8
    assert metrics["reward/hints/mean"] == 2.0
    lines = [json.loads(line) for line in (tmp_path / "dumps/1.jsonl").read_text().splitlines()]
    assert [line["place"] for line in lines if line["sample_index"] == 1] == ["Paris"] * 8
    kinds = [[turn["by"] for turn in line["turns"]] for line in lines if line["sample_index"] == 2]
    assert kinds == [["model", "environment", "model"]] * 8
    scores = [line["score"] for line in lines if line["status"] == "finished"]
    assert metrics["critic/score/mean"] == pytest.approx(np.mean(scores))


def test_a_run_whose_agents_all_fail_ends_with_the_last_failure(task, tmp_path):
    with pytest.raises(NoSamplesError, match=r"32 trajectories .* ValueError: nothing works: here"):
        run(task, tmp_path, "Broken")


GRADES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(extra_info["right"])
    return {"score": score, "acc": score} if data_source == "says_acc" else score
"""


@pytest.mark.parametrize(
    ("right", "source"),
    [
        (True, "says_acc"),
        (False, "toy"),
        pytest.param(True, "toy", marks=pytest.mark.slow),
        pytest.param(False, "says_acc", marks=pytest.mark.slow),
    ],
)
def test_an_answer_is_right_by_its_score_and_a_failed_agent_is_wrong(task, tmp_path, caplog, right, source):
    """Whatever its turns earned. Training and validation count alike: two of six prompts are answered."""
    caplog.set_level("INFO", logger="verl")
    rows = pq.read_table(task["train"]).to_pylist()[:6]
    for row in rows:
        row["data_source"] = source
        row["extra_info"]["right"] = right
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "grades.py").write_text(GRADES)
    trainer = run(
        task,
        tmp_path,
        "Graded",
        f"data.train_files={tmp_path / 'rows.parquet'}",
        f"data.val_files={tmp_path / 'rows.parquet'}",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        f"custom_reward_function.path={tmp_path / 'grades.py'}",
        "reward_model.reward_kwargs={num_processes: 0}",
        "trainer.test_freq=1",
    )
    metrics = trainer.history[-1]
    lines = [message for message in caplog.messages if "Correct:" in message]
    share = "0.33" if right else "0.00"
    assert lines == [
        f"step 1: {source} Correct: {8 * right}/24, Accuracy: {share}",
        f"{source} Correct: {2 * right}/6, Accuracy: {share}",
    ]
    assert metrics[f"val/{source}/accuracy"] == pytest.approx(right / 3)
    assert metrics[f"val-aux/{source}/agent_failed/mean@1"] == pytest.approx(2 / 3)
    core = "acc" if source == "says_acc" else "reward"
    assert metrics[f"val-core/{source}/{core}/mean@1"] == pytest.approx(right / 3 if core == "acc" else (1 - right) / 3)
    assert trainer.kept.batch["answer_scores"].sum() == 8 * right
