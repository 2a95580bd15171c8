"""Length balancing: exact partitions, proven bounds, laws, and the optimum on cases small enough to try everything."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils import seqlen_balancing
from verl.utils.balancing import (
    COST_PER_TOKEN,
    SequenceCost,
    ceildiv,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    log_seqlen_unbalance,
    roundup_divisible,
)

METHODS = [karmarkar_karp, get_seqlen_balanced_partitions]


def sums(lengths, partitions):
    return [sum(lengths[index] for index in partition) for partition in partitions]


def assert_exact_partition(lengths, partitions, k, equal_size):
    assert sorted(itertools.chain(*partitions)) == list(range(len(lengths)))
    assert len(partitions) == k
    sizes = [len(partition) for partition in partitions]
    assert min(sizes) >= 1
    if equal_size:
        assert sizes == [len(lengths) // k] * k


def best_possible(lengths, k, equal_size):
    """The smallest heaviest sum over all assignments; for tiny cases only."""
    best = math.inf
    for owners in itertools.product(range(k), repeat=len(lengths)):
        counts = [owners.count(rank) for rank in range(k)]
        if (equal_size and set(counts) != {len(lengths) // k}) or min(counts) == 0:
            continue
        totals = [0] * k
        for length, owner in zip(lengths, owners, strict=True):
            totals[owner] += length
        best = min(best, max(totals))
    return best


def longest_first(lengths, k):
    heap = [0] * k
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(heap, heap[0] + length)
    return max(heap)


def adversarial(kind: str, n: int, k: int) -> list[int]:
    rng = random.Random(n * k)
    return {
        "all equal": [7] * n,
        "all zero": [0] * n,
        "one giant": [1] * (n - 1) + [10**9],
        "powers of two": [2 ** (i % 40) for i in range(n)],
        "worst for greedy": [2 * k - 1 - i // 2 for i in range(2 * k)] + [k] * (n - 2 * k),
        "two lengths": [1 if i % 2 else 4096 for i in range(n)],
        "long tail": [int(100 * rng.paretovariate(1.1)) for _ in range(n)],
        "descending": list(range(n, 0, -1)),
    }[kind]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 1), (8, 8), (24, 3), (64, 8), (1024, 64)])
@pytest.mark.parametrize(
    "kind",
    [
        "all equal",
        "all zero",
        "one giant",
        "powers of two",
        "worst for greedy",
        "two lengths",
        "long tail",
        "descending",
    ],
)
def test_adversarial_lengths_give_exact_partitions_within_the_bounds(kind, n, k, equal_size, method):
    lengths = adversarial(kind, n, k)[:n]
    partitions = method(lengths, k, equal_size)
    assert_exact_partition(lengths, partitions, k, equal_size)
    totals = sums(lengths, partitions)
    if method is karmarkar_karp:
        assert max(totals) - min(totals) <= max(lengths)
    assert max(totals) <= sum(lengths) / k + max(lengths)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=7), st.integers(2, 3))
def test_within_the_proven_ratio_of_the_optimum(lengths, k):
    if len(lengths) < k:
        return
    optimum = best_possible(lengths, k, equal_size=False)
    # Michiels et al.: differencing is within 4/3 - 1/(3k) of the optimum, 7/6 for two sets.
    ratio = 7 / 6 if k == 2 else 4 / 3 - 1 / (3 * k)
    for method in METHODS:
        assert max(sums(lengths, method(lengths, k, False))) <= ratio * optimum + 1e-9


@settings(max_examples=100)
@given(st.lists(st.integers(0, 60), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_equal_sizes_reach_the_optimum_for_pairs_and_for_two_ranks_of_three(lengths, k):
    # Pairs: longest with shortest is optimal. Two sets of three: every other split is one swap away.
    optimum = best_possible(lengths, k, equal_size=True)
    assert max(sums(lengths, get_seqlen_balanced_partitions(lengths, k, True))) == optimum


@settings(max_examples=100)
@given(st.data(), st.booleans(), st.integers(1, 9), st.integers(1, 12))
def test_laws_on_random_lengths(data, equal_size, k, rows):
    n = k * rows if equal_size else k + rows - 1
    lengths = data.draw(st.lists(st.integers(0, 5000), min_size=n, max_size=n))
    shuffled = data.draw(st.permutations(lengths))
    scale = data.draw(st.integers(2, 50))
    for method in METHODS:
        partitions = method(lengths, k, equal_size)
        assert_exact_partition(lengths, partitions, k, equal_size)
        assert partitions == method(lengths, k, equal_size)
        assert partitions == method([length * scale for length in lengths], k, equal_size)
    differenced = sums(lengths, karmarkar_karp(lengths, k, equal_size))
    assert max(differenced) - min(differenced) <= max(lengths)
    assert sorted(differenced) == sorted(sums(shuffled, karmarkar_karp(shuffled, k, equal_size)))
    improved = sums(lengths, get_seqlen_balanced_partitions(lengths, k, equal_size))
    assert max(improved) <= max(differenced)


def test_textbook_example():
    # 8 7 6 5 4 over two sets: differencing leaves 2 (16 against 14); over three: 11, 11, 8.
    assert sorted(sums([4, 5, 6, 7, 8], karmarkar_karp([4, 5, 6, 7, 8], 2, False))) == [14, 16]
    assert sorted(sums([4, 5, 6, 7, 8], karmarkar_karp([4, 5, 6, 7, 8], 3, False))) == [8, 11, 11]
    assert karmarkar_karp([1, 9, 2, 8], 2, True) == [[0, 1], [2, 3]]


def textbook_differencing(lengths, k):
    """Largest differencing written plainly: every partial solution is k sums. Returns the final sums."""
    states = [sorted([0] * (k - 1) + [length]) for length in lengths]
    while len(states) > 1:
        states.sort(key=lambda state: state[0] - state[-1])
        first, second = states.pop(0), states.pop(0)
        states.append(sorted(a + b for a, b in zip(first, reversed(second), strict=True)))
    return states[0]


@settings(max_examples=80)
@given(st.lists(st.integers(0, 10**9) | st.integers(0, 9), min_size=5, max_size=40), st.integers(2, 5))
def test_the_sparse_form_equals_the_textbook_method(lengths, k):
    assert sorted(sums(lengths, karmarkar_karp(lengths, k, False))) == textbook_differencing(lengths, k)


def test_better_than_longest_first_greedy_on_uniform_lengths():
    rng = np.random.default_rng(0)
    wins = 0
    for _ in range(20):
        lengths = rng.integers(1, 4096, 512).tolist()
        wins += max(sums(lengths, get_seqlen_balanced_partitions(lengths, 16, False))) < longest_first(lengths, 16)
    assert wins >= 19


def test_equal_sizes_with_a_long_tail_put_the_shortest_rows_beside_the_longest():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1, 256), 1, 16384).astype(int).tolist()
    rows = len(lengths) // 64
    bound = max(max(lengths) + sum(sorted(lengths)[: rows - 1]), sum(lengths) / 64)
    assert max(sums(lengths, get_seqlen_balanced_partitions(lengths, 64, True))) <= 1.02 * bound


@pytest.mark.slow
@pytest.mark.parametrize("equal_size", [False, True])
def test_100k_lengths_over_1024_ranks_are_even(equal_size):
    n = 1024 * 97
    lengths = np.random.default_rng(1).integers(1, 8192, n).tolist()
    partitions = get_seqlen_balanced_partitions(lengths, 1024, equal_size)
    totals = sums(lengths, partitions)
    assert_exact_partition(lengths, partitions, 1024, equal_size)
    assert max(totals) <= 1.001 * sum(totals) / 1024


def test_tensors_arrays_and_floats_are_accepted():
    lengths = [5, 3, 9, 1, 7, 2]
    expected = get_seqlen_balanced_partitions(lengths, 2, True)
    for given_as in (torch.tensor(lengths), np.array(lengths), [float(length) for length in lengths]):
        assert get_seqlen_balanced_partitions(given_as, 2, True) == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("lengths", "k", "equal_size", "message"),
    [
        ([], 1, False, "^seqlen_list: 0 .*1 partitions"),
        ([1, 2], 3, False, "^seqlen_list: 2 .*3 partitions"),
        ([1, 2, 3], 2, True, "^seqlen_list: 3 .*2 partitions.*4 .*equal_size=False"),
        ([1, -2, 3], 2, False, r"^seqlen_list: entry 1 .*-2\."),
        ([1, float("nan")], 2, False, r"^seqlen_list: entry 1 .*nan\."),
        ([1, 2], 0, False, "^k_partitions: 0 "),
    ],
)
def test_bad_input_is_refused_with_the_reason(method, lengths, k, equal_size, message):
    with pytest.raises(ValueError, match=message):
        method(lengths, k, equal_size)


def test_unbalance_metrics_compare_chunks_as_they_came_with_the_partition():
    metrics = log_seqlen_unbalance([10, 10, 1, 1], [[0, 2], [1, 3]], prefix="global_seqlen")
    assert metrics == {
        "global_seqlen/min": 2,
        "global_seqlen/max": 20,
        "global_seqlen/minmax_diff": 18,
        "global_seqlen/balanced_min": 11,
        "global_seqlen/balanced_max": 11,
        "global_seqlen/mean": 11,
    }
    with pytest.raises(ValueError, match=r"^partitions: .*get_seqlen_balanced_partitions"):
        log_seqlen_unbalance([1], [], prefix="x")


@given(st.permutations(list(range(20))))
def test_reverse_index_undoes_a_permutation(permutation):
    reverse = get_reverse_idx(permutation)
    assert [permutation[i] for i in reverse] == list(range(20))
    assert [reverse[i] for i in permutation] == list(range(20))


def test_reverse_index_refuses_what_is_not_a_permutation():
    with pytest.raises(ValueError, match=r"^idx_map: .*position 1\b.*\b0\b"):
        get_reverse_idx([0, 0])
    with pytest.raises(ValueError, match=r"^idx_map: .*position 0\b.*\b2\b"):
        get_reverse_idx([2, 0])


@given(st.integers(0, 10**20), st.integers(1, 10**6))
def test_ceildiv_and_roundup_are_exact(a, b):
    assert (ceildiv(a, b) - 1) * b < a <= ceildiv(a, b) * b or a == 0 == ceildiv(a, b)
    assert roundup_divisible(a, b) % b == 0
    assert 0 <= roundup_divisible(a, b) - a < b


def test_the_public_module_offers_the_same_functions():
    assert seqlen_balancing.karmarkar_karp is karmarkar_karp
    assert seqlen_balancing.get_seqlen_balanced_partitions is get_seqlen_balanced_partitions


SHAPE = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
}


def test_the_cost_of_a_small_shape_by_hand():
    """Per layer q and o 8×8 each, k and v 8×4 each, three MLP matrices 8×16: 576 weights, 2 operations each."""
    cost = SequenceCost.from_config(SHAPE)
    assert cost.token == 2 * 2 * (2 * 64 + 2 * 32 + 3 * 128)
    assert cost.head == 2 * 8 * 100
    assert cost.pair == 2 * 2 * 8, "scores and values: 2 × 2 operations per pair and channel, of half the pairs"
    assert cost([10], [4]).tolist() == [10 * cost.token + 4 * cost.head + 100 * cost.pair]


def test_a_mixture_counts_the_experts_that_a_token_visits():
    dense, mixed = SequenceCost.from_config(SHAPE), {**SHAPE, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert SequenceCost.from_config(mixed).token == dense.token
    assert SequenceCost.from_config({"text_config": SHAPE, "vocab_size": 1}) == dense


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size"])
def test_a_shape_under_other_names_counts_tokens(missing):
    assert SequenceCost.from_config({name: value for name, value in SHAPE.items() if name != missing}) is COST_PER_TOKEN
    assert COST_PER_TOKEN([3, 4], [1, 1]).tolist() == [3, 4]


def test_a_folder_is_read_and_anything_else_counts_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    assert SequenceCost.from_folder(tmp_path) == SequenceCost.from_config(SHAPE)
    assert SequenceCost.from_folder(tmp_path, {"num_hidden_layers": 4}).pair == 2 * SequenceCost.from_config(SHAPE).pair
    assert SequenceCost.from_folder("some/hub-name") is COST_PER_TOKEN
