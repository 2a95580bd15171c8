"""Validation: every batch counts however its rewards differ; answers reach console, file, TensorBoard and wandb."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from tests.support.training_harness import close, make_task, make_trainer, overrides
from verl.config import load_config
from verl.trainer.common.dumps import ResponseText
from verl.trainer.ppo.validator import Validator, join_samples, known_scores, sample_metrics


def part(uids: list[str], source: str, scores: list[float], **extra) -> dict[str, list]:
    texts = [f"text of {uid}" for uid in uids]
    return {
        "response_text": [ResponseText(text, text) for text in texts],
        "gts": [None] * len(uids),
        "uid": uids,
        "data_source": [source] * len(uids),
        "reward": scores,
        **extra,
    }


def accuracies(samples: dict[str, list], scores_are_continuous: bool) -> dict[str, float]:
    return {
        name: value for name, value in sample_metrics(samples, scores_are_continuous).items() if name.startswith("val/")
    }


def test_rewards_that_say_different_things_are_joined_with_gaps():
    """Two batches of two data sources: one reward returns acc and pred, the other a number alone."""
    samples = join_samples([part(["a"], "math", [0.7], acc=[True], pred=["4"]), part(["b", "c"], "chat", [0.2, 0.4])])
    assert samples["acc"] == [True, None, None]
    assert samples["uid"] == ["a", "b", "c"]
    metrics = sample_metrics(samples, scores_are_continuous=False)
    assert metrics["val-core/math/acc/mean@1"] == 1.0
    assert metrics["val-aux/math/reward/mean@1"] == 0.7, "where there is an accuracy, it is what to look at"
    assert metrics["val-core/chat/reward/mean@1"] == pytest.approx(0.3)
    assert "val-core/chat/acc/mean@1" not in metrics
    assert metrics["val-aux/chat/reward/mean@1/high"] == pytest.approx(0.4)


def test_an_answer_is_right_when_the_reward_says_so_else_with_a_score_of_1():
    """Punished for its length a right answer scores 0.7 and is still right."""
    samples = join_samples(
        [part(["a", "b"], "math", [0.7, -1.0], acc=[1.0, 0.0]), part(["c", "d"], "chat", [1.0, 0.9])]
    )
    assert accuracies(samples, scores_are_continuous=False) == {"val/math/accuracy": 0.5, "val/chat/accuracy": 0.5}


def test_the_score_of_a_reward_model_is_neither_right_nor_wrong():
    samples = join_samples([part(["a", "b"], "chat", [1.7, -3.0]), part(["c"], "math", [0.2], acc=[1.0])])
    assert accuracies(samples, scores_are_continuous=True) == {"val/math/accuracy": 1.0}


def test_a_sample_that_could_not_be_scored_is_neither_right_nor_wrong():
    failed, given = [0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]
    assert known_scores(given, failed, SimpleNamespace(on_error="zero")) == given, "told to count it as 0"
    scores = known_scores(given, failed, SimpleNamespace(on_error="mask"))
    samples = join_samples([part(["a", "a", "b", "b"], "math", scores)])
    metrics = sample_metrics(samples, scores_are_continuous=False)
    assert metrics["val/math/accuracy"] == 2 / 3
    assert metrics["val-core/math/reward/mean@2"] == 0.75
    assert metrics["val-core/math/reward/pass@1"] == 0.75


def test_scoring_errors_are_counted_by_kind_over_all_batches():
    """The second batch has no column of errors: it was scored by agents."""
    failed = part(["a", "b", "c"], "math", [0.0, 0.0, 1.0], scoring_error=["timeout", "raised", None])
    metrics = sample_metrics(join_samples([failed, part(["d"], "math", [1.0])]), scores_are_continuous=False)
    errors = {name: value for name, value in metrics.items() if name.startswith("val/reward/")}
    others = {f"val/reward/errors/{kind}": 0.0 for kind in ("invalid", "memory", "died")}
    assert errors == {
        "val/reward/errors": 2.0,
        "val/reward/errors/timeout": 1.0,
        "val/reward/errors/raised": 1.0,
        **others,
    }


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def test_sampled_answers_reach_every_tracker(task, tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    run = (
        "trainer.val_only=True",
        "trainer.log_val_generations=3",
        "trainer.console_val_generations=2",
        "trainer.logger=[console,file,tensorboard]",
        "trainer.project_name=p",
        "trainer.experiment_name=e",
        "reward_model.reward_kwargs={num_processes: 0}",
        "actor_rollout_ref.rollout.val_kwargs={n: 2, do_sample: true, temperature: 1.0}",
    )
    trainer = make_trainer(overrides(task, tmp_path, *run))
    trainer.init_workers()
    trainer.fit()
    close(trainer)
    rows = [json.loads(line) for line in (tmp_path / "runs/p/e/generations.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert rows[0].keys() >= {"step", "input", "output", "score"}
    shown = [line for line in capsys.readouterr().out.splitlines() if "validation sample" in line]
    assert len(shown) == 2
    events = EventAccumulator(str(tmp_path / "runs/p/e"))
    events.Reload()
    assert {f"val/generations/{number}/text_summary" for number in range(3)} <= set(events.Tags()["tensors"])
    (metrics,) = trainer.history
    assert metrics["val-aux/toy/reward/mean@2/low"] <= metrics["val-core/toy/reward/mean@2"]
    assert {"val-core/toy/reward/pass@2", "val-core/toy/reward/best@2/mean"} <= metrics.keys()
    assert metrics["val/reward/errors/timeout"] == 0.0


WANDB = '''
"""Stands in for a hosted tracker, which needs an account: notes what it is given."""
logged = []

class Table:
    def __init__(self, columns, data):
        self.columns, self.data = columns, data

def init(**about):
    logged.append(about)

def log(data, step):
    logged.append((step, data))

def finish():
    logged.append("finished")
'''


def test_sampled_answers_are_a_table_in_wandb(tmp_path, monkeypatch):
    from verl.utils.tracking import Tracking

    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")

    shown = ("trainer.log_val_generations=2", "trainer.console_val_generations=2")
    config = load_config(None, ["data.train_files=x", "actor_rollout_ref.model.path=a/b", *shown], check_files=False)
    validator = Validator(config, None, None, add_rm_scores=None)
    with Tracking("p", "e", "wandb") as tracking:
        validator.show(join_samples([part(["a", "b", "c"], "math", [0.0, 1.0, 0.5])]), 5, tracking)
    import wandb

    started, (step, data), end = wandb.logged
    assert (started["project"], started["name"], step, end) == ("p", "e", 5, "finished")
    table = data["val/generations"]
    assert table.columns == ["input", "output", "score"]
    assert len(table.data) == 2
    assert table.data[0][0].startswith("text of ")
    sys.modules.pop("wandb")
