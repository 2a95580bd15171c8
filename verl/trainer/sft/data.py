"""From files to the batches of supervised fine-tuning: which dataset, in which columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from verl.config import SFTDataConfig
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset, SFTDataset
from verl.utils.import_utils import load_user_object
from verl.utils.model import compute_position_id_with_mask


def create_sft_dataset(config: SFTDataConfig, tokenizer: Any, is_train: bool) -> Any:
    """The rows of `data.train_files` or `data.val_files`, by `data.custom_cls` or ours."""
    files = config.train_files if is_train else config.val_files
    limit = config.train_max_samples if is_train else config.val_max_samples
    custom = config.custom_cls
    if custom.path is not None and custom.name is not None:
        cls = load_user_object(
            custom.path,
            custom.name,
            key="data.custom_cls.path",
            required_params=("data_files", "tokenizer", "config", "max_samples"),
        )
        return cls(data_files=files, tokenizer=tokenizer, config=config, max_samples=limit)
    own: type[SFTDataset] = MultiTurnSFTDataset if config.multiturn else SFTDataset
    return own(files, tokenizer, config.to_dict(), max_samples=limit, split="train" if is_train else "validation")


def prompt_response_batch(rows: Sequence[Mapping[str, torch.Tensor]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Rows in the columns of a rollout: `prompts` left-padded, `responses` right-padded, and what follows from them.

    A row is cut before its first token to learn (but never before its first token, which nothing predicts), so that an
    engine computes probabilities only from there on. `response_mask` marks where the row's `loss_mask` is not 0 from
    the cut on; `loss_weights` are its values, where they are not all 0 or 1.
    """
    cuts = [_first_to_learn(row["loss_mask"]) for row in rows]
    prompts, responses = _cut_and_padded([row["input_ids"] for row in rows], cuts, pad_token_id)
    attention_mask = torch.cat(_cut_and_padded([row["attention_mask"] for row in rows], cuts, 0), dim=1)
    masks = [row["loss_mask"] for row in rows]
    weights = {}
    if any(mask.is_floating_point() for mask in masks):
        weights["loss_weights"] = _cut_and_padded([mask.float() for mask in masks], cuts, 0)[1]
        masks = [(mask != 0).long() for mask in masks]
    return weights | {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
        "response_mask": _cut_and_padded(masks, cuts, 0)[1],
    }


def _first_to_learn(loss_mask: torch.Tensor) -> int:
    marked = loss_mask.nonzero()
    return max(1, int(marked[0])) if len(marked) else len(loss_mask)


def _cut_and_padded(
    sequences: Sequence[torch.Tensor], cuts: Sequence[int], fill: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences before their cut, padded on the left, and after it, padded on the right."""
    before = [sequence[:cut] for sequence, cut in zip(sequences, cuts, strict=True)]
    after = [sequence[cut:] for sequence, cut in zip(sequences, cuts, strict=True)]
    return (
        pad_sequence(before, batch_first=True, padding_value=fill, padding_side="left"),
        pad_sequence(after, batch_first=True, padding_value=fill),
    )
