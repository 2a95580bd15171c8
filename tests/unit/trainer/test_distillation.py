"""On-policy distillation: teachers by data source, in the loss or in the reward, with task rewards or alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import save_tiny_model
from tests.support.training_harness import make_task, make_trainer, overrides, run_training
from verl import recording
from verl.config import ConfigError, load_config
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.teachers import check_teachers, join_columns, rows_of_teachers
from verl.utils import hf_tokenizer

TEACHERS = "distillation.teacher_models"
LOSS = "distillation.distillation_loss"
ALONE = f"{LOSS}.use_task_rewards=False"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A student, two teachers of other shapes, and rows of two data sources."""
    folder = tmp_path_factory.mktemp("distillation")
    found = make_task(folder)
    for name, seed in (("large", 7), ("other", 8)):
        found[name] = str(
            save_tiny_model(folder / name, seed=seed, hidden_size=96, num_hidden_layers=3, initializer_range=0.1)
        )
    rows = pq.read_table(found["train"]).to_pylist()
    for number, row in enumerate(rows):
        row["data_source"] = ("toy", "game")[number % 2]
        del row["reward_model"]  # nothing to compare an answer with
    pq.write_table(pa.Table.from_pylist(rows), found["train"])
    return found


def arguments(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    return [
        *overrides(task, folder, "data.val_files=[]", f"{LOSS}.loss_mode=k3+", "algorithm=grpo"),
        *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.temperature=0.8", "distillation.enabled=True"),
        f"{TEACHERS}.large.model_path={task['large']}",
        *more,
    ]


def both(task: dict[str, str]) -> tuple[str, ...]:
    return (f"{TEACHERS}.other.model_path={task['other']}", f"{TEACHERS}.other.key=game")


def batch_of(trainer) -> DataProto:
    """A step's batch as it is before the update."""
    kept = []
    trainer._update = lambda method, batch, role: kept.append(batch) or {}
    trainer._update_check.record_update = lambda *_: False
    trainer.init_workers()
    trainer.fit()
    return kept[0]


def log_probs(folder: str, batch: DataProto, temperature: float) -> torch.Tensor:
    """Of the responses under a model as transformers runs it, 0 at padding."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = torch.zeros(batch.batch["responses"].shape)
    for row in range(len(batch)):
        mask = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][mask]
        length = int(batch.batch["attention_mask"][row, -found.shape[1] :].sum())
        with torch.no_grad():
            said = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)
        at = torch.arange(len(ids) - length, len(ids))
        found[row, :length] = said[at - 1, ids[at]]
    return found


@pytest.mark.parametrize("sharing", [False, True])
def test_each_row_gets_the_log_probs_of_its_own_teacher(task, tmp_path, sharing):
    run = ("trainer.total_training_steps=1", f"distillation.teacher.use_prefix_grouper={sharing}")
    trainer = make_trainer(arguments(task, tmp_path, ALONE, *both(task), *run))
    batch = batch_of(trainer)
    expected = {name: log_probs(task[name], batch, 0.8) for name in ("large", "other")}
    is_game = torch.tensor([source == "game" for source in batch.non_tensor_batch["data_source"]])
    assert 0 < is_game.sum() < len(batch)
    whole = torch.where(is_game[:, None], expected["other"], expected["large"])
    torch.testing.assert_close(batch.batch["teacher_log_prob"], whole, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected["other"], expected["large"], atol=0.1)


@pytest.mark.slow
def test_alone_there_is_neither_reward_function_nor_critic_and_the_student_comes_nearer(task, tmp_path):
    given = [each for each in arguments(task, tmp_path, ALONE) if not each.startswith("custom_reward_function")]
    assert load_config(None, [*given, "actor_rollout_ref.rollout.n=null"]).actor_rollout_ref.rollout.n == 1
    trainer = run_training(
        [
            *given,
            *("algorithm=ppo", "actor_rollout_ref.rollout.n=1", "trainer.total_training_steps=4"),
            *("actor_rollout_ref.actor.ppo_mini_batch_size=32", "data.train_batch_size=32"),
            *("actor_rollout_ref.actor.optim.lr=5e-3", f"{LOSS}.loss_mode=reverse_kl_topk", f"{LOSS}.topk=16"),
        ]
    )
    apart = [step["actor/distillation_loss"] for step in trainer.history]
    assert apart[-1] < 0.8 * apart[0], apart
    assert {"actor/teacher_kl", "actor/loss"} <= set(trainer.history[0])
    assert not trainer.use_critic
    assert not any("policy_loss" in name for name in trainer.history[0])
    assert {step["critic/score/mean"] for step in trainer.history} == {0.0}
    run = recording.read(tmp_path / "checkpoints")
    rows = run.trajectories.table(["teacher_log_probs", "mask"], step=1).to_pylist()
    assert all(len(row["teacher_log_probs"]) == len(row["mask"]) for row in rows)
    assert all(min(row["teacher_log_probs"]) < 0 for row in rows)


def test_as_reward_each_token_pays_for_its_own_distance(task, tmp_path):
    more = (ALONE, f"{LOSS}.as_reward=True", f"{LOSS}.loss_mode=k1", f"{LOSS}.distillation_loss_coef=0.5")
    batch = batch_of(make_trainer(arguments(task, tmp_path, *more, "trainer.total_training_steps=1"))).batch
    apart = batch["old_log_probs"] - batch["teacher_log_prob"]
    expected = torch.where(batch["response_mask"].bool(), -0.5 * apart, 0.0)
    torch.testing.assert_close(batch["token_level_rewards"], expected)
    assert batch["advantages"].abs().max() > 0.1


def test_rows_go_to_the_teacher_of_their_source_else_to_the_one_for_all_others():
    batch = DataProto.from_dict({"x": torch.zeros(4)}, {"data_source": object_array(["a", "b", "c", "a"])})
    found = rows_of_teachers(batch, "data_source", {"a": "first", None: "rest"})
    assert {name: rows.tolist() for name, rows in found.items()} == {"first": [0, 3], "rest": [1, 2]}
    with pytest.raises(ValueError, match=r"^distillation\.teacher_models: .*data_source = 'b'"):
        rows_of_teachers(batch, "data_source", {"a": "first"})


def test_what_servers_and_ranks_say_is_joined_in_the_order_of_the_rows():
    parts = [
        DataProto.from_dict({"x": torch.full((rows, width), value)})
        for rows, width, value in ((2, 3, 1.0), (1, 2, 2.0))
    ]
    whole = join_columns(parts, [np.array([0, 2]), np.array([1])], width=4).batch["x"]
    assert whole.tolist() == [[1, 1, 1, 0], [2, 2, 0, 0], [1, 1, 1, 0]]


def test_data_without_a_teacher_is_refused_before_training(task, tmp_path):
    trainer = make_trainer(arguments(task, tmp_path, f"{TEACHERS}.large.key=toy"))
    with pytest.raises(ValueError, match=r"train\.parquet.* row 1.*data_source = 'game'"):
        check_teachers(trainer.config, {}, trainer.tokenizer, trainer.train_dataloader.dataset)


def test_another_vocabulary_is_refused_with_both_names(task, tmp_path):
    other = save_tiny_model(tmp_path / "foreign")
    foreign = hf_tokenizer(str(other))
    foreign.add_tokens(["<|extra|>"])
    foreign.save_pretrained(other)
    config = load_config(None, arguments(task, tmp_path, f"{TEACHERS}.large.model_path={other}"))
    with pytest.raises(ValueError, match=rf"{TEACHERS}\.large\.model_path: {other}.*{task['model']}.*<\|extra\|>"):
        check_teachers(config, {}, hf_tokenizer(task["model"]), None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((f"{TEACHERS}.b.model_path=x/y",), "teacher_models.b.key = null: large and b "),
        ((f"{TEACHERS}.b.key=toy",), f"{TEACHERS}.b.model_path"),
        ((f"{TEACHERS}.large.num_replicas=3",), r"large\.num_replicas = 3: .*\b1 ranks of global_pool"),
        ((f"{TEACHERS}.large.url=http://big:8001",), r"temperature = 0\.8: .*large\.url: .*temperature 1\b"),
        ((ALONE, "algorithm.filter_groups.enable=True"), r"filter_groups\.enable = True: .*use_task_rewards = False"),
        ((f"{LOSS}.loss_mode=k9",), r"loss_mode = k9: .*low_var_kl"),
        ((f"{TEACHERS}.large.modelpath=x",), rf"large\.modelpath = x: .*{TEACHERS}\.large\.model_path"),
        (("distillation.teacher_models=large",), r"teacher_models = large: .*teacher_models\.<name>\.<key>"),
    ],
)
def test_what_cannot_work_is_said_with_its_key(task, tmp_path, more, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, arguments(task, tmp_path, *more))
