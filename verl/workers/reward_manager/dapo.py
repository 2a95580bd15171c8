"""DAPORewardManager: a penalty for responses close to the length limit (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.config.load import as_config
from verl.config.roles import OverlongBufferConfig
from verl.protocol import DataProto
from verl.workers.reward_manager.naive import NaiveRewardManager, response_lengths
from verl.workers.reward_manager.registry import register_reward_manager
from verl.workers.reward_manager.scorer import Score


@register_reward_manager("dapo", overlong_buffer=True)
class DAPORewardManager(NaiveRewardManager):
    """Like NaiveRewardManager, but adds `overlong_reward` of the response's length to every score.

    `overlong_buffer_cfg`: the block `reward_model.overlong_buffer`; `max_resp_len`: the maximum response length in
    tokens. The field `acc` is the score without the penalty, unless the reward function returns a field of that name.
    With `overlong_buffer.log` there are also the fields `overlong` (1.0 if there is a penalty) and `overlong_reward`.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: OverlongBufferConfig | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.overlong_buffer = as_config(OverlongBufferConfig, overlong_buffer_cfg)
        self.max_resp_len = max_resp_len
        if self.overlong_buffer.enable and (max_resp_len is None or max_resp_len < self.overlong_buffer.len):
            raise ValueError(
                f"reward_model.overlong_buffer.len: {self.overlong_buffer.len} tokens, but the response limit is"
                f" {max_resp_len}. Pass max_resp_len (data.max_response_length), and a buffer of at most its length."
            )
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **kwargs)

    def shape_scores(self, data: DataProto, scores: Sequence[Score]) -> Sequence[Score]:
        if not self.overlong_buffer.enable:
            return scores
        return [
            score if score.error is not None else self._with_penalty(score, length)
            for score, length in zip(scores, response_lengths(data).tolist(), strict=True)
        ]

    def _with_penalty(self, score: Score, length: int) -> Score:
        assert self.max_resp_len is not None
        buffer = self.overlong_buffer
        penalty = overlong_reward(length, self.max_resp_len, buffer.len, buffer.penalty_factor)
        extra = {"acc": score.value, **score.extra}
        if buffer.log:
            extra |= {"overlong": float(penalty < 0), "overlong_reward": penalty}
        return dataclasses.replace(score, value=score.value + penalty, extra=extra)


def overlong_reward(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Return 0 up to `max_length - buffer` tokens, then linearly less, down to `-factor` from `max_length` on."""
    return factor * min(0.0, max(-1.0, (max_length - buffer - length) / buffer))
