"""Batches of responses, and reward managers that are closed after the test."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import tiny_tokenizer
from verl import DataProto
from verl.workers.reward_manager import Sample, get_reward_manager_cls

TOKENIZER = tiny_tokenizer()
WIDTH = 24


def make_batch(texts, masks=None, **columns) -> DataProto:
    """Prompts of three tokens, responses right-padded to `WIDTH`; `masks` marks the tokens that the model sampled."""
    ids = [TOKENIZER(text + "<|end|>", add_special_tokens=False)["input_ids"] for text in texts]
    lengths = [len(row) for row in ids]
    responses = torch.tensor([row + [0] * (WIDTH - len(row)) for row in ids])
    present = torch.tensor([[1] * length + [0] * (WIDTH - length) for length in lengths])
    tensors = {
        "prompts": torch.full((len(texts), 3), 9),
        "responses": responses,
        "attention_mask": torch.cat([torch.tensor([[0, 1, 1]] * len(texts)), present], dim=1),
        "response_mask": present if masks is None else torch.tensor(masks),
    }
    rows = {
        "data_source": ["openai/gsm8k"] * len(texts),
        "reward_model": [{"style": "rule", "ground_truth": "72"}] * len(texts),
        "extra_info": [{"index": i} for i in range(len(texts))],
        **columns,
    }
    return DataProto.from_dict(tensors, rows)


@pytest.fixture
def batch():
    return make_batch


@pytest.fixture
def sample():
    return Sample


@pytest.fixture
def manager():
    """`manager(name, compute_score=None, **arguments)`: create a reward manager."""
    managers = []

    def make(name, compute_score=None, num_examine=0, **arguments):
        managers.append(get_reward_manager_cls(name)(TOKENIZER, num_examine, compute_score, **arguments))
        return managers[-1]

    yield make
    for opened in managers:
        opened.close()
