"""Batches whose rows have common prefixes, as groups, conversations and preference pairs have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.config import ActorConfig, as_config
from verl.protocol import DataProto

PROMPT, RESPONSE = 10, 6

# Prompt and response of each row.
BATCHES = {
    "groups": [
        *(([9, 8, 7, 6, 5], [n, 3, 4][: 1 + n % 3]) for n in range(4)),
        *(([9, 8, 1], [n + 2, 5]) for n in range(3)),
    ],
    "conversation": [
        ([5, 6, 7], [20, 21]),
        ([5, 6, 7, 20, 21, 30], [22, 23, 24]),
        ([5, 6, 7, 20, 21, 30, 22, 23], [25]),
        ([5, 6, 40], [26, 27]),
        ([5, 6, 7], [20, 28, 29]),
    ],
    "identical rows": [([5, 6, 7], [8, 9])] * 3,
    "nothing shared": [([5, 6], [7, 8]), ([6, 5], [7]), ([8], [7, 5])],
    "one shared token": [([5, 6], [7, 8]), ([5, 7], [7]), ([9, 6], [6])],
}


def shared_batch(name: str) -> DataProto:
    """A batch with the columns of `tests.support.engine_cases.make_batch`."""
    return batch_of(BATCHES[name])


def batch_of(rows: Sequence[tuple[list[int], list[int]]]) -> DataProto:
    """A batch with these columns for any prompts of up to 10 tokens and responses of up to 6."""
    ids = torch.full((len(rows), PROMPT + RESPONSE), 99)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(rows):
        begin, end = PROMPT - len(prompt), PROMPT + len(response)
        ids[row, begin:end] = torch.tensor([*prompt, *response])
        mask[row, begin:end] = 1
    generator = torch.Generator().manual_seed(0)
    shape = (len(rows), RESPONSE)
    sampled = mask[:, PROMPT:] * (torch.rand(shape, generator=generator) < 0.8)
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": sampled,
        "weights": torch.randn(shape, generator=generator),
        "teacher_top_ids": torch.randint(5, 264, (*shape, 3), generator=generator, dtype=torch.int32),
    }
    return DataProto.from_dict(tensors)


def computed_tokens(name: str) -> int:
    """Number of distinct prefixes of the rows of a batch."""
    rows = [[*prompt, *response] for prompt, response in BATCHES[name]]
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def policy_columns(data: DataProto) -> DataProto:
    """Add the columns that policy losses read."""
    generator = torch.Generator().manual_seed(1)
    shape = data.batch["responses"].shape
    for name in ("old_log_probs", "advantages", "ref_log_prob"):
        data.batch[name] = torch.randn(shape, generator=generator) - 5.0 * (name != "advantages")
    data.batch["trajectory_tokens"] = data.batch["response_mask"].sum(1)
    return data


def policy_config(mode: str, loss: str) -> ActorConfig:
    values = {"loss_agg_mode": mode, "loss_scale_factor": 6, "policy_loss": {"loss_mode": loss}}
    return as_config(ActorConfig, {**values, "use_kl_loss": True, "entropy_coeff": 0.01})
