"""Blocks: counted exactly, found by content only when the whole prefix is the same, forgotten oldest first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from verl.inference.block_manager import BlockManager
from verl.inference.sequence import Sequence
from verl.types.request import Request, SamplingParams


def sequence_of(tokens: list[int]) -> Sequence:
    return Sequence(Request("", tokens, SamplingParams()))


def computed(manager: BlockManager, tokens: list[int]) -> Sequence:
    """A sequence with blocks for its tokens, all of them computed."""
    sequence = sequence_of(tokens)
    assert manager.can_allocate(sequence)
    manager.allocate(sequence)
    sequence.num_computed_tokens = len(tokens)
    return sequence


def test_a_prefix_is_found_block_by_block_and_its_last_token_is_always_left_to_compute():
    manager = BlockManager(num_blocks=20, block_size=4)
    first = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    manager.cache_full_blocks(first)
    for tokens, reused in [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 2),
        ([1, 2, 3, 4, 5, 6, 7, 8], 1),
        ([1, 2, 3, 4, 0, 6, 7, 8, 9], 1),
        ([1, 2, 3, 4], 0),
        ([5, 6, 7, 8, 9], 0),
    ]:
        other = sequence_of(tokens)
        manager.allocate(other)
        assert other.num_computed_tokens == reused * 4, tokens
        assert other.block_table[:reused] == first.block_table[:reused]
        assert not set(other.block_table[reused:]) & set(first.block_table)


def test_a_block_is_not_found_where_other_tokens_come_before_it():
    manager = BlockManager(num_blocks=20, block_size=2)
    for tokens in ([1, 1, 7, 7, 0], [2, 2, 8, 8, 0]):
        manager.deallocate(computed(manager, tokens))
    other = sequence_of([1, 1, 8, 8, 0])
    manager.allocate(other)
    assert other.num_computed_tokens == 2


def test_content_survives_its_owner_and_the_longest_unused_is_forgotten_first():
    manager = BlockManager(num_blocks=4, block_size=2)
    for tokens in ([1, 1], [2, 2], [3, 3]):
        manager.deallocate(computed(manager, [*tokens, 0]))
        manager.deallocate(computed(manager, [1, 1, 0]))
    assert manager.free_blocks == 4
    kept = sequence_of([1, 1, 9, 9, 9])
    manager.allocate(kept)
    assert kept.num_computed_tokens == 2, "it was used again, and stayed"
    assert manager.free_blocks == 1
    for tokens, reused in (([2, 2, 0], 0), ([1, 1, 0], 2)):
        other = sequence_of(tokens)
        assert manager.can_allocate(other) is (tokens[0] == 1)
        if reused:
            manager.allocate(other)
            assert other.num_computed_tokens == reused


def test_of_a_prefix_the_end_is_forgotten_first():
    manager = BlockManager(num_blocks=3, block_size=2)
    manager.deallocate(computed(manager, [1, 1, 2, 2, 3, 3]))
    manager.deallocate(computed(manager, [8, 8]))
    other = sequence_of([1, 1, 2, 2, 3, 3])
    manager.allocate(other)
    assert other.num_computed_tokens == 4


def test_new_weights_make_all_content_unknown_also_that_of_sequences_under_way():
    manager = BlockManager(num_blocks=10, block_size=2)
    manager.deallocate(computed(manager, [1, 1, 1]))
    under_way = computed(manager, [2, 2, 2])
    manager.reset_prefix_cache()
    manager.deallocate(under_way)
    for tokens in ([1, 1, 1], [2, 2, 2]):
        other = sequence_of(tokens)
        manager.allocate(other)
        assert other.num_computed_tokens == 0
        manager.deallocate(other)
    assert manager.free_blocks == 10


def test_forks_share_full_blocks_and_copy_the_partly_filled_one():
    manager = BlockManager(num_blocks=10, block_size=4)
    parent = computed(manager, [1] * 10)
    children = [sequence_of([1] * 10) for _ in range(3)]
    copies = [manager.fork(parent, child) for child in children]
    assert manager.free_blocks == 10 - 3 - 3
    for child, copy in zip(children, copies, strict=True):
        assert child.block_table[:2] == parent.block_table[:2]
        assert copy == [(parent.block_table[2], child.block_table[2])]
    assert len({sequence.block_table[2] for sequence in (parent, *children)}) == 4
    manager.deallocate(parent)
    assert manager.free_blocks == 5, "the children still hold what they share"
    for child in children:
        manager.deallocate(child)
    assert manager.free_blocks == 10
    full = computed(manager, [1] * 8)
    assert manager.fork(full, sequence_of([1] * 8)) == [], "nothing to copy where the last block is full"


def test_giving_blocks_back_twice_is_noticed():
    manager = BlockManager(num_blocks=4, block_size=2, prefix_caching=False)
    sequence = computed(manager, [1, 2, 3])
    table = list(sequence.block_table)
    manager.deallocate(sequence)
    sequence.block_table = table
    with pytest.raises(AssertionError, match=r"block 1\b.*twice"):
        manager.deallocate(sequence)


class Traffic(RuleBasedStateMachine):
    """Sequences come, fork, grow and go, against a model that keeps whole prefixes in a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(num_blocks=12, block_size=2)
        self.alive: list[Sequence] = []
        # What each block holds: the tokens of its sequence up to its end, and since which flush.
        self.holds: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.flushes = 0

    def _compute(self, sequence: Sequence) -> None:
        """Fill the sequence's blocks, as a model would."""
        size = self.manager.block_size
        for index in range(sequence.num_computed_tokens // size, len(sequence.token_ids) // size):
            self.holds[sequence.block_table[index]] = (self.flushes, tuple(sequence.token_ids[: (index + 1) * size]))
        sequence.num_computed_tokens = len(sequence.token_ids)
        self.manager.cache_full_blocks(sequence)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), spare=st.integers(0, 2))
    def arrive(self, tokens, spare):
        sequence = sequence_of(tokens)
        before = self.manager.free_blocks
        if not self.manager.can_allocate(sequence, spare):
            return
        self.manager.allocate(sequence)
        assert before >= self.manager.free_blocks >= spare
        reused = sequence.num_computed_tokens // self.manager.block_size
        for index, block in enumerate(sequence.block_table[:reused]):
            assert self.holds[block] == (self.flushes, tuple(tokens[: (index + 1) * self.manager.block_size]))
        self._compute(sequence)
        self.alive.append(sequence)

    @precondition(lambda self: self.alive and self.manager.free_blocks)
    @rule(index=st.integers(0, 99))
    def fork(self, index):
        parent = self.alive[index % len(self.alive)]
        child = sequence_of(list(parent.token_ids))
        for source, target in self.manager.fork(parent, child):
            assert source in parent.block_table
            assert target in child.block_table
        self.alive.append(child)

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 99), token=st.integers(0, 1))
    def grow(self, index, token):
        sequence = self.alive[index % len(self.alive)]
        if len(sequence.token_ids) == len(sequence.block_table) * self.manager.block_size:
            if not self.manager.free_blocks:
                return
            self.manager.append(sequence)
        sequence.token_ids.append(token)
        size = self.manager.block_size
        index = (len(sequence.token_ids) - 1) // size
        sequence.num_computed_tokens = len(sequence.token_ids)
        self.holds[sequence.block_table[index]] = (self.flushes, tuple(sequence.token_ids))

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 99))
    def go(self, index):
        self.manager.deallocate(self.alive.pop(index % len(self.alive)))

    @rule()
    def flush(self):
        self.manager.reset_prefix_cache()
        self.flushes += 1

    @invariant()
    def blocks_are_counted(self):
        held = Counter(block for sequence in self.alive for block in sequence.block_table)
        assert self.manager.free_blocks == self.manager.num_blocks - len(held)
        assert [held[block] for block in range(self.manager.num_blocks)] == self.manager.references
        for sequence in self.alive:
            assert len(sequence.block_table) == self.manager.num_blocks_for(len(sequence.token_ids))


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestTraffic = Traffic.TestCase
