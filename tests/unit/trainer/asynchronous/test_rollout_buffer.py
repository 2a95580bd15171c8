"""The buffer's promises: no group lost, none twice, none older than allowed, never more of them than can be used."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.asynchronous.rollout_buffer import PromptGroup, RolloutBuffer


def send(buffer: RolloutBuffer, serial: int, version: int = 0, uid: str | None = None) -> PromptGroup:
    group = PromptGroup(serial, uid or f"p{serial}", response_count=2, sent_at=version)
    buffer.add(group)
    return group


def serials(groups: Iterable[PromptGroup] | None) -> list[int] | None:
    return None if groups is None else [group.serial for group in groups]


def test_without_staleness_a_batch_goes_out_and_comes_back_in_order_before_the_next():
    buffer = RolloutBuffer(2, 0, in_order=True)
    assert buffer.capacity(0) == 2
    first, second = send(buffer, 0), send(buffer, 1)
    assert buffer.capacity(0) == 0
    buffer.mark_finished(second, 0)
    assert buffer.take(0) is None, "the first is still out"
    buffer.mark_finished(first, 0)
    assert serials(buffer.take(0)) == [0, 1]
    assert buffer.capacity(0) == 0, "it is being trained"
    assert buffer.capacity(1) == 2


def test_one_batch_ahead_is_generated_while_one_is_trained():
    buffer = RolloutBuffer(2, 1, in_order=True)
    groups = [send(buffer, serial) for serial in range(buffer.capacity(0))]
    assert len(groups) == 4
    for group in groups:
        buffer.mark_finished(group, 0)
    assert serials(buffer.take(0)) == [0, 1]
    assert buffer.capacity(0) == 0, "with these weights no more: it would be two batches old when its turn comes"
    assert buffer.capacity(1) == 2
    assert serials(buffer.take(1)) == [2, 3]
    assert buffer.metrics(1)["async/staleness/share_1"] == 1.0


def test_batches_go_on_while_a_long_group_is_out_and_wait_for_it_at_the_end():
    buffer = RolloutBuffer(1, 3, "wait")
    long, serial = send(buffer, 0), 0
    for version in range(3):
        while buffer.capacity(version):
            serial += 1
            buffer.mark_finished(send(buffer, serial, version), version)
        assert serials(buffer.take(version)) == [version + 1]
    assert buffer.take(3) is None, "one more batch, and it would be too old"
    buffer.mark_finished(long, 0, partial=1)
    assert serials(buffer.take(3)) == [0]
    metrics = buffer.metrics(3)
    assert metrics["async/staleness/max"] == 3
    assert metrics["fully_async/partial/partial_ratio"] == metrics["async/partial_share"] == 0.5
    assert metrics["fully_async/count/stale_samples_processed"] == 6, "of the two groups before it, and its own"


def test_two_long_groups_do_not_wait_for_the_same_last_batch():
    buffer = RolloutBuffer(1, 2, "wait")
    long, short, other = (send(buffer, serial) for serial in range(3))
    buffer.mark_finished(short, 0)
    assert serials(buffer.take(0)) == [1]
    buffer.mark_finished(send(buffer, 3, 1), 1)
    assert buffer.take(1) is None, "both must be trained at 1 and 2; the new one has time until 3"
    buffer.mark_finished(other, 0)
    assert serials(buffer.take(1)) == [2]
    assert buffer.take(2) is None
    buffer.mark_finished(long, 0)
    assert serials(buffer.take(2)) == [0]


def test_a_dropped_prompt_is_waited_for_when_it_is_sent_again():
    buffer = RolloutBuffer(1, 1, "drop")
    send(buffer, 0, uid="long")
    for version in range(2):
        buffer.mark_finished(send(buffer, version + 1, version), version)
        assert serials(buffer.take(version)) == [version + 1]
    assert serials(buffer.drop_stale(2)) == [0]
    assert buffer.metrics(2)["async/dropped/in_flight"] == 1
    assert buffer.metrics(2)["async/dropped/in_flight"] == 0, "counted once"
    again = send(buffer, 3, 2, uid="long")
    buffer.mark_finished(send(buffer, 4, 2), 2)
    assert serials(buffer.take(2)) == [4]
    buffer.mark_finished(send(buffer, 5, 3), 3)
    assert buffer.take(3) is None
    buffer.mark_finished(again, 2)
    assert serials(buffer.take(3)) == [3]


def test_rejected_groups_are_used_up_and_others_take_their_place_in_the_batch():
    buffer = RolloutBuffer(2, 0, in_order=True, batches=1)
    for serial in range(2):
        buffer.mark_finished(send(buffer, serial), 0)
    batch = buffer.take(0)
    assert batch is not None
    buffer.reject(batch[:1])
    assert buffer.capacity(0) == 1
    buffer.mark_finished(send(buffer, 2), 0)
    assert serials(buffer.take(0)) == [2]
    assert buffer.metrics(0)["async/rejected"] == 1
    assert buffer.capacity(1) == 0, "the run is over"


def test_the_largest_trained_staleness_is_without_rejected_groups():
    buffer = RolloutBuffer(1, 1, in_order=True, batches=4)
    for serial in range(3):
        buffer.mark_finished(send(buffer, serial), 0)
    buffer.take(0)
    buffer.metrics(0)
    buffer.reject(buffer.take(1) or [])
    buffer.mark_finished(send(buffer, 3, 1), 1)
    buffer.reject(buffer.take(1) or [])
    buffer.take(1)
    buffer.metrics(1)
    assert buffer.max_trained_staleness == 0


def test_over_sampling_keeps_its_surplus_while_it_is_young_enough():
    buffer = RolloutBuffer(2, 1, "wait", surplus=2)
    assert buffer.capacity(0) == 6
    for serial in range(6):
        buffer.mark_finished(send(buffer, serial), 0)
    assert [serials(buffer.take(version)) for version in range(2)] == [[0, 1], [2, 3]]
    assert serials(buffer.drop_stale(2)) == [4, 5]
    assert buffer.metrics(2)["async/dropped/surplus"] == 2


def test_groups_are_numbered_as_they_are_sent():
    buffer = RolloutBuffer(1, 1)
    send(buffer, 3)
    with pytest.raises(ValueError, match=r"^group 3: .*\b3\."):
        send(buffer, 3)


def test_tokens_are_not_older_than_the_request_that_asked_for_them():
    """A skipped update leaves the weights, and with them the tokens' version, as they were."""
    buffer = RolloutBuffer(1, 0, "wait")
    buffer.mark_finished(send(buffer, 0, version=4), oldest=3)
    assert serials(buffer.take(4)) == [0]


