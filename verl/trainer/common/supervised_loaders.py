"""The batches of a supervised run: training rows in an order that can be saved and restored, validation rows as is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from verl.config import SupervisedDataConfig
from verl.trainer.common.loader import BatchLoader
from verl.utils.dataset.sampler import EpochSampler


def train_loader(
    dataset: Any, config: SupervisedDataConfig, collate_fn: Callable[..., Any], items: str = "rows"
) -> BatchLoader:
    """Whole batches in an order fixed by `data.seed`; the position in it can be saved and restored.

    `items`: what the dataset counts, for a message.
    """
    if len(dataset) < config.train_batch_size:
        raise ValueError(
            f"data.train_batch_size = {config.train_batch_size}: data.train_files hold only {len(dataset)} {items}. "
            f"Set it to {len(dataset)} or less, or give more data."
        )
    sampler = EpochSampler(dataset, config.seed, config.shuffle, config.train_batch_size)
    return BatchLoader(
        dataset,
        sampler,
        batch_size=config.train_batch_size,
        drop_last=True,
        num_workers=config.dataloader_num_workers,
        collate_fn=collate_fn,
    )


def val_loader(dataset: Any, config: SupervisedDataConfig, collate_fn: Callable[..., Any]) -> DataLoader:
    """All rows in the order of the files."""
    return DataLoader(
        dataset, batch_size=config.val_batch_size, num_workers=config.dataloader_num_workers, collate_fn=collate_fn
    )
