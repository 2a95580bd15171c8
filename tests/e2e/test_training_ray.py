"""Runs on Ray: two ranks equal one rank, roles in separate pools, a reward model."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from tests.support.tiny import tiny_tokenizer
from tests.support.training_harness import STEADY, make_task, overrides, run_training
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.common.run_status import StatusSnapshot
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

SAME = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "kl/mean", "actor/entropy")

JUDGES_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def ppo(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    return overrides(task, folder, *STEADY, "actor_rollout_ref.actor.use_kl_loss=True", "data.val_files=[]", *more)


def assert_same_run(one: list[dict], other: list[dict]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        for name in SAME:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), (mine["step"], name)


class StatusRecordingTrainer(RayPPOTrainer):
    """Records its status every 10 ms during training."""

    statuses: list[StatusSnapshot]

    def fit(self) -> None:
        self.statuses, over = [], threading.Event()

        def record() -> None:
            while not over.wait(0.01):
                if hasattr(self, "status"):
                    self.statuses.append(self.status.snapshot())

        watcher = threading.Thread(target=record)
        watcher.start()
        try:
            super().fit()
        finally:
            over.set()
            watcher.join()


class SyncRecordingTrainer(RayPPOTrainer):
    """Records the versions of weights that are sent to other processes."""

    sent: list[int]

    def init_workers(self) -> None:
        super().init_workers()
        self.sent, send = [], self.actor_wg.send_weights

        def record_and_send(version: int):
            self.sent.append(version)
            return send(version)

        self.actor_wg.send_weights = record_and_send


def test_two_ranks_give_the_results_of_one(task, tmp_path, ray_cluster):
    """Samples, losses and gradients do not depend on the number of ranks; colocated actor, critic and reference."""
    alone = run_training(ppo(task, tmp_path / "one"))
    together = run_training(
        ppo(task, tmp_path / "two", "trainer.n_gpus_per_node=2"), RayWorkerGroup, StatusRecordingTrainer
    )
    assert_same_run(alone.history, together.history)
    # Each rank has 4 of the 8 samples, and may be recorded before the other has begun.
    counted = [now for now in together.statuses if now.units]
    assert {now.units for now in counted} <= {4, 8}
    assert all(0 <= now.done <= now.units for now in counted)
    phases = {"rollout", "reward", "old_log_prob", "ref", "compute_values", "train_critic", "train_actor"}
    assert {now.phase for now in counted} <= phases
    for phase in ("train_critic", "train_actor"):
        assert any(now.phase == phase and now.units == 8 and now.done for now in counted), phase


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_a_rollout_over_two_ranks_gives_the_results_of_one(task, tmp_path, ray_cluster, placement):
    """Two ranks train and generate as one engine; or one trains, and its weights go to the two that share an engine."""
    layout = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
    if placement == "split":
        layout += [
            "resource_pool_spec={train: [1], generate: [2]}",
            "role_mapping={actor: train, ref: train, critic: train, rollout: generate}",
        ]
    alone = run_training(ppo(task, tmp_path / "one"))
    together = run_training(ppo(task, tmp_path / "two", *layout), RayWorkerGroup)
    assert_same_run(alone.history, together.history)
    assert all(row["rollout_corr/log_prob_diff_max"] < 1e-4 for row in together.history)


@pytest.mark.slow
def test_rollout_actor_and_critic_in_pools_of_their_own(task, tmp_path, ray_cluster):
    """Weights cross processes; the results are those of one process."""
    pools = (
        "resource_pool_spec={train: [1], generate: [1], judge: [1]}",
        "role_mapping={actor: train, ref: train, rollout: generate, critic: judge}",
    )
    alone = run_training(ppo(task, tmp_path / "one"))
    validated = (f"data.val_files={task['val']}", "trainer.test_freq=1")
    split = run_training(ppo(task, tmp_path / "split", *pools, *validated), RayWorkerGroup, SyncRecordingTrainer)
    assert_same_run(alone.history, split.history)
    assert split.sent == [0, 1, 2], "validation has them already"
    assert all(row["rollout_corr/log_prob_diff_max"] < 1e-4 for row in split.history), "the engine has the new weights"


@pytest.mark.slow
def test_a_reward_model_with_another_template_scores_the_answers(task, tmp_path, ray_cluster):
    """On two ranks each row's messages and answer are written in the judge's own way, in training and validation."""
    judge = save_classifier(tmp_path / "judge")
    reward = ("reward_model.enable=True", f"reward_model.path={judge}", "data.system_prompt=Be brief.")
    alone = ("custom_reward_function.path=null", "algorithm.adv_estimator=grpo")
    more = ("trainer.total_training_steps=1", "data.max_prompt_length=64", "trainer.n_gpus_per_node=2")
    dumps = [f"trainer.{name}_data_dir={tmp_path / name}" for name in ("rollout", "validation")]
    trainer = run_training(overrides(task, tmp_path, *reward, *more, *alone, *dumps), RayWorkerGroup)
    batch = trainer.last_batch
    scores, mask = batch.batch["rm_scores"], batch.batch["response_mask"]
    assert torch.equal((scores != 0).sum(-1), torch.ones(len(scores), dtype=torch.long)), "one score per answer"
    last = mask.cumsum(-1).argmax(-1)
    assert (scores[torch.arange(len(scores)), last] != 0).all(), "on its last token"
    assert torch.equal(batch.batch["token_level_scores"], scores)
    assert expected_scores(judge, trainer) == pytest.approx(scores.sum(-1).tolist(), abs=1e-4)
    for name in ("rollout", "validation"):
        rows = [json.loads(line) for line in (tmp_path / name / "1.jsonl").read_text().splitlines()]
        assert all(row["gts"].isdigit() for row in rows), "with every kind of scorer"


def save_classifier(folder: Path) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=1,
        pad_token_id=0,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = JUDGES_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def expected_scores(folder: Path, trainer) -> list[float]:
    """The same texts through transformers alone, one by one."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = trainer.last_batch
    answers = trainer.tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True)
    scores = []
    for messages, answer in zip(batch.non_tensor_batch["raw_prompt"], answers, strict=True):
        assert [message["role"] for message in messages] == ["system", "user"]
        ids = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": answer}], return_dict=False)
        with torch.no_grad():
            scores.append(float(model(input_ids=torch.tensor([ids])).logits))
    return scores
