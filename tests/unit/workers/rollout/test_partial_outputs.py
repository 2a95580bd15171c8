"""Partial outputs: parts joined at once are those joined one by one."""

from __future__ import annotations

import functools
import random
import time

import numpy as np
import pytest

from verl.types.request import Output, join_outputs, resumable

PROMPT = 5


def part_of(start: int, count: int, experts: bool, sampled: bool) -> Output:
    tokens = list(range(start, start + count))
    part = Output(tokens, [float(token) for token in tokens], [token // 4 for token in tokens])
    if sampled:
        part.sampled_log_probs = [token / 2 for token in tokens]
    if experts and count:
        first, last = 0 if start == 0 else PROMPT + start - 1, PROMPT + start + count - 1
        part.routed_experts = np.arange(first, last, dtype=np.uint8).reshape(-1, 1, 1)
    return part


@pytest.mark.parametrize("seed", range(20))
def test_parts_joined_at_once_are_those_joined_one_by_one(seed):
    chance, parts, start = random.Random(seed), [], 0
    for _ in range(chance.randint(1, 6)):
        parts.append(part_of(start, chance.randint(1, 4), chance.random() < 0.7, chance.random() < 0.7))
        start += len(parts[-1].token_ids)
    if chance.random() < 0.5:
        parts[0] = resumable(part_of(0, len(parts[0].token_ids) + 1, True, True))
    if chance.random() < 0.3:
        parts.insert(0, Output())
    expected = functools.reduce(lambda first, then: join_outputs([first, then], PROMPT), parts)
    joined = join_outputs(parts, PROMPT)
    assert joined.token_ids == expected.token_ids
    assert (joined.log_probs, joined.versions) == (expected.log_probs, expected.versions)
    np.testing.assert_array_equal(joined.sampled_log_probs, expected.sampled_log_probs)
    if expected.routed_experts is None:
        assert joined.routed_experts is None
    else:  # rows missing at the end are unknown
        known = len(joined.routed_experts)
        np.testing.assert_array_equal(joined.routed_experts, expected.routed_experts[:known])
        assert (expected.routed_experts[known:] == 255).all()


def test_joining_many_parts_takes_time_linear_in_their_number():
    parts = [part_of(60 * number, 60, False, True) for number in range(500)]
    started = time.perf_counter()
    joined = join_outputs(parts, PROMPT)
    assert joined.token_ids == list(range(30_000))
    assert time.perf_counter() - started < 1.0
