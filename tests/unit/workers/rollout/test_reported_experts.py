"""Experts that an engine reports when a request ends are those of its last version, and of no other."""

from __future__ import annotations

import numpy as np

from verl.inference.sequence import Sequence
from verl.types.request import Output, Request, SamplingParams
from verl.workers.rollout.third_party_tokens import accept_reported_experts, accept_scaled


def experts(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint8).reshape(-1, 1, 1)


def ended(versions: list[int], resume_from: Output | None = None) -> list[int]:
    """Row by row after a prompt of 3 tokens, each token of one version; the engine reports 1, 2, 3 …"""
    sequence = Sequence(Request("a", [7, 8, 9], SamplingParams(max_new_tokens=20), resume_from=resume_from))
    for version in versions:
        accept_scaled(sequence, [5], [-1.0], version, (1.0, 1.0, 1.0))
    total = 3 + len(sequence.output.token_ids)
    accept_reported_experts(sequence, experts(*range(1, total)), versions[-1])
    return sequence.output.routed_experts.flatten().tolist()


def test_tokens_of_an_earlier_version_have_unknown_experts():
    assert ended([4, 4, 4]) == [1, 2, 3, 4, 5]
    assert ended([3, 4, 4]) == [255, 255, 255, 4, 5], "the first token's pass read the prompt"
    assert ended([3, 3, 4]) == [255, 255, 255, 255, 5]


def test_what_an_earlier_output_knows_is_kept():
    earlier = Output([5, 5], [-1.0, -1.0], [3, 3], routed_experts=experts(50, 51, 52, 53))
    assert ended([4, 4], earlier) == [50, 51, 52, 53, 5, 6]
    same = Output([5, 5], [-1.0, -1.0], [4, 4])
    assert ended([4, 4], same) == [1, 2, 3, 4, 5, 6], "the prompt was computed again by the same version"
