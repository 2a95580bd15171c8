"""From prompts with compared answers to batches: a row per answer, with the pairs in which it is the better one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from verl.algos.preference import Pairs
from verl.workers.roles.supervised import COMPARED

PROMPT = "prompt"
"""[answers]: the number of its prompt in the batch."""


def compared_answers(items: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Items of a `PreferenceDataset` as rows, right-padded; `answer_tokens` [answers] leaves prompts out."""
    answers = [ids for item in items for ids in item["answers"]]
    mask = pad_sequence([torch.ones_like(ids) for ids in answers], batch_first=True)
    return {
        "input_ids": pad_sequence(answers, batch_first=True, padding_value=pad_token_id),
        "attention_mask": mask,
        "answer_tokens": torch.tensor([tokens for item in items for tokens in item["answer_tokens"]]),
        PROMPT: torch.tensor([number for number, item in enumerate(items) for _ in item["answers"]]),
        COMPARED: _by_chosen(items, len(answers)),
    }


def pairs_of(columns: Mapping[str, torch.Tensor]) -> Pairs:
    """The pairs of a batch whose rows are in the order in which it was made."""
    compared = columns[COMPARED]
    chosen, place = (compared[..., 0] >= 0).nonzero(as_tuple=True)
    rejected, *numbers = compared[chosen, place].unbind(dim=1)
    return Pairs(chosen, rejected.long(), *numbers)


def _by_chosen(items: Sequence[Mapping[str, Any]], answers: int) -> torch.Tensor:
    found: list[list[list[float]]] = [[] for _ in range(answers)]
    first = 0
    for item in items:
        for chosen, rejected, *numbers in item["pairs"].tolist():
            found[first + int(chosen)].append([first + rejected, *numbers])
        first += len(item["answers"])
    compared = torch.full((answers, max(map(len, found)), 4), -1.0, dtype=torch.float64)
    for row, pairs in enumerate(found):
        if pairs:
            compared[row, : len(pairs)] = torch.tensor(pairs, dtype=torch.float64)
    return compared
