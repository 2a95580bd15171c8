"""The order of prompts: every row once, known from seed and epoch, resumed exactly."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler
from verl.utils.dataset.rl_dataset import EpochSampler


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 7), st.booleans(), st.data())
def test_a_resumed_order_is_the_uninterrupted_one(rows, seed, batch_size, shuffle, data):
    batch_size = min(batch_size, rows)

    def sampler():
        return EpochSampler(range(rows), seed, shuffle, batch_size)

    def endless(source):
        return itertools.chain.from_iterable(iter(source) for _ in itertools.count())

    per_epoch = rows // batch_size * batch_size
    whole = list(itertools.islice(endless(sampler()), 3 * per_epoch))
    for epoch in range(3):
        assert len(set(whole[epoch * per_epoch : (epoch + 1) * per_epoch])) == per_epoch
    stop = data.draw(st.integers(0, 3 * per_epoch))
    first = sampler()
    seen = list(itertools.islice(endless(first), stop))
    second = sampler()
    second.load_state_dict(first.state_dict())
    assert seen + list(itertools.islice(endless(second), 3 * per_epoch - stop)) == whole


@given(st.integers(1, 30), st.integers(1, 9))
def test_in_file_order_every_row_is_seen_and_none_twice_before_all_are(rows, batch_size):
    """The rows at the end of an epoch that fill no batch come first in the next."""
    batch_size = min(batch_size, rows)
    sampler = EpochSampler(range(rows), 0, shuffle=False, batch_size=batch_size)
    epochs = [list(sampler) for _ in range(rows + 1)]
    assert all(len(epoch) == rows // batch_size * batch_size for epoch in epochs), "as many steps as ever"
    drawn = [row for epoch in epochs for row in epoch]
    assert drawn == [place % rows for place in range(len(drawn))]


def test_another_seed_or_size_cannot_resume():
    state = EpochSampler(range(5), seed=1).state_dict()
    with pytest.raises(ValueError, match=r"^data\.seed: .*\b1\b.*\b5 rows, .*\b2\b.*\b5\."):
        EpochSampler(range(5), seed=2).load_state_dict(state)


def test_a_curriculum_of_the_user_derives_from_the_base_classes():
    class Hardest(AbstractCurriculumSampler):
        def __init__(self, data_source, data_config):
            self.order = list(range(len(data_source)))

        def __iter__(self):
            return iter(self.order)

        def __len__(self):
            return len(self.order)

        def update(self, batch):
            self.order.sort(key=lambda row: batch[row])

    sampler = Hardest("abc", None)
    assert isinstance(sampler, AbstractSampler)
    sampler.update([3, 1, 2])
    assert list(sampler) == [1, 2, 0]
    with pytest.raises(TypeError, match=r"AbstractCurriculumSampler .*__init__, update"):
        AbstractCurriculumSampler("abc", None)
