"""MultiTurnSFTDataset: conversations whose loss falls on everything the assistant says."""

from __future__ import annotations

from typing import ClassVar

from verl.utils.dataset.sft_dataset import SFTDataset


class MultiTurnSFTDataset(SFTDataset):
    """As SFTDataset, learning every answer of a conversation instead of the last one."""

    last_turn_only: ClassVar[bool] = False
