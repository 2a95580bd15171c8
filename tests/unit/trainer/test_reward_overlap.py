"""Finished answers reach the reward manager while the generation runs; whoever cannot take them is left alone."""

from __future__ import annotations

import threading

import numpy as np
import torch

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.generator import RewardOverlap


class Group:
    """Two ranks, one of which has an answer by the time it is asked."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.told = [[(1, np.array([5, 6]))], None]

    def finished_samples(self):
        """What `ask` asks the ranks for."""

    def ask(self, method, within):
        assert method == "finished_samples"
        told, self.told = self.told, [[], []]
        self.asked.set()
        return told


class Manager:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given, self.submitted, self.arrived = [], 0, threading.Event()

    def score_ahead(self, columns):
        self.columns = columns
        return self

    def add(self, finished) -> None:
        self.given += finished
        self.submitted += len(finished)
        self.arrived.set()


def request(rows: int = 4) -> DataProto:
    return DataProto.from_dict({"input_ids": torch.zeros(rows, 2)}, {"uid": object_array(list("abcd")[:rows])})


def test_answers_arrive_while_the_generation_runs():
    overlap, manager, group, sent = RewardOverlap(True), Manager(), Group(), request()
    batch = request()
    with overlap(manager, group, sent, batch):
        assert manager.arrived.wait(30), "before the generation is over"
        assert sent.meta_info["tell_finished"]
        assert sent.non_tensor_batch["row"].tolist() == [0, 1, 2, 3]
        assert batch.non_tensor_batch["row"].tolist() == [0, 1, 2, 3], "its answers are found again by this"
    assert [(row, tokens.tolist()) for row, tokens in manager.given] == [(1, [5, 6])]
    assert overlap.share == 0.25


def test_a_rank_that_cannot_tell_costs_the_overlap_and_not_the_generation():
    class Broken(Group):
        def ask(self, method, within):
            self.asked.set()
            raise RuntimeError("gone")

    overlap, manager, group = RewardOverlap(True), Manager(), Broken()
    with overlap(manager, group, request(), request()):
        assert group.asked.wait(30)
    assert overlap.share == 0.0


def test_nothing_is_asked_where_nobody_would_listen():
    class NotWatched:
        """A worker of the user's own."""

    sent = request()
    for enabled, manager, group in (
        (False, Manager(), Group()),
        (True, lambda data, return_dict=False: None, Group()),
        (True, Manager(), NotWatched()),
    ):
        overlap = RewardOverlap(enabled)
        with overlap(manager, group, sent, request()):
            assert "tell_finished" not in sent.meta_info
        assert overlap.share is None
