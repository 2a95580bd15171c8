"""The one assembler: prompts and sampled outputs of any engine become the columns that training reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.protocol import DataProto, object_array
from verl.types.request import Output
from verl.utils.model import compute_position_id_with_mask

__all__ = ["NO_VERSION", "assemble_outputs"]

# What rollout_versions holds where nothing was sampled.
NO_VERSION = -1


def assemble_outputs(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    outputs: Sequence[Output],
    pad_token_id: int,
    response_length: int | None = None,
    with_drawn: bool = False,
) -> DataProto:
    """`prompt_ids`, `prompt_mask` [batch, prompt] (left-padded) and one output per row → the generated batch, on CPU.

    Responses are right-padded to the longest one, or to `response_length`. `response_mask` is 1 on every sampled token
    (the end token included); padding has log-prob 0 and version -1. `finish_reason` [batch] says what ended each: stop,
    length (it was cut) or abort. `with_drawn` adds `rollout_drawn_log_probs`: under the distribution that was really
    drawn from (0 where it was greedy), while `rollout_log_probs` are under the whole one at the temperature.
    """
    longest = max((len(output.token_ids) for output in outputs), default=0)
    width = longest if response_length is None else response_length
    if longest > width:
        raise ValueError(f"response_length: {width} columns cannot hold a response of {longest} tokens.")
    prompt_ids, prompt_mask = prompt_ids.cpu(), prompt_mask.cpu()
    responses = _right_padded([output.token_ids for output in outputs], width, pad_token_id, prompt_ids.dtype)
    lengths = torch.tensor([len(output.token_ids) for output in outputs], dtype=torch.int64)
    response_mask = (torch.arange(width) < lengths.unsqueeze(1)).to(torch.int64)
    attention_mask = torch.cat([prompt_mask, response_mask.to(prompt_mask.dtype)], dim=1)
    columns = {
        "prompts": prompt_ids,
        "responses": responses,
        "input_ids": torch.cat([prompt_ids, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
        "response_mask": response_mask,
        "rollout_log_probs": _right_padded([output.log_probs for output in outputs], width, 0.0, torch.float32),
        "rollout_versions": _right_padded([o.versions for o in outputs], width, NO_VERSION, torch.int64),
    }
    if with_drawn:
        drawn = [output.sampled_log_probs for output in outputs]
        columns["rollout_drawn_log_probs"] = _right_padded(drawn, width, 0.0, torch.float32)
    return DataProto.from_dict(columns, {"finish_reason": object_array([output.finish_reason for output in outputs])})


def _right_padded(rows: Sequence[Sequence[Any]], width: int, fill: float, dtype: torch.dtype) -> torch.Tensor:
    table = torch.full((len(rows), width), fill, dtype=dtype)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = torch.tensor(list(values), dtype=dtype)
    return table
