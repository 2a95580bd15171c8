"""Dynamic sampling with answers whose scores are known: which groups stay, what comes back, when it gives up."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from verl.config import load_config
from verl.protocol import DataProto, object_array
from verl.trainer.common.training_health import NoSamplesError
from verl.trainer.ppo.dynamic_sampling import DynamicSampling, differing_trajectories
from verl.trainer.ppo.prompts import PromptStream
from verl.utils.dataset.rl_dataset import AbstractCurriculumSampler
from verl.workers.reward_manager.naive import FAILED_COLUMN

ALL_RIGHT, ALL_WRONG, MIXED = [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]


class Run:
    """Two answers to each prompt with scores that are written down; everything else is the real thing."""

    def __init__(self, scores: dict[str, list[float]], batches: list[list[str]], *overrides: str, loader=list) -> None:
        size = len(batches[0])
        self.config = load_config(
            None,
            [
                "data.train_files=x",
                "actor_rollout_ref.model.path=a/b",
                "algorithm=grpo",
                "algorithm.filter_groups.enable=True",
                f"data.gen_batch_size={size}",
                "data.train_batch_size=2",
                "actor_rollout_ref.rollout.n=2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=1",
                "critic.ppo_mini_batch_size=1",
                *overrides,
            ],
            check_files=False,
        )
        self.scores = scores
        rows = [{"input_ids": torch.arange(len(uids))[:, None], "uid": object_array(uids)} for uids in batches]
        self.prompts = PromptStream(loader(rows), total_epochs=1, batch_size=size)
        self.asked: list[list[str]] = []

    def roll_out(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
        uids = prompts.non_tensor_batch["uid"].tolist()
        self.asked.append(uids)
        rows = prompts.repeat(2, interleave=True)
        values = [score for uid in uids for score in self.scores[uid.partition("~")[0]]]
        rows.batch["response_mask"] = torch.tensor([[1, 1, 0]] * len(rows))
        rows.batch["token_level_scores"] = torch.tensor(values)[:, None] * torch.tensor([[0.0, 1.0, 0.0]])
        rows.non_tensor_batch["acc"] = object_array([value > 0.5 for value in values])
        metrics |= {"reward/acc/mean": float(np.mean(values)), "reward/errors": 3.0}
        return rows

    def fill(self, reward_fn: Any = None) -> tuple[DataProto, dict[str, float]]:
        metrics: dict[str, float] = {}
        sampling = DynamicSampling(self.config, pad_token_id=0)
        batch = sampling.fill(self.prompts.next_batch(), metrics, self.roll_out, self.prompts, reward_fn, step=7)
        return batch, metrics


def uids(batch: DataProto) -> list[str]:
    return batch.non_tensor_batch["uid"].tolist()


def test_groups_that_do_not_differ_are_replaced_by_the_next_prompts():
    scores = {"a": ALL_RIGHT, "b": MIXED, "c": ALL_WRONG, "d": MIXED}
    run = Run(scores, [["a", "b"], ["c", "d"]])
    batch, metrics = run.fill()
    assert run.asked == [["a", "b"], ["c", "d"]]
    assert uids(batch) == ["b", "b", "d", "d"]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert metrics == {
        "filter_groups/num_gen_batches": 2.0,
        "filter_groups/kept_share": 2 / 4,
        "filter_groups/dropped_groups": 2.0,
        "filter_groups/returned_prompts": 0.0,
        "filter_groups/missing_prompts": 0.0,
        # of all eight answers four are right; of the four dropped ones, two
        "filter_groups/score_mean": 0.5,
        "filter_groups/dropped_score_mean": 0.5,
        "reward/acc/mean": 0.5,
        "reward/errors": 3.0 + 3.0,
    }


def test_a_curriculum_learns_from_every_group_that_was_answered():
    """Those that are dropped say most about where a prompt stands."""

    class Learner(AbstractCurriculumSampler):
        def __init__(self, data_source, data_config):
            self.learned = []

        def update(self, batch):
            self.learned.append(dict(zip(uids(batch), batch.batch["token_level_scores"].sum(-1).tolist(), strict=True)))

    class Loader(list):
        sampler = Learner(None, None)

    scores = {"a": ALL_RIGHT, "b": MIXED, "c": ALL_WRONG, "d": MIXED}
    Run(scores, [["a", "b"], ["c", "d"]], loader=Loader).fill()
    assert Loader.sampler.learned == [{"a": 1.0, "b": 0.0}, {"c": 0.0, "d": 0.0}]


def test_groups_beyond_the_batch_wait_as_prompts_for_the_next_step():
    """Three of four differ and two are wanted: the third is asked again, first of all, by the next step."""
    scores = {"a": MIXED, "b": ALL_WRONG, "c": MIXED, "d": MIXED} | dict.fromkeys("efgh", MIXED)
    run = Run(scores, [list("abcd"), list("efgh")])
    batch, metrics = run.fill()
    assert uids(batch) == ["a", "a", "c", "c"]
    assert metrics["filter_groups/returned_prompts"] == 1.0
    batch, _ = run.fill()
    assert run.asked == [list("abcd"), list("defg")], "h waits behind"
    assert uids(batch) == ["d", "d", "e", "e"]


def test_one_batch_is_enough_where_all_groups_differ():
    run = Run({"a": MIXED, "b": MIXED}, [["a", "b"]])
    batch, metrics = run.fill()
    assert uids(batch) == ["a", "a", "b", "b"]
    assert metrics["filter_groups/num_gen_batches"] == 1.0
    assert "filter_groups/dropped_score_mean" not in metrics


def test_at_the_limit_the_step_goes_on_with_what_it_has(caplog):
    scores = dict.fromkeys("abcd", ALL_WRONG) | {"b": MIXED}
    run = Run(scores, [["a", "b"], ["c", "d"]], "algorithm.filter_groups.max_num_gen_batches=2")
    with caplog.at_level(logging.WARNING):
        batch, metrics = run.fill()
    assert uids(batch) == ["b", "b"]
    assert (metrics["filter_groups/missing_prompts"], metrics["filter_groups/num_gen_batches"]) == (1.0, 2.0)
    assert "step 7 trains on 1 groups instead of 2: of 4 prompts in 2 generation batches" in caplog.text


class OneByOne(PromptStream):
    """As a stream of answers that gives what is missing."""

    def take(self, count: int) -> DataProto:
        return super().take(1)


def test_limits_are_of_prompts_where_they_come_a_few_at_a_time():
    scores = dict.fromkeys("abcde", ALL_WRONG) | {"f": MIXED, "g": MIXED, "h": MIXED}
    run = Run(scores, [list("abcd"), list("efgh")], "algorithm.filter_groups.max_num_gen_batches=2")
    run.prompts.__class__ = OneByOne
    batch, metrics = run.fill()
    assert uids(batch) == ["f", "f", "g", "g"]
    assert metrics["filter_groups/num_gen_batches"] == 7.0


@pytest.mark.parametrize(("unscored", "ends"), [("abcdefg", False), ("abcdefghijkl", True)])
def test_an_outage_is_three_generation_batches_that_nobody_could_score(unscored: str, ends: bool):
    class Masking:
        on_error, last_failure = "mask", "no route to the judge"

    class Failing(Run):
        def roll_out(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
            rows = super().roll_out(prompts, metrics)
            rows.non_tensor_batch[FAILED_COLUMN] = object_array([uid in unscored for uid in uids(rows)])
            return rows

    scores = {uid: ALL_WRONG if uid in unscored else MIXED for uid in "abcdefghijkl"}
    run = Failing(scores, [list("abcd"), list("efgh"), list("ijkl")])
    run.prompts.__class__ = OneByOne
    if ends:
        with pytest.raises(NoSamplesError, match=r"\b3 generation batches"):
            run.fill(Masking())
    else:
        assert uids(run.fill(Masking())[0]) == ["h", "h", "i", "i"]


@pytest.mark.parametrize("limit", [-1, 0, 2])
def test_no_group_at_all_is_an_error_with_and_without_a_limit(limit):
    """Without a limit one whole epoch in vain is enough: the same prompts would fail again for ever."""
    limits = f"algorithm.filter_groups.max_num_gen_batches={limit}"
    run = Run(dict.fromkeys("abcd", ALL_RIGHT), [["a", "b"], ["c", "d"]], limits)
    with pytest.raises(ValueError, match=r"(?s)filter_groups.*step 7"):
        run.fill()


def test_a_prompt_that_comes_twice_in_one_step_is_two_groups():
    """A new epoch began inside the step: answers of the first round and of the second are not compared."""
    run = Run({"a": MIXED, "b": ALL_WRONG}, [["a", "b"]], "algorithm.filter_groups.max_num_gen_batches=0")
    batch, _ = run.fill()
    assert run.asked == [["a", "b"], ["a~2", "b~2"]]
    assert uids(batch) == ["a", "a", "a~2", "a~2"]
    assert not run.prompts.queued


def test_prompts_come_back_under_their_own_name():
    run = Run({"a": MIXED, "b": MIXED, "c": ALL_WRONG}, [["a", "b", "c"]], "data.train_batch_size=3")
    run.fill()
    assert run.asked == [["a", "b", "c"], ["a~2", "b~2", "c~2"]]
    assert uids(run.prompts.take(1)) == ["b"], "and not as b~2"


def scored(values: list[float], mask: list[int], **columns) -> DataProto:
    batch = DataProto.from_dict(
        {
            "response_mask": torch.tensor(mask)[:, None],
            "token_level_scores": torch.tensor(values)[:, None],
        }
    )
    batch.non_tensor_batch |= {name: object_array(column) for name, column in columns.items()}
    return batch


def test_answers_that_could_not_be_scored_say_nothing_about_their_group():
    """Masked, their 0 beside a 1 is no difference; a group of only such answers is dropped."""
    groups = np.array(["a", "a", "a", "b", "b"])
    batch = scored([1.0, 1.0, 0.0, 0.0, 0.0], mask=[1, 1, 0, 0, 0])
    assert differing_trajectories(batch, groups, "score").tolist() == [False] * 5
    batch = scored([1.0, 0.0, 0.0, 0.0, 0.0], mask=[1, 1, 0, 0, 0])
    assert differing_trajectories(batch, groups, "score").tolist() == [True, True, False, False, False]


def test_the_metric_may_be_what_the_reward_returned():
    """Scores differ (length), accuracy does not; rounding is no difference; a missing value counts 0."""
    groups = np.array(["a", "a", "b", "b"])
    batch = scored([1.0, 0.9, 0.3, 0.3 + 1e-8], [1, 1, 1, 1], acc=[True, True, None, 1], note=["x"] * 4)
    assert differing_trajectories(batch, groups, "score").tolist() == [True, True, False, False]
    assert differing_trajectories(batch, groups, "acc").tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match=r"filter_groups\.metric: .*'accc' \(.*\bscore\b"):
        differing_trajectories(batch, groups, "accc")
    with pytest.raises(ValueError, match=r"filter_groups\.metric: .*'note'"):
        differing_trajectories(batch, groups, "note")
