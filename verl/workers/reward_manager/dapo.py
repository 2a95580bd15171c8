"""DAPORewardManager: answers that come close to the length limit lose points (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.config.load import as_config
from verl.config.reward import OverlongBufferConfig
from verl.protocol import DataProto
from verl.workers.reward_manager.naive import NaiveRewardManager, response_lengths
from verl.workers.reward_manager.scorer import Score


class DAPORewardManager(NaiveRewardManager):
    """As `naive`, and `overlong_reward` of the response's length is added to every score.

    `overlong_buffer_cfg` is `reward_model.overlong_buffer`, `max_resp_len` the longest response in tokens. What the
    reward function said without the penalty is the field `acc`, unless the function returns one of that name. With
    `overlong_buffer.log` the fields `overlong` (1.0 where there is a penalty) and `overlong_reward` come along.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: OverlongBufferConfig | Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.overlong_buffer = as_config(OverlongBufferConfig, overlong_buffer_cfg)
        self.max_resp_len = max_resp_len
        if self.overlong_buffer.enable and (max_resp_len is None or max_resp_len < self.overlong_buffer.len):
            raise ValueError(
                f"reward_model.overlong_buffer.len: {self.overlong_buffer.len} tokens before a limit of {max_resp_len}."
                " Pass max_resp_len (data.max_response_length), and make the buffer a part of it."
            )
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **others)

    def shaped(self, data: DataProto, scores: Sequence[Score]) -> Sequence[Score]:
        if not self.overlong_buffer.enable:
            return scores
        return [
            score if score.error is not None else self._shaped(score, length)
            for score, length in zip(scores, response_lengths(data).tolist(), strict=True)
        ]

    def _shaped(self, score: Score, length: int) -> Score:
        assert self.max_resp_len is not None
        buffer = self.overlong_buffer
        penalty = overlong_reward(length, self.max_resp_len, buffer.len, buffer.penalty_factor)
        extra = {"acc": score.value, **score.extra}
        if buffer.log:
            extra |= {"overlong": float(penalty < 0), "overlong_reward": penalty}
        return dataclasses.replace(score, value=score.value + penalty, extra=extra)


def overlong_reward(length: int, longest: int, buffer: int, factor: float) -> float:
    """0 up to `longest - buffer` tokens, then falling in a line to `-factor` at `longest`, and no lower."""
    return factor * min(0.0, max(-1.0, (longest - buffer - length) / buffer))
