"""RewardOverlap: finished responses reach the reward manager while the generation runs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.generator import RewardOverlap
from verl.trainer.ppo.rollout_jobs import FinishedTrajectory


class Manager:
    """Stores the responses it receives. Like the real one, it does not lock."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.submitted = 0

    def score_ahead(self, columns):
        self.columns = columns
        return self

    def add(self, finished) -> None:
        self.received += finished
        before = self.submitted
        threading.Event().wait(0.001)  # another thread runs
        self.submitted = before + len(finished)


def prompts(rows: int = 4) -> DataProto:
    names = {"uid": object_array(list("abcde")[:rows]), "sample_index": object_array([0] * rows)}
    return DataProto.from_dict({"input_ids": torch.zeros(rows, 2)}, names)


def finished(uid: str, status: Any = "finished", score: float | None = None) -> FinishedTrajectory:
    part: Any = None
    return FinishedTrajectory(f"{uid}/0", uid, 0, status, score, (0,), np.array([5, 6]), part, 0, 1)


def test_responses_are_scored_before_the_generation_ends():
    overlap, manager, batch = RewardOverlap(True), Manager(), prompts()
    with overlap(manager, batch) as on_finished:
        on_finished([finished("b")])
        assert [(row, tokens.tolist()) for row, tokens in manager.received] == [(1, [5, 6])]
        assert batch.non_tensor_batch["row"].tolist() == [0, 1, 2, 3], "the scores are found again by it"
    assert overlap.share == 0.25


def test_failed_trajectories_and_those_with_a_score_are_not_scored():
    overlap, manager = RewardOverlap(True), Manager()
    with overlap(manager, prompts(5)) as on_finished:
        on_finished([finished("a", "failed"), finished("b", "aborted"), finished("c", score=1.0), finished("d")])
    assert [row for row, _ in manager.received] == [3]
    assert overlap.share == 0.2


def test_the_last_responses_are_scored_after_the_generation():
    """There is no generation left to overlap with, and decoding them first would delay the batch."""
    overlap, manager = RewardOverlap(True), Manager()
    with overlap(manager, prompts()) as on_finished:
        on_finished([finished("a")])
        on_finished([finished(uid) for uid in "bcd"])
    assert [row for row, _ in manager.received] == [0]
    assert overlap.share == 0.25


def test_hosts_that_report_concurrently_are_all_counted():
    overlap, manager = RewardOverlap(True), Manager()
    with overlap(manager, prompts(5)) as on_finished:
        threads = [threading.Thread(target=on_finished, args=([finished(uid)],)) for uid in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(row for row, _ in manager.received) == [0, 1, 2, 3]
    assert overlap.share == 0.8


def test_an_error_of_the_reward_manager_ends_the_overlap_and_not_the_generation(caplog):
    class Broken(Manager):
        def add(self, finished) -> None:
            raise RuntimeError("the pool is closed")

    overlap = RewardOverlap(True)
    with overlap(Broken(), prompts()) as on_finished:
        on_finished([finished("a")])
    assert overlap.share == 0.0
    assert "the pool is closed" in caplog.text


def test_without_a_manager_that_scores_single_responses_nothing_changes():
    for enabled, manager in ((False, Manager()), (True, lambda data, return_dict=False: None)):
        overlap, batch = RewardOverlap(enabled), prompts()
        with overlap(manager, batch) as on_finished:
            on_finished([finished("a")])
        assert overlap.share is None
        assert "row" not in batch.non_tensor_batch
        assert not getattr(manager, "received", None)
