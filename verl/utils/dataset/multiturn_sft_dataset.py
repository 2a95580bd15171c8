"""Alias: `MultiTurnSFTDataset` under the name that users import."""

from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset

__all__ = ["MultiTurnSFTDataset"]
