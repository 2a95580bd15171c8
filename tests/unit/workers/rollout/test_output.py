"""The assembler on outputs of any shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.types.request import Output
from verl.workers.rollout.output import assemble_outputs


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5), st.integers(0, 3))
def test_every_token_log_prob_and_version_sits_in_its_column(rows, extra):
    width = 5
    prompt_mask = torch.stack([(torch.arange(width) >= width - prompt).long() for prompt, _ in rows])
    prompt_ids = prompt_mask * 9
    outputs = [
        Output([10 + i for i in range(n)], [-0.5 * (i + 1) for i in range(n)], [3 + i for i in range(n)])
        for _, n in rows
    ]
    longest = max(n for _, n in rows)
    batch = assemble_outputs(prompt_ids, prompt_mask, outputs, pad_token_id=2, response_length=longest + extra).batch
    for row, (prompt, n) in enumerate(rows):
        padding = longest + extra - n
        assert batch["responses"][row].tolist() == outputs[row].token_ids + [2] * padding
        assert batch["rollout_log_probs"][row].tolist() == outputs[row].log_probs + [0.0] * padding
        assert batch["rollout_versions"][row].tolist() == outputs[row].versions + [-1] * padding
        assert batch["response_mask"][row].tolist() == [1] * n + [0] * padding
        attended = batch["attention_mask"][row].bool()
        assert int(attended.sum()) == prompt + n
        assert batch["position_ids"][row][attended].tolist() == list(range(prompt + n))
        assert batch["input_ids"][row].tolist() == prompt_ids[row].tolist() + batch["responses"][row].tolist()


def test_a_width_that_cannot_hold_a_response_is_refused():
    with pytest.raises(ValueError, match="2 columns cannot hold a response of 3 tokens"):
        assemble_outputs(torch.ones(1, 1).long(), torch.ones(1, 1).long(), [Output([1] * 3, [0.0] * 3, [0] * 3)], 0, 2)