@dataclass
class Run:
    """A run's loop on numbers: prompts epoch after epoch, answers that take as long as they like."""

    buffer: RolloutBuffer
    chance: random.Random
    prompts: int
    reject_share: float
    serial: int = -1
    stream: deque[tuple[int, int]] = field(default_factory=deque)
    epochs: int = 0
    left: dict[int, int] = field(default_factory=dict)
    trained: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    most: int = 0

    def next_prompt(self) -> str:
        if not self.stream:
            self.stream.extend((self.epochs, number) for number in range(self.prompts))
            self.epochs += 1
        return "{}/{}".format(*self.stream.popleft())

    def step(self, version: int) -> list[PromptGroup]:
        for group in reversed(self.buffer.drop_stale(version)):
            self.dropped[group.uid] += 1
            self.left.pop(group.serial, None)
            epoch, number = map(int, group.uid.split("/"))
            self.stream.appendleft((epoch, number))
        batch: list[PromptGroup] = []
        while True:
            for _ in range(self.buffer.capacity(version)):
                self.serial += 1
                group = PromptGroup(self.serial, self.next_prompt(), response_count=2, sent_at=version)
                self.buffer.add(group)
                self.left[group.serial] = self.chance.choice([1, 1, 2, 30])
            held = len(self.buffer.in_flight()) + len(self.buffer.finished_groups()) + len(batch)
            self.most = max(self.most, held)
            taken = self.buffer.take(version)
            if taken is None:
                self.finish_next(version)
                continue
            bad = [group for group in taken if self.chance.random() < self.reject_share]
            self.buffer.reject(bad)
            self.rejected.update(group.uid for group in bad)
            batch += [group for group in taken if group not in bad]
            if not bad:
                break
        self.trained.update(group.uid for group in batch)
        for _ in range(self.chance.randrange(4)):  # while the batch is trained
            self.finish_next(version)
        return batch

    def finish_next(self, version: int) -> None:
        groups = self.buffer.in_flight()
        if not groups:
            return
        shortest = min(groups, key=lambda group: (self.left[group.serial], -group.serial))
        for group in groups:
            self.left[group.serial] -= self.left[shortest.serial] if group is not shortest else 0
        del self.left[shortest.serial]
        oldest = self.chance.randint(shortest.sent_at, version)
        shortest.state = f"responses to {shortest.uid}"
        self.buffer.mark_finished(shortest, oldest)


@settings(max_examples=80)
@given(
    per_batch=st.integers(1, 4),
    staleness=st.integers(0, 4),
    strategy=st.sampled_from(["drop", "wait"]),
    in_order=st.booleans(),
    surplus=st.sampled_from([0, 0, 3]),
    reject_share=st.sampled_from([0.0, 0.0, 0.4]),
    prompts=st.integers(5, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_nothing_is_lost_or_repeated_or_too_old_whatever_finishes_when_and_over_restarts(
    per_batch, staleness, strategy, in_order, surplus, reject_share, prompts, seed
):
    chance, versions = random.Random(seed), 12
    settings_ = (per_batch, staleness, strategy, in_order, surplus, versions)
    run = Run(RolloutBuffer(*settings_), chance, prompts, reject_share)
    last = -1
    for version in range(versions):
        batch = run.step(version)
        assert len(batch) == per_batch
        assert all(0 <= version - group.base_version <= staleness for group in batch)
        assert all(group.state == f"responses to {group.uid}" for group in batch)
        if in_order and not surplus:
            assert [group.serial for group in batch] == sorted(group.serial for group in batch)
            assert last < batch[0].serial
            last = batch[-1].serial
        if chance.random() < 0.3:
            saved = json.loads(json.dumps(run.buffer.state()))
            run.buffer = RolloutBuffer(*settings_)
            run.buffer.load(saved)
    assert run.most <= (staleness + 1) * per_batch + surplus
    held = Counter(group.uid for group in [*run.buffer.in_flight(), *run.buffer.finished_groups()])
    waiting = Counter("{}/{}".format(*prompt) for prompt in run.stream)
    drawn = Counter(f"{epoch}/{number}" for epoch in range(run.epochs) for number in range(prompts))
    assert run.trained + run.rejected + held + waiting == drawn
    if not surplus:
        assert not held, "nothing is sent that no batch would use"
        assert max(run.dropped.values(), default=0) <= (0 if strategy == "wait" or in_order else 1)


def test_a_finished_group_whose_answers_were_not_saved_is_in_flight_again():
    buffer, again = RolloutBuffer(1, 1), RolloutBuffer(1, 1)
    buffer.mark_finished(send(buffer, 0), 0, partial=1)
    again.load(buffer.state() | {"finished": []})
    assert again.take(0) is None
    (group,) = again.in_flight()
    assert (group.oldest, group.partial) == (None, 0)
    again.mark_finished(group, 0)
    assert serials(again.take(0)) == [0]


def test_memory_is_bounded_while_the_trainer_stands_still():
    buffer = RolloutBuffer(8, 2, "drop")
    for serial in range(1000):
        if buffer.capacity(0):
            buffer.mark_finished(send(buffer, serial), 0)
    assert len(buffer.finished_groups()) == 16, "the next batch and the one after it"


def test_answers_do_not_grow_old_in_the_queue_of_a_slow_trainer():
    buffer, serial = RolloutBuffer(4, 8, "wait"), 0
    for version in range(20):
        for _ in range(buffer.capacity(version)):
            buffer.mark_finished(send(buffer, serial, version), version)
            serial += 1
        assert buffer.take(version) is not None
        assert buffer.metrics(version)["async/staleness/max"] <= 1


def test_sending_a_batch_does_not_look_at_all_groups_for_each_of_its_prompts():
    """With 512 devices tens of thousands are out."""
    looks = [0]

    class Watched(PromptGroup):
        def __getattribute__(self, name: str):
            looks[0] += 1
            return super().__getattribute__(name)

    buffer = RolloutBuffer(500, 3, "wait")
    groups = [Watched(serial, f"p{serial}", response_count=2, sent_at=0) for serial in range(buffer.capacity(0))]
    for group in groups:
        buffer.add(group)
        buffer.mark_finished(group, 0)
    assert looks[0] <= 20 * len(groups)
